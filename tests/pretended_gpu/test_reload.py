"""
Weight syncs through vLLM's code for GPUs, on a pretended one: its loader, its choice of kernels, its repacking, no kernel run.

Operations without a CPU form are replaced by permutations that keep values, so that a wrong, a lost or a second repack shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from conftest import make_model
from slow.isolated import isolated


pytestmark = pytest.mark.slow


@contextmanager
def cuda(capability: tuple[int, int]) -> Iterator[None]:
    """Let vLLM, imported as a build for CPUs, take the code paths of a CUDA GPU of this capability; tensors stay on the CPU."""
    # What is imported before looks for the libraries of a CPU only.
    import vllm.model_executor.layers.fused_moe.oracle.fp8
    import vllm.model_executor.layers.fused_moe.oracle.int_wna16
    import vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors
    import vllm.model_executor.models.qwen2  # noqa: F401
    from vllm import _custom_ops as ops
    from vllm.platforms import PlatformEnum, current_platform
    from vllm.platforms.interface import DeviceCapability

    def compare(relation: str) -> Any:
        def method(cls: Any, other: Any, device_id: int = 0) -> bool:
            return getattr(capability, relation)(tuple(other) if isinstance(other, tuple) else divmod(other, 10))

        return classmethod(method)

    def repack(b_q_weight: torch.Tensor, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool = False) -> Any:
        return b_q_weight.contiguous().flip(1).reshape(size_k // 16, size_n * num_bits // 2).clone()

    platform = {
        "_enum": PlatformEnum.CUDA,
        "is_cuda": lambda self: True,
        "is_cuda_alike": lambda self: True,
        "is_cpu": lambda self: False,
        "get_device_capability": classmethod(lambda cls, device_id=0: DeviceCapability(*capability)),
        "has_device_capability": compare("__ge__"),
        "is_device_capability": compare("__eq__"),
    }
    accelerator = {
        "max_memory_allocated": lambda *_: 0,
        "synchronize": lambda *_: None,
        "empty_cache": lambda *_: None,
    }
    with (
        patch.multiple(type(current_platform), **platform),
        patch.multiple(torch.accelerator, **accelerator),
        patch.object(ops, "gptq_marlin_repack", repack),
    ):
        yield


def _start(folder: str, model: Any) -> tuple[Any, torch.nn.Module]:
    """vLLM's settings and its model with random weights, for a quantized learner."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader

    from qarl_trl.export import quantization_config
    from qarl_trl.rollout import _vllm

    model.config.save_pretrained(folder)
    overrides = {"quantization_config": quantization_config(model)}
    sizes = {"enforce_eager": True, "max_model_len": 64, "skip_tokenizer_init": True, "dtype": "bfloat16"}
    settings = EngineArgs(folder, load_format="dummy", hf_overrides=overrides, **sizes).create_engine_config()
    _vllm.keep_cache_scales()
    with set_current_vllm_config(settings):
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        with cuda((9, 0)):
            loader = get_model_loader(settings.load_config)
            return settings, loader.load_model(vllm_config=settings, model_config=settings.model_config)


def _reload(settings: Any, engine: torch.nn.Module, stream: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A sync of a colocated engine; afterwards a copy of every tensor of the engine."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    from qarl_trl.rollout import _vllm

    def reload() -> None:
        initialize_layerwise_reload(engine)
        engine.load_weights(iter(stream.items()))
        finalize_layerwise_reload(engine, settings.model_config)

    with set_current_vllm_config(settings), cuda((9, 0)):
        _vllm.reload_model(engine, reload)
    return {name: t.detach().clone() for name, t in (*engine.named_parameters(), *engine.named_buffers())}


def _sleep(engine: torch.nn.Module) -> None:
    """What a sleep of level 2 leaves: anything, but in buffers."""
    for parameter in engine.parameters():
        parameter.data.untyped_storage().fill_(0x7F)


def _syncs(folder: str, kind: str, scheme: str, mended: bool = True) -> dict[str, Any]:
    """Syncs A, B, A with a sleep before each, and what the engine's tensors are then."""
    from qarl_trl.quant import apply_quantization, iter_low_bit_weights
    from qarl_trl.rollout import _vllm

    if not mended:
        _vllm._prepare_biases = lambda model: {}

    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}
    model = apply_quantization(make_model(kind, **sizes), scheme)
    settings, engine = _start(folder, model)
    attention = engine.model.layers[0].self_attn.attn
    scales = {"start": attention._q_scale_float}
    places = {name: p.data_ptr() for name, p in engine.named_parameters()}
    a = {name: tensor.clone() for name, tensor in iter_low_bit_weights(model)}
    first = _reload(settings, engine, a)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    b = {name: tensor.clone() for name, tensor in iter_low_bit_weights(model)}
    answers = []
    for stream in (b, a):
        _sleep(engine)
        answers.append(_reload(settings, engine, stream))
    scales["syncs"] = attention._q_scale_float
    return {
        "kernel": type(engine.model.layers[0].mlp.down_proj.scheme.kernel).__name__,
        "in place": places == {name: p.data_ptr() for name, p in engine.named_parameters()},
        "scales": scales,
        "changed by b": sorted({n.split(".")[-1] for n, t in answers[0].items() if not _same(t, first[n])}),
        "not a again": [name for name, tensor in answers[1].items() if not _same(tensor, first[name])],
    }


def _same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(x.contiguous().flatten().view(torch.uint8), y.contiguous().flatten().view(torch.uint8))


def test_a_bias_that_the_kernel_replaced_is_loaded_again(tmp_path: Path):
    """Marlin's FP4 layer puts a permuted bias without a loader in its place, at which the next stream of a merged layer stops."""
    found = isolated(_syncs, str(tmp_path), "qwen2", "NVFP4A16")
    assert found["kernel"] == "MarlinNvFp4LinearKernel"
    assert found["scales"] == {"start": 1.0, "syncs": 1.0}
    assert found["in place"]
    assert {"bias", "weight", "weight_scale"} <= set(found["changed by b"])
    assert found["not a again"] == []


def test_without_its_loader_the_first_sync_stops(tmp_path: Path):
    """The control. When this fails vLLM has been repaired."""
    with pytest.raises(AssertionError, match="loader"):
        isolated(_syncs, str(tmp_path), "qwen2", "NVFP4A16", False)
