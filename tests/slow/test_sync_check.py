"""
The sync check on a real engine: how far apart health and faults lie, and what stops a run.

With `-s` the figures are printed, which dev/numerics.md sums up.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tools.report import folders

from slow.isolated import isolated
from slow.toys import make_trainer, prompts, save_model


pytestmark = pytest.mark.slow
CASES = ["none", "W4A16", "FP8_DYNAMIC"]
# What vLLM keeps in one layer.
GROUPS = {"qkv": "[qkv]_proj", "o": "o_proj", "gate_up": "(gate|up)_proj", "down": "down_proj"}
# Honest kernels that differ, as on a GPU; on the engine's operations the mismatch of a healthy engine is 0.
STOCK = {"vllm_max_model_length": 192, "max_completion_length": 16, "learner_ops": "stock", "verify_sync": 1}


def _outcome(function: Callable, *args: Any) -> str:
    try:
        function(*args)
    except RuntimeError as error:
        return str(error)
    return "passed"


def readings_of(model: str, folder: str, scheme: str) -> dict[str, Any]:
    trainer = make_trainer(model, Path(folder), quant_scheme=scheme, **STOCK)
    torch.manual_seed(0)
    return {"first": _first_sync(trainer, model, scheme), "later": _later_syncs(trainer)}


def _first_sync(trainer: Any, model: str, scheme: str) -> dict[str, dict[str, Any]]:
    """Readings of a healthy engine, of noisy ones and of faulty ones."""
    import re

    from transformers import AutoModelForCausalLM

    from qarl_trl.quant import apply_quantization
    from qarl_trl.rollout import sync_check as module
    from qarl_trl.rollout.sync_check import engine_logps, learner_logps, read_first

    engine, sync_check = trainer.vllm_generation, trainer.vllm_generation.sync_check
    learner, found = sync_check.score(), {}

    def read(name: str, by: Any = learner, answers: torch.Tensor | None = None) -> None:
        answers = engine_logps(engine.llm, sync_check.token_ids) if answers is None else answers
        reading = read_first(answers, by, sync_check.before)
        found[name] = reading._asdict() | {"wrong": reading.wrong}

    read("never synced")
    engine.sync_weights()
    read("healthy")

    # An engine that rounds ten times as coarsely.
    seed, rounding = module.SEED, module.ROUNDING
    for number in range(10):
        module.SEED, module.ROUNDING = seed + number, 10 * rounding
        read(f"rounding x10, {number}", answers=sync_check.score().noisy)
    module.SEED, module.ROUNDING = seed, rounding

    # Another scheme: what the learner computes here is what an engine would that got another configuration.
    other = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    apply_quantization(other, "W8A8" if scheme == "W4A16" else "W4A16")
    with torch.autocast("cpu", torch.bfloat16):
        read("other scheme", learner_logps(other, sync_check.token_ids))

    master_weights = {n: p for n, p in trainer.model.named_parameters() if "proj" in n}
    kept = {name: p.detach().clone() for name, p in master_weights.items()}
    patterns = {f"layer {k}.{name}": rf"layers\.{k}\..*{part}" for k in (0, 3) for name, part in GROUPS.items()}
    for where, pattern in (patterns | {"all": ""}).items():
        names = [name for name in master_weights if re.search(pattern, name)]
        for kind in ("unloaded", "random"):
            with torch.no_grad():
                for name in names:
                    size = 1e-3 if kind == "unloaded" else kept[name].std().item() * 3**0.5
                    master_weights[name].uniform_(-size, size)
            engine.sync_weights()
            read(f"{kind} {where}")
        with torch.no_grad():
            for name in names:
                master_weights[name].copy_(kept[name])
    return found


def _later_syncs(trainer: Any) -> dict[str, Any]:
    """What the checks after syncs say while the learner moves."""
    engine, sync_check, found = trainer.vllm_generation, trainer.vllm_generation.sync_check, {}
    stream = type(engine)._iter_named_params

    def sync_and_check(name: str, kept: str | None = None) -> None:
        """Weight sync, but for tensors of the earlier sync `old` whose names have `kept` in them."""
        engine._iter_named_params = lambda: (
            (n, old[n] if kept is not None and kept in n else tensor) for n, tensor in stream(engine)
        )
        engine.sync_weights()
        found[name] = _outcome(lambda: found.update({f"{name}, reading": sync_check.check(engine.llm, 2)._asdict()}))

    sync_and_check("healthy")
    sync_and_check("nothing moved")
    old = {name: tensor.clone() for name, tensor in stream(engine)}
    with torch.no_grad():
        for p in trainer.model.parameters():
            p.add_(0.02 * torch.randn_like(p) * (p.ndim > 1))
    sync_and_check("stale layer", "layers.1.mlp.")
    sync_and_check("stale engine", "")
    sync_and_check("healthy again")
    return found


@pytest.fixture(scope="module", params=CASES)
def readings(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sync_check")
    found = isolated(readings_of, save_model(folder / "model", layers=4), str(folder / "run"), request.param)
    before = found["first"]["never synced"]["logp_diff"]
    for name, row in found["first"].items():
        figures = (row["logp_diff"] / before, row["logp_diff"] / row["noise_floor"], row["limit"] / row["noise_floor"])
        print(f"{request.param:11} {name:24}", *(f"{x:8.2f}" for x in figures), "stops" * row["wrong"])
    return found


def test_a_healthy_engine_is_far_from_every_limit(readings):
    row = readings["first"]["healthy"]
    assert row["logp_diff"] < 0.1 * readings["first"]["never synced"]["logp_diff"]  # measured: 0.01 to 0.064
    assert row["logp_diff"] < 1.4 * row["noise_floor"] < 0.5 * row["limit"]
    for name in ("healthy", "nothing moved", "healthy again"):
        reading = readings["later"][f"{name}, reading"]
        assert reading["logp_diff"] < 0.5 * reading["limit"]
    assert readings["later"]["healthy again, reading"]["followed"] == pytest.approx(1, abs=0.1)


def test_ten_times_coarser_rounding_stops_no_run(readings):
    noisy = [row for name, row in readings["first"].items() if " x10" in name]
    assert len(noisy) == 10
    assert not any(row["wrong"] for row in noisy)


def test_every_fault_stops_the_run(readings):
    """A sync that never came, one layer or all that were not loaded or hold other weights, another scheme."""
    faults = {n: row for n, row in readings["first"].items() if n != "healthy" and " x10" not in n}
    assert len(faults) == 20
    assert not [name for name, row in faults.items() if not row["wrong"]]


def test_one_layer_that_a_later_sync_left_out_stops_the_run(readings):
    assert "the engine does not hold the synced weights" in readings["later"]["stale layer"]


def test_an_engine_that_did_not_follow_is_called_stale(readings):
    assert "followed 0 %" in readings["later"]["stale engine"]


def _train(
    model: str, folder: str, changes: dict[str, Any], broken: str | None, evaluate: bool = False
) -> dict[str, Any]:
    import logging

    trainer = make_trainer(model, Path(folder), **changes)
    if broken is not None:
        from qarl_trl.rollout import _vllm

        reload_engine = _vllm.reload_engine

        def reload_and_break(llm: Any, weights: Any) -> None:
            reload_engine(llm, weights)
            layer = _vllm.engine_model(llm).get_submodule(broken)
            layer.weight_scale.data.mul_(0)

        _vllm.reload_engine = reload_and_break
    if evaluate:
        trainer.args.eval_strategy, trainer.args.eval_steps, trainer.eval_dataset = "steps", 2, prompts(8)
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("qarl_trl.rollout.sync_check").addHandler(handler)
    outcome = _outcome(trainer.train)
    return {"outcome": outcome, "said": said, "log": trainer.state.log_history, "steps": trainer.state.global_step}


def test_a_learner_in_high_precision_is_checked_by_the_low_bit_model(tmp_path):
    changes = {"verify_sync": 1, "quantize_learner": False}
    result = isolated(_train, save_model(tmp_path / "model"), str(tmp_path / "run"), changes, None)
    assert (result["outcome"], result["said"], result["steps"]) == ("passed", [], 4)
    assert sum("sync/verify_logp_diff" in row for row in result["log"]) == 2


def test_a_run_with_a_broken_layer_stops_before_its_first_step(tmp_path):
    model = save_model(tmp_path / "model")
    result = isolated(_train, model, str(tmp_path / "run"), {}, "model.layers.1.mlp.down_proj")
    assert "After sync 1 the engine's log-probs of the sync check prompt" in result["outcome"]
    assert result["steps"] == 0


def test_a_healthy_run_passes_and_the_sync_of_an_evaluation_counts_for_the_step_that_samples_with_it(tmp_path):
    """Steps 1 and 3 sample; what step 3 samples with was synced by the evaluation after step 2."""
    model = save_model(tmp_path / "model")
    result = isolated(_train, model, str(tmp_path / "run"), {"per_device_eval_batch_size": 8}, None, True)
    assert (result["outcome"], result["said"], result["steps"]) == ("passed", [], 4)
    assert sum("sync/verify_logp_diff" in row for row in result["log"]) == 1
    assert set(folders.log(1)[0]) <= set().union(*result["log"])  # what the report's tests draw is what a run logs
    assert [row["step"] for row in result["log"] if "eval_reward" in row] == [2, 4]
    assert [row["step"] for row in result["log"] if "sync/bytes" in row] == [1, 3]
    assert [row["step"] for row in result["log"] if "quant/flip_frac" in row] == [3]
