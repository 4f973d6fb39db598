"""`qarl_trl.rollout.support`: an engine that cannot compute as the learner does is refused before a model loads."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState
from configs import config

from qarl_trl import QaRLTrainer
from qarl_trl.quant import apply_quantization
from qarl_trl.quant.scheme import SUPPORTED, resolve_scheme, single_group
from qarl_trl.rollout.support import check_engine, default_engine_kwargs
from qarl_trl.validate import check_arguments


@pytest.mark.parametrize("scheme", list(SUPPORTED))
def test_a_scheme_without_a_cpu_kernel_is_refused_before_a_model_loads(tmp_path, scheme):
    args = config(tmp_path, use_vllm=True, quant_scheme=scheme)
    if SUPPORTED[scheme].cpu_engine:
        return check_arguments("org/model", args, {})
    with pytest.raises(ValueError, match=f"quant_scheme={scheme!r}.*'cpu'.*use_vllm=False"):
        QaRLTrainer("no/such-model", reward_funcs=[], args=args)
    check_arguments("org/model", config(tmp_path, quant_scheme=scheme), {})  # control: without the engine it trains


def on_gpu(monkeypatch, scheme, capability=(9, 0), ranks=1, **engine):
    """`check_engine` as on a GPU of that capability."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    args = SimpleNamespace(device=torch.device("cuda"), vllm_tensor_parallel_size=ranks, engine_kwargs=engine)
    check_engine(single_group(resolve_scheme(scheme), ["Linear"], []), args)


@pytest.mark.parametrize("scheme", list(SUPPORTED))
def test_a_scheme_needs_a_gpu_that_has_a_kernel(monkeypatch, scheme):
    generations = {(7, 5): None, (8, 0): "Ampere", (8, 9): "Ada", (9, 0): "Hopper", (10, 0): "Blackwell"}
    row = SUPPORTED[scheme]
    for capability, generation in generations.items():
        if generation in row.gpus:
            on_gpu(monkeypatch, scheme, capability)
            continue
        with pytest.raises(ValueError, match=rf"quant_scheme='{scheme}' cannot be sampled on device 'cuda'") as error:
            on_gpu(monkeypatch, scheme, capability)
        needed = [*row.gpus, str(capability)] if row.gpus else ["no GPU kernel"]
        assert all(words in str(error.value) for words in needed)


@pytest.mark.parametrize("scheme", ["W4A16", "FP8_DYNAMIC"])
def test_several_engine_ranks_scale_a_token_in_parts(monkeypatch, caplog, scheme):
    PartialState()  # which the logger asks for
    on_gpu(monkeypatch, scheme)
    assert not caplog.text
    on_gpu(monkeypatch, scheme, ranks=2)
    assert (f"vllm_tensor_parallel_size=2 with {scheme}" in caplog.text) == (scheme == "FP8_DYNAMIC")


def test_a_quantized_cache_of_keys_and_values_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="kv_cache_dtype must be.*got 'fp8'"):
        on_gpu(monkeypatch, "W4A16", kv_cache_dtype="fp8")
    on_gpu(monkeypatch, "W4A16", kv_cache_dtype="bfloat16")  # control


@pytest.mark.parametrize(
    ("kind", "scheme", "eager"),
    [("qwen3_moe", "FP8_DYNAMIC", True), ("qwen3_moe", "W4A16", False), ("qwen3", "FP8_DYNAMIC", False)],
)
def test_experts_with_quantized_activations_run_without_graphs(tiny_model, kind, scheme, eager):
    kwargs = default_engine_kwargs(apply_quantization(tiny_model(kind, num_hidden_layers=1), scheme))
    assert kwargs == ({"enforce_eager": True} if eager else {})
