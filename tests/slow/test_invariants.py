"""One producer, three readers, on a real engine: what is computed, published and saved is the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slow.isolated import isolated
from slow.toys import engine_logprobs, make_trainer, save_model


pytestmark = pytest.mark.slow
SCHEMES = ["W4A16", "FP8_DYNAMIC", "W8A8"]


def _masters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def _set_masters(model: torch.nn.Module, values: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(values[name])


def _record_forward(model: torch.nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """The low-bit tensors that each layer's matrix product really gets, by one forward."""
    from qarl_trl.quant import linear, quantized_modules

    names = {id(module.weight): name for name, module in quantized_modules(model)}
    seen: dict[str, dict[str, torch.Tensor]] = {}
    original = linear.LowBitMatmul.apply

    def spy(x, master, weight, kernel):
        seen[names[id(master)]] = dict(weight.tensors)
        return original(x, master, weight, kernel)

    linear.LowBitMatmul.apply = spy
    try:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            model(input_ids=torch.tensor([[3, 4, 5, 6]]))
    finally:
        linear.LowBitMatmul.apply = original
    return seen


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _train_and_compare(model: str, folder: str, scheme: str) -> dict[str, Any]:
    from safetensors.torch import load_file

    from qarl_trl.quant import iter_low_bit_weights

    trainer = make_trainer(model, Path(folder) / "run", quant_scheme=scheme)
    before = dict(iter_low_bit_weights(trainer.model))
    trainer.train()
    engine = trainer.vllm_generation

    published: dict[str, torch.Tensor] = {}
    stream = engine._iter_named_params
    engine._iter_named_params = lambda: ((n, published.setdefault(n, t)) for n, t in stream())
    engine.sync_weights()
    engine._iter_named_params = stream
    first = engine_logprobs(engine.llm)

    forward = _record_forward(trainer.model)
    trainer.save_model(Path(folder) / "saved")
    saved = load_file(Path(folder) / "saved" / "model.safetensors")

    # A, B, A: another model in between must leave no trace.
    masters = _masters(trainer.model)
    _set_masters(trainer.model, {n: p + 0.02 * torch.randn_like(p) for n, p in masters.items()})
    engine.sync_weights()
    other = engine_logprobs(engine.llm)
    _set_masters(trainer.model, masters)
    engine.sync_weights()
    second = engine_logprobs(engine.llm)

    codes = next(name for name in saved if name.endswith(("weight_packed", "q_proj.weight")))
    return {
        "saved_is_published": set(saved) == set(published) and all(_same(saved[n], published[n]) for n in saved),
        "forward_is_published": len(forward) == 14
        and all(_same(t, published[f"{layer}.{local}"]) for layer, ts in forward.items() for local, t in ts.items()),
        "training_changed_codes": not _same(before[codes], saved[codes]),
        "aba": first == second,
        "b_differs": first != other,
        "first": first,
    }


def _fresh_engine(path: str) -> Any:
    from vllm import LLM

    llm = LLM(
        path, max_model_len=64, max_num_seqs=16, enforce_eager=True, logprobs_mode="processed_logprobs",
        max_num_batched_tokens=4096,
    )  # fmt: skip
    return engine_logprobs(llm)


@pytest.fixture(scope="module", params=SCHEMES)
def outcome(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    model = save_model(folder / "model")
    return folder, isolated(_train_and_compare, model, str(folder), request.param)


def test_forward_published_and_saved_tensors_are_the_same_bytes(outcome):
    _, result = outcome
    assert result["forward_is_published"]
    assert result["saved_is_published"]
    assert result["training_changed_codes"]  # control: the steps in between did change what is compared


def test_publishing_a_then_b_then_a_gives_the_first_answers_bit_for_bit(outcome):
    _, result = outcome
    assert result["aba"]
    assert result["b_differs"]  # control: the engine does follow a publish


def test_a_fresh_engine_from_the_saved_checkpoint_answers_bit_for_bit_the_same(outcome):
    folder, result = outcome
    assert isolated(_fresh_engine, str(folder / "saved")) == result["first"]


def _incomplete_publish(model: str, folder: str) -> str:
    trainer = make_trainer(model, Path(folder))
    engine = trainer.vllm_generation
    engine.sync_weights()
    stream = engine._iter_named_params
    engine._iter_named_params = lambda: ((n, t) for n, t in stream() if "layers.1.mlp.down_proj" not in n)
    try:
        engine.sync_weights()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_an_incomplete_publish_stops_the_run(tmp_path):
    message = isolated(_incomplete_publish, save_model(tmp_path / "model"), str(tmp_path / "run"))
    assert "kept old values for 3 tensors" in message
    assert "model.layers.1.mlp.down_proj.weight_packed" in message


def _publish_asleep(model: str, folder: str) -> list[str]:
    from unittest.mock import patch

    trainer = make_trainer(model, Path(folder))
    engine, order = trainer.vllm_generation, []
    engine.enable_sleep_mode = engine._llm_weights_sleeping = True
    reload_weights = engine.llm.llm_engine.model_executor.driver_worker.reload_weights
    with (
        patch.object(engine.llm, "wake_up", lambda tags: order.append(f"wake {tags}")),
        patch.object(
            engine.llm.llm_engine.model_executor.driver_worker,
            "reload_weights",
            lambda **kwargs: (order.append("reload"), reload_weights(**kwargs)),
        ),
    ):
        engine.sync_weights()
    return [*order, f"sleeping {engine._llm_weights_sleeping}"]


def test_a_sleeping_engine_is_woken_before_the_publish(tmp_path):
    """The CPU engine cannot sleep, so only the order of the calls is checked here; the GPU run is open."""
    order = isolated(_publish_asleep, save_model(tmp_path / "model"), str(tmp_path / "run"))
    assert order == ["wake ['weights']", "reload", "sleeping False"]
