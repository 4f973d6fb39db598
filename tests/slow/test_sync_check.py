"""
The sync check on a real engine: how far apart health and faults lie, and what stops a run.

With `-s` the figures are printed, which dev/numerics.md sums up.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tools.report import folders

from slow.isolated import isolated
from slow.toys import as_sample, copies, make_trainer, prompts, save_model


pytestmark = pytest.mark.slow
CASES = ["none", "W4A16", "FP8_DYNAMIC"]
# What vLLM keeps in one layer.
GROUPS = {"qkv": "[qkv]_proj", "o": "o_proj", "gate_up": "(gate|up)_proj", "down": "down_proj"}
# Honest kernels that differ, as on a GPU; on the engine's operations the mismatch of a healthy engine is 0.
STOCK = {"vllm_max_model_length": 192, "max_completion_length": 16, "learner_ops": "stock", "verify_sync": 1}


def _outcome(function: Callable[..., Any], *args: Any) -> str:
    """The message of the error that stops `function`, or "passed"."""
    try:
        function(*args)
    except RuntimeError as error:
        return str(error)
    return "passed"


# Readings ------------------------------------------------------------------------------------------------------------


def readings_of(model: str, folder: str, scheme: str) -> dict[str, Any]:
    """What the check reads of one engine, healthy and with faults: after its first sync, and after later ones."""
    trainer = make_trainer(model, Path(folder), quant_scheme=scheme, **STOCK)
    torch.manual_seed(0)
    # The syncs do not check: a fault would stop the run for good.
    with patch.object(trainer.vllm_generation.sync_check, "due", lambda syncs: False):
        first = _readings_of_first_sync(trainer, model, scheme)
        return {"first": first, "later": _readings_of_later_syncs(trainer)}


def _as_row(reading: Any) -> dict[str, Any]:
    row = {}
    for name in ("logp_diff", "noise_floor", "limit", "followed", "wrong"):
        row[name] = getattr(reading, name)
    return row


class FirstSync:
    """
    Readings of a first sync, as if it were just done: what the engine answers against the unchanged learner.

    Attributes:
        rows: Readings by the name of the case.
    """

    def __init__(self, trainer: Any) -> None:
        self.engine = trainer.vllm_generation
        self.sync_check = self.engine.sync_check
        # Before anything changes its weights.
        self.learner = self.sync_check.score()
        self.rows: dict[str, dict[str, Any]] = {}

    def read(self, name: str, learner: Any = None, answers: torch.Tensor | None = None) -> None:
        """Keep the reading of a case, by other scores of the learner or by other answers if they are given."""
        from qarl_trl.rollout.sync_check.verdict import read_first

        if learner is None:
            learner = self.learner
        if answers is None:
            answers = self.engine.prompt_logps(self.sync_check.token_ids)
        self.rows[name] = _as_row(read_first(answers, learner, self.sync_check.before))


def _readings_of_first_sync(trainer: Any, model: str, scheme: str) -> dict[str, dict[str, Any]]:
    """Readings of a healthy engine, of noisy ones and of faulty ones."""
    first_sync = FirstSync(trainer)
    first_sync.read("never synced")
    first_sync.engine.sync_weights()
    first_sync.read("healthy")
    _read_coarse_rounding(first_sync)
    _read_other_scheme(first_sync, model, "W8A8" if scheme == "W4A16" else "W4A16")
    _read_wrong_layers(first_sync, trainer)
    return first_sync.rows


def _read_coarse_rounding(first_sync: FirstSync) -> None:
    """Engines that round ten times as coarsely."""
    from qarl_trl.rollout.sync_check import rounding_noise as module

    seed = module.SEED
    rounding = module.ROUNDING
    # What the learner scores with such noise stands for the engine's answers, ten draws of it.
    for number in range(10):
        module.SEED = seed + number
        module.ROUNDING = 10 * rounding
        first_sync.read(f"rounding x10, {number}", answers=first_sync.sync_check.score().noisy)
    module.SEED = seed
    module.ROUNDING = rounding


def _read_other_scheme(first_sync: FirstSync, model: str, scheme: str) -> None:
    """What the learner computes here is what an engine would that got another configuration."""
    from transformers import AutoModelForCausalLM

    from qarl_trl.quant import apply_quantization
    from qarl_trl.rollout.sync_check.learner_logps import learner_logps

    other = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    apply_quantization(other, scheme)
    with torch.autocast("cpu", torch.bfloat16):
        scores = learner_logps(other, first_sync.sync_check.token_ids)
    first_sync.read("other scheme", learner=scores)


def _read_wrong_layers(first_sync: FirstSync, trainer: Any) -> None:
    """Engines that hold other weights in one layer or in all: those of a loader that forgot them, or random ones."""
    # The first and the last block: an error in the first one passes through all others.
    patterns = {}
    for block in (0, 3):
        for group, projections in GROUPS.items():
            patterns[f"layer {block}.{group}"] = rf"layers\.{block}\..*{projections}"
    patterns["all"] = ""

    master_weights = dict(trainer.model.named_parameters())
    # Embeddings, norms and the output layer are no layers of a scheme.
    kept = copies(item for item in master_weights.items() if "proj" in item[0])
    for where, pattern in patterns.items():
        names = list(filter(re.compile(pattern).search, kept))
        for kind in ("unloaded", "random"):
            with torch.no_grad():
                for name in names:
                    # Random ones have the standard deviation of the layer's own.
                    size = 1e-3 if kind == "unloaded" else kept[name].std().item() * 3**0.5
                    master_weights[name].uniform_(-size, size)
            first_sync.engine.sync_weights()
            first_sync.read(f"{kind} {where}")

        with torch.no_grad():
            for name in names:
                master_weights[name].copy_(kept[name])


def _readings_of_later_syncs(trainer: Any) -> dict[str, Any]:
    """What the checks after syncs say while the learner moves."""
    engine = trainer.vllm_generation
    stream = type(engine)._iter_named_params
    outcomes: dict[str, Any] = {}
    old: dict[str, torch.Tensor] = {}

    def sync_and_check(name: str, stale: str | None = None) -> None:
        """Weight sync, but tensors whose names have `stale` in them are those of the earlier sync `old`."""

        def weights() -> Any:
            for weight, tensor in stream(engine):
                is_stale = stale is not None and stale in weight
                yield weight, old[weight] if is_stale else tensor

        def check() -> None:
            outcomes[f"{name}, reading"] = _as_row(engine.sync_check.check(engine.prompt_logps, 2))

        engine._iter_named_params = weights
        engine.sync_weights()
        outcomes[name] = _outcome(check)

    sync_and_check("healthy")
    # There is nothing to follow, and the share of the movement has no value.
    sync_and_check("nothing moved")

    old |= copies(stream(engine))
    with torch.no_grad():
        for param in trainer.model.parameters():
            param.add_(0.02 * torch.randn_like(param) * (param.ndim > 1))  # not norms
    sync_and_check("stale layer", "layers.1.mlp.")
    sync_and_check("stale engine", "")
    sync_and_check("healthy again")
    return outcomes


@pytest.fixture(scope="module", params=CASES)
def readings(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sync_check")
    model = save_model(folder / "model", layers=4)
    readings = isolated(readings_of, model, str(folder / "run"), request.param)
    _print_figures(request.param, readings["first"])
    return readings


def _print_figures(scheme: str, rows: dict[str, dict[str, Any]]) -> None:
    """Each mismatch in units of that before the sync and of the noise floor, and the limit in noise floors."""
    before = rows["never synced"]["logp_diff"]
    for name, row in rows.items():
        figures = (row["logp_diff"] / before, row["logp_diff"] / row["noise_floor"], row["limit"] / row["noise_floor"])
        verdict = "stops" if row["wrong"] else ""
        print(f"{scheme:11} {name:24}", *(f"{figure:8.2f}" for figure in figures), verdict)


def test_a_healthy_engine_is_far_from_every_limit(readings):
    row = readings["first"]["healthy"]
    assert row["logp_diff"] < 0.1 * readings["first"]["never synced"]["logp_diff"]  # measured: 0.01 to 0.064
    # The margin to both sides: neither noise of a run nor the smallest fault may be near the limit.
    assert row["logp_diff"] < 1.4 * row["noise_floor"] < 0.5 * row["limit"]

    for name in ("healthy", "nothing moved", "healthy again"):
        row = readings["later"][f"{name}, reading"]
        assert row["logp_diff"] < 0.5 * row["limit"]
    assert readings["later"]["healthy again, reading"]["followed"] == pytest.approx(1, abs=0.1)


def test_ten_times_coarser_rounding_stops_no_run(readings):
    noisy = 0
    for name, row in readings["first"].items():
        if " x10" in name:
            noisy += 1
            assert not row["wrong"], name
    assert noisy == 10


def test_every_fault_stops_the_run(readings):
    """A sync that never came, one layer or all that were not loaded or hold other weights, another scheme."""
    faults = 0
    for name, row in readings["first"].items():
        if name != "healthy" and " x10" not in name:
            faults += 1
            assert row["wrong"], name
    # Never synced, another scheme, and two kinds of wrong weights in each of 8 layers and in all.
    assert faults == 2 + 2 * (8 + 1)


def test_one_layer_that_a_later_sync_left_out_stops_the_run(readings):
    assert "the engine does not hold the synced weights" in readings["later"]["stale layer"]


def test_an_engine_that_did_not_follow_is_called_stale(readings):
    assert "followed 0 %" in readings["later"]["stale engine"]


# Runs ----------------------------------------------------------------------------------------------------------------


def _train(
    model: str,
    folder: str,
    changes: dict[str, Any],
    broken: str | None = None,
    evaluate: bool = False,
    by_function: bool = False,
    first_broken: int = 1,
) -> dict[str, Any]:
    """
    How a run ends, and what it logs.

    Args:
        model: The model's folder.
        folder: The folder of the run.
        changes: Fields of its config.
        broken: Scales of this layer of the engine become 0 after each sync.
        evaluate: Evaluate every two steps.
        by_function: Sample by a `rollout_func` that drives the engine.
        first_broken: The first sync after which the layer is broken.
    """
    trainer = make_trainer(model, Path(folder), **changes)
    if by_function:
        trainer.rollout_func = _drive_engine
    if broken is not None:
        _break_syncs(broken, first_broken)
    if evaluate:
        trainer.args.eval_strategy = "steps"
        trainer.args.eval_steps = 2
        trainer.eval_dataset = prompts(8)

    warnings = _record_warnings()
    outcome = _outcome(trainer.train)
    return {
        "outcome": outcome,
        "warnings": warnings,
        "log": trainer.state.log_history,
        "steps": trainer.state.global_step,
        "syncs": trainer.vllm_generation.num_syncs,
    }


def _drive_engine(texts: list[str], trainer: Any) -> dict[str, Any]:
    """A `rollout_func` that asks the engine itself."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=1.0, max_tokens=16, logprobs=0)
    output: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
    for request in trainer.vllm_generation.llm.generate(texts, params, use_tqdm=False):
        prompt_ids, completion_ids, logps = as_sample(request)
        output["prompt_ids"].append(prompt_ids)
        output["completion_ids"].append(completion_ids)
        output["logprobs"].append(logps)
    return output


def _break_syncs(layer: str, first: int) -> None:
    from qarl_trl.rollout.vllm import reloading

    reload_engine = reloading.reload_engine
    syncs = itertools.count(1)

    def reload_and_break(llm: Any, weights: Any) -> None:
        reload_engine(llm, weights)
        # After the load, whose own checks of names and shapes have found nothing.
        if next(syncs) < first:
            return
        reloading.engine_model(llm).get_submodule(layer).weight_scale.data.mul_(0)

    reloading.reload_engine = reload_and_break


def _steps_that_log(run: dict[str, Any], name: str) -> list[int]:
    """The steps whose rows in the log of a run have this name."""
    return [row["step"] for row in run["log"] if name in row]


def _record_warnings() -> list[str]:
    """What the sync check warns of from now on."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("qarl_trl.rollout.sync_check.check").addHandler(handler)
    return warnings


def test_a_learner_in_high_precision_is_checked_by_the_low_bit_model(tmp_path):
    changes = {"verify_sync": 1, "quantize_learner": False}

    run = isolated(_train, save_model(tmp_path / "model"), str(tmp_path / "run"), changes)

    # A check by the learner's own forward, in high precision here, would find a mismatch far above its limit.
    assert (run["outcome"], run["warnings"], run["steps"]) == ("passed", [], 4)
    assert len(_steps_that_log(run, "sync/verify_logp_diff")) == 2


def test_a_run_with_a_broken_layer_stops_before_its_first_step(tmp_path):
    model = save_model(tmp_path / "model")

    run = isolated(_train, model, str(tmp_path / "run"), {}, "model.layers.1.mlp.down_proj")

    assert "After sync 1 the engine's log-probs of the sync check prompt" in run["outcome"]
    assert run["steps"] == 0


@pytest.mark.parametrize("verify", ["first", "off"])
def test_a_layer_that_breaks_after_the_first_sync_stops_a_run_whose_mismatch_rises(tmp_path, verify):
    """Steps 1, 3 and 5 sample. By default only the first sync is checked, and this one is good."""
    model = save_model(tmp_path / "model")
    changes = {"verify_sync": verify, "max_steps": 6}

    run = isolated(_train, model, str(tmp_path / "run"), changes, "model.layers.1.mlp.down_proj", False, False, 2)

    if verify == "first":
        assert "After sync 3 the engine's log-probs of the sync check prompt" in run["outcome"]
        assert "the sync check runs again after the next sync" in run["warnings"][0]
        assert run["steps"] == 4
    else:  # control: nothing else would stop it
        assert (run["outcome"], run["steps"]) == ("passed", 6)


def test_a_healthy_run_passes_and_syncs_again_between_an_evaluation_and_the_next_rollout(tmp_path):
    """Steps 1 and 3 sample. The evaluations after steps 2 and 4 might have other weights (test_engine_settings.py)."""
    model = save_model(tmp_path / "model")

    run = isolated(_train, model, str(tmp_path / "run"), {"per_device_eval_batch_size": 8}, None, True)

    assert (run["outcome"], run["warnings"], run["steps"]) == ("passed", [], 4)
    # One before each of two rollouts and of two evaluations.
    assert run["syncs"] == 4
    assert len(_steps_that_log(run, "sync/verify_logp_diff")) == 1
    assert set(folders.log(1)[0]) <= set().union(*run["log"])  # what the report's tests draw is what a run logs
    assert _steps_that_log(run, "eval_reward") == [2, 4]
    assert _steps_that_log(run, "sync/bytes") == [1, 3]
    # There is nothing that the first sync could have flipped.
    assert _steps_that_log(run, "quant/flip_frac") == [3]


def test_an_engine_that_a_rollout_func_drives_is_checked_too(tmp_path):
    """TRL syncs before it calls the function, which does not call `generate`."""
    model = save_model(tmp_path / "model")

    run = isolated(_train, model, str(tmp_path / "run"), {"verify_sync": 1}, None, False, True)

    assert (run["outcome"], run["steps"], run["syncs"]) == ("passed", 4, 2)
    for name in ("sync/verify_logp_diff", "sync/bytes"):
        assert _steps_that_log(run, name) == [1, 3]
    assert _steps_that_log(run, "quant/flip_frac") == [3]


def test_a_broken_layer_stops_a_run_by_a_rollout_func(tmp_path):
    model = save_model(tmp_path / "model")

    run = isolated(_train, model, str(tmp_path / "run"), {}, "model.layers.1.mlp.down_proj", False, True)

    assert "After sync 1 the engine's log-probs of the sync check prompt" in run["outcome"]
    assert run["steps"] == 0
