"""Weight syncs into a real engine: what they leave as it is, what they are preceded by, and what they refuse."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from slow.isolated import isolated
from slow.toys import engine_logprobs, make_trainer, save_model, sync


pytestmark = pytest.mark.slow
# Scales of an attention layer, on device and host.
SCALES = (
    "_q_scale",
    "_k_scale",
    "_v_scale",
    "_prob_scale",
    "_k_scale_cpu",
    "_v_scale_cpu",
    "_q_scale_float",
    "_k_scale_float",
    "_v_scale_float",
    "_prob_scale_float",
)
# Layers of a checkpoint, and what the engine calls the parameters that have them.
LOST = {"mlp.down_proj": "mlp.down_proj", "self_attn.q_proj": "self_attn.qkv_proj", "mlp.up_proj": "mlp.gate_up_proj"}


# One engine ----------------------------------------------------------------------------------------------------------


def _one_engine(model: str, folder: str) -> dict[str, Any]:
    """Scales at the start, after syncs and after a sleep; a text; a sync of a sleeping engine, and incomplete ones."""
    from qarl_trl.rollout.engine import LowBitVLLMGeneration

    results: dict[str, Any] = {}
    look_before = LowBitVLLMGeneration._look_before

    def look_first(engine: Any, llm: Any) -> None:
        results["start"] = _scales(llm)
        look_before(engine, llm)

    # The first that looks at an engine is the sync check, within the trainer's constructor.
    with patch.object(LowBitVLLMGeneration, "_look_before", look_first):
        engine = make_trainer(model, Path(folder)).vllm_generation

    for when in ("first sync", "second sync"):
        engine.sync_weights()
        results[when] = _scales(engine.llm)

    # A sleep drops the memory of the weights, and the engine wakes with whatever is in it.
    _overwrite_as_sleep_does(engine.llm)
    engine.sync_weights()
    results["sync after a sleep"] = _scales(engine.llm)

    results["text"] = _generated_text(engine)
    _, logps = engine_logprobs(engine.llm)
    results["finite"] = bool(torch.tensor(logps).isfinite().all())
    results["asleep"] = _sync_asleep(engine)
    results["incomplete"] = _incomplete_syncs(engine)
    return results


def _scales(llm: Any) -> list[float]:
    from qarl_trl.rollout.vllm import reloading

    attention = reloading.engine_model(llm).get_submodule("model.layers.0.self_attn.attn")
    return [float(torch.as_tensor(getattr(attention, name)).detach()) for name in SCALES]


@torch.no_grad()
def _overwrite_as_sleep_does(llm: Any) -> None:
    """Fill all memory of the engine's weights with other numbers."""
    from qarl_trl.rollout.vllm import reloading

    model = reloading.engine_model(llm)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        # The rotary cache is a buffer and none of the weights, and vLLM saves it.
        if "rotary" not in name:
            tensor.fill_(-1)


def _generated_text(engine: Any) -> str:
    """The text that vLLM makes of a completion of the trainer."""
    generate = engine.llm.generate
    answers = []

    def recording(*args: Any, **kwargs: Any) -> Any:
        answers.append(generate(*args, **kwargs))
        return answers[-1]

    engine.llm.generate = recording
    engine.generate([[5, 6]], None, 1)
    return answers[-1][0].outputs[0].text


def _sync_asleep(engine: Any) -> list[str]:
    """In what order a sync wakes an engine and loads. The CPU engine cannot sleep, so it is only told that it does."""
    worker = engine.llm.llm_engine.model_executor.driver_worker
    reload_weights = worker.reload_weights
    order = []

    def wake_up(tags: list[str]) -> None:
        order.append(f"wake {tags}")

    def reload(**kwargs: Any) -> None:
        order.append("reload")
        reload_weights(**kwargs)

    engine.enable_sleep_mode = True
    engine._llm_weights_sleeping = True
    with patch.object(engine.llm, "wake_up", wake_up), patch.object(worker, "reload_weights", reload):
        engine.sync_weights()
    return [*order, f"sleeping {engine._llm_weights_sleeping}"]


def _incomplete_syncs(engine: Any) -> dict[str, str]:
    """What an engine says of a stream that lacks a layer."""
    from qarl_trl.rollout.vllm.reloading import reload_engine

    messages = {}
    for lost in ("nothing", *LOST):
        try:
            reload_engine(engine.llm, _stream_without(engine, f"layers.1.{lost}"))
        except RuntimeError as error:
            messages[lost] = str(error)
    return messages


def _stream_without(engine: Any, part: str) -> Iterator[tuple[str, torch.Tensor]]:
    """What a sync sends, but for tensors with this part in their names."""
    for name, tensor in engine._iter_named_params():
        if part not in name:
            yield name, tensor


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    return isolated(_one_engine, save_model(folder / "model"), str(folder / "run"))


def test_scales_of_cache_and_queries_are_one(engine):
    """vLLM's loader of random weights draws them too, no sync brings them, and kernels for float8 caches use them."""
    assert engine["finite"]
    for when in ("start", "first sync", "second sync", "sync after a sleep"):
        assert engine[when] == [1.0] * 10


def test_the_engine_makes_no_text_of_a_completion(engine):
    """Nobody reads it, and to make it is a fifth of the engine's CPU time."""
    assert engine["text"] == ""


def test_a_sleeping_engine_is_woken_before_the_sync(engine):
    """The CPU engine cannot sleep, so only the order of the calls is checked here; the GPU run is open."""
    assert engine["asleep"] == ["wake ['weights']", "reload", "sleeping False"]


def test_an_incomplete_sync_stops_the_run(engine):
    """Also one that lacks a part of a merged layer, which vLLM loads without a word."""
    messages = engine["incomplete"]

    # Control: a whole stream passes.
    assert messages.keys() == LOST.keys()
    for lost, merged in LOST.items():
        # Packed values, scales and a shape. A merged layer has one place for the shapes of its parts, and another part
        # has filled it.
        tensors = 3 if lost == merged else 2
        assert f"kept old values for {tensors} tensors" in messages[lost]
        assert f"model.layers.1.{merged}.weight_packed" in messages[lost]


# A bias that vLLM's model does not have ------------------------------------------------------------------------------


def _sync_with_a_bias_more(model: str, folder: str) -> list[str]:
    """What syncs of a Qwen3 say whose `o_proj` has a bias, at 0 and beyond: vLLM's class has those of q, k and v."""
    from transformers import AutoModelForCausalLM

    biased = AutoModelForCausalLM.from_pretrained(model, attention_bias=True)
    biased.save_pretrained(folder)
    for file in Path(model).glob("*token*"):
        shutil.copy(file, folder)

    trainer = make_trainer(folder, Path(folder, "run"), quant_scheme="FP8_DYNAMIC")
    parameters = dict(trainer.model.named_parameters())
    messages = []
    for name, value in (("q_proj", 0.0), ("q_proj", 0.1), ("o_proj", 0.1)):
        with torch.no_grad():
            parameters[f"model.layers.1.self_attn.{name}.bias"].fill_(value)
        try:
            trainer.vllm_generation.sync_weights()
            messages.append("")
        except RuntimeError as error:
            messages.append(str(error))
    return messages


def test_a_bias_without_a_place_in_the_engine_stops_the_run(tmp_path):
    at_start, of_q, of_o = isolated(_sync_with_a_bias_more, save_model(tmp_path / "model"), str(tmp_path / "biased"))

    # Before training it is 0 and changes nothing. One that vLLM has may have any value.
    assert at_start == of_q == ""
    assert "no place for 1 biases of this model, first model.layers.1.self_attn.o_proj.bias" in of_o


# Memory that CUDA graphs read ----------------------------------------------------------------------------------------


def _sync_biases(model: str, folder: str) -> list[dict[str, bool]]:
    """Weight syncs into an engine whose kernel puts biases, reordered, into new tensors, as Marlin does on GPUs."""
    from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel

    # The engine calls it when it starts, and again at the end of each reload.
    process = CPUWNA16LinearKernel.process_weights_after_loading

    def process_like_marlin(kernel: Any, layer: torch.nn.Module) -> None:
        process(kernel, layer)
        if layer.bias is not None:
            layer.bias.data = layer.bias.data.flip(0)

    with patch.object(CPUWNA16LinearKernel, "process_weights_after_loading", process_like_marlin):
        from qarl_trl.rollout.vllm import reloading

        trainer = make_trainer(model, Path(folder), verify_sync="off")
        layer = reloading.engine_model(trainer.vllm_generation.llm).get_submodule("model.layers.0.self_attn.qkv_proj")
        # The memory that a CUDA graph would read.
        captured_bias = layer.bias.data
        return [
            _sync_biases_once(trainer, layer, captured_bias, reloading.biases_of_checkpoint),
            _sync_biases_once(trainer, layer, captured_bias, nullcontext),
        ]


def _sync_biases_once(
    trainer: Any, layer: torch.nn.Module, captured_bias: torch.Tensor, biases: Callable
) -> dict[str, bool]:
    """Whether layer and captured memory have the biases of a sync, which is told in which form to fill them."""
    from qarl_trl.rollout.vllm import reloading

    # Other biases for each sync, or those of the sync before would do.
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            # Drawn for every parameter; only biases and norms move.
            parameter.add_(0.1 * torch.randn_like(parameter) * (parameter.ndim == 1))
    with patch.object(reloading, "biases_of_checkpoint", biases):
        sent = sync(trainer.vllm_generation)

    expected = torch.cat([sent[f"model.layers.0.self_attn.{name}_proj.bias"] for name in "qkv"]).flip(0)
    return {"layer": torch.equal(layer.bias, expected), "captured bias": torch.equal(captured_bias, expected)}


def test_what_the_kernel_makes_anew_stays_where_graphs_read_it(tmp_path):
    model = save_model(tmp_path / "model", family="Qwen2")

    repaired, control = isolated(_sync_biases, model, str(tmp_path / "run"))

    assert repaired == {"layer": True, "captured bias": True}
    assert control == {"layer": True, "captured bias": False}
