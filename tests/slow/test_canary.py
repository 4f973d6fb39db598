"""The canary on a real engine: a healthy one passes, one with a single wrong or old layer stops the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slow.isolated import isolated
from slow.toys import make_trainer, save_model


pytestmark = pytest.mark.slow
SCHEMES = ["none", "W4A16", "FP8_DYNAMIC", "W8A8"]


def _outcome(function: Any, *args: Any) -> str:
    try:
        function(*args)
    except RuntimeError as error:
        return str(error)
    return "passed"


def _without(engine: Any, layer: str, kept: dict[str, torch.Tensor]) -> Any:
    """The engine's stream, in which `layer` keeps the tensors of an earlier publish."""
    stream = type(engine)._iter_named_params
    return lambda: ((name, kept[name] if layer in name else tensor) for name, tensor in stream(engine))


def _readings(model: str, folder: str, scheme: str) -> dict[str, Any]:
    # Honest kernels that differ, as on a GPU; on the engine's operations the gap of a healthy engine is 0.
    sizes = {"vllm_max_model_length": 192, "max_completion_length": 16}
    trainer = make_trainer(model, Path(folder), quant_scheme=scheme, learner_ops="stock", publish_verify=1, **sizes)
    engine, results = trainer.vllm_generation, {}
    canary = engine.canary

    def check() -> Any:
        return canary.check(engine.llm, engine.num_publishes)

    def publish_and_check() -> None:
        engine.sync_weights()
        check()

    engine.sync_weights()
    first = check()
    results["healthy"] = first.gap / first.allowed
    old = {name: tensor.clone() for name, tensor in engine._iter_named_params()}
    masters = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}

    # One layer of the engine is corrupted in place, as a kernel with a wrong pointer would.
    for layer in ("layers.1.mlp.down_proj", "layers.2.self_attn.o_proj"):
        with torch.no_grad():
            dict(trainer.model.named_parameters())[f"model.{layer}.weight"].uniform_(-1e-3, 1e-3)
        engine.sync_weights()
        with torch.no_grad():
            dict(trainer.model.named_parameters())[f"model.{layer}.weight"].copy_(masters[f"model.{layer}.weight"])
        results[f"corrupted {layer}"] = _outcome(check)
    results["repaired"] = _outcome(publish_and_check)

    # The learner moves, and the publish leaves out one layer, then everything.
    with torch.no_grad():
        for p in trainer.model.parameters():
            p.add_(0.02 * torch.randn_like(p) * (p.ndim > 1))
    engine._iter_named_params = _without(engine, "layers.1.mlp.", old)
    results["stale layer"] = _outcome(publish_and_check)
    engine._iter_named_params = _without(engine, "", old)
    results["stale engine"] = _outcome(publish_and_check)
    del engine._iter_named_params
    results["healthy again"] = _outcome(publish_and_check)
    return results


@pytest.fixture(scope="module", params=SCHEMES)
def readings(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("canary")
    return isolated(_readings, save_model(folder / "model", layers=4), str(folder / "run"), request.param)


def test_a_healthy_engine_is_far_from_the_limit(readings):
    assert readings["healthy"] < 0.7  # measured: 0.3 to 0.45
    assert readings["repaired"] == "passed"
    assert readings["healthy again"] == "passed"


@pytest.mark.parametrize("layer", ["layers.1.mlp.down_proj", "layers.2.self_attn.o_proj"])
def test_one_corrupted_layer_stops_the_run(readings, layer):
    assert "Some layer of the engine holds other weights" in readings[f"corrupted {layer}"]


def test_one_layer_that_a_publish_left_out_stops_the_run(readings):
    assert "kernels explain at most" in readings["stale layer"]


def test_an_engine_that_did_not_follow_is_called_stale(readings):
    assert "the engine is stale and answers from earlier weights" in readings["stale engine"]


def _train(model: str, folder: str, changes: dict[str, Any], broken: str | None) -> dict[str, Any]:
    trainer = make_trainer(model, Path(folder), **changes)
    if broken is not None:
        from qarl_trl.rollout import _vllm

        kernel, reload_engine = broken, _vllm.reload_engine

        def reload_and_break(llm: Any, weights: Any) -> None:
            reload_engine(llm, weights)
            layer = _vllm.engine_model(llm).get_submodule(kernel)
            layer.weight_scale.data.mul_(0)

        _vllm.reload_engine = reload_and_break
    outcome = _outcome(trainer.train)
    logs = [row for row in trainer.state.log_history if "publish/verify_gap" in row]
    return {"outcome": outcome, "checks": len(logs), "steps": trainer.state.global_step}


@pytest.mark.parametrize(
    ("changes", "checks"),
    [
        ({}, 1),
        ({"publish_verify": 1, "quant_learner": False}, 2),
        ({"publish_verify": "off"}, 0),
    ],
)
def test_a_run_with_a_healthy_engine_is_not_stopped(tmp_path, changes, checks):
    """Two publishes; with `quant_learner=False` the engine is still compared with the low-bit model."""
    result = isolated(_train, save_model(tmp_path / "model"), str(tmp_path / "run"), changes, None)
    assert result == {"outcome": "passed", "checks": checks, "steps": 4}


def test_a_run_with_a_broken_layer_stops_before_its_first_step(tmp_path):
    model = save_model(tmp_path / "model")
    result = isolated(_train, model, str(tmp_path / "run"), {}, "model.layers.1.mlp.down_proj")
    assert "After publish 1 the engine's log-probs of the canary prompt" in result["outcome"]
    assert result["steps"] == 0
