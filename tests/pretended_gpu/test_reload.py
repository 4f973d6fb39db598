"""
Weight syncs through vLLM's code for GPUs, on a pretended one: its loader, its choice of kernels, its repacking, no kernel run.

Operations without a CPU form are replaced by permutations that keep values, so that a wrong, a lost or a second repack shows.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from conftest import make_model
from slow.isolated import isolated, isolated_group

from qarl_trl.quant.scheme import GPU_GENERATIONS


pytestmark = pytest.mark.slow
PAGE = (Path(__file__).parents[2] / "dev" / "gpu.md").read_text()
DENSE = ("qwen2", "qwen3", "llama")
SCHEMES = ("W4A16", "W4A16_ASYM", "W8A16", "W8A8", "FP8_DYNAMIC", "NVFP4A16", "FP8_BLOCK", "none")
NO_EXPERTS = ("qwen3_moe", "NVFP4A16")
RANKED = (("qwen2", "W4A16"), ("qwen3", "NVFP4A16"), ("qwen3_moe", "W4A16"), ("qwen3_moe", "FP8_DYNAMIC"))
FAULTLESS = {"moved": [], "scales": {1.0}, "same in b": [], "not a again": []}


@contextmanager
def cuda(capability: tuple[int, int]) -> Iterator[None]:
    """Let vLLM, imported as a build for CPUs, take the code paths of a CUDA GPU of this capability; tensors stay on the CPU."""
    # What is imported before looks for the libraries of a CPU only.
    import vllm.model_executor.layers.fused_moe.oracle.fp8
    import vllm.model_executor.layers.fused_moe.oracle.int_wna16
    import vllm.model_executor.layers.quantization.auto_awq
    import vllm.model_executor.layers.quantization.auto_gptq
    import vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors
    import vllm.model_executor.layers.quantization.moe_wna16
    import vllm.model_executor.models.llama
    import vllm.model_executor.models.qwen2
    import vllm.model_executor.models.qwen3
    import vllm.model_executor.models.qwen3_moe  # noqa: F401
    from vllm import _custom_ops as ops
    from vllm.platforms import PlatformEnum, current_platform
    from vllm.platforms.interface import DeviceCapability

    def compare(relation: str) -> Any:
        def method(cls: Any, other: Any, device_id: int = 0) -> bool:
            return getattr(capability, relation)(tuple(other) if isinstance(other, tuple) else divmod(other, 10))

        return classmethod(method)

    def repack(b_q_weight: torch.Tensor, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool = False) -> Any:
        return b_q_weight.contiguous().flip(1).reshape(size_k // 16, size_n * num_bits // 2).clone()

    def repack_experts(
        b_q_weight: torch.Tensor, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool = False
    ) -> Any:
        return torch.stack([repack(expert, size_k, size_n, num_bits) for expert in b_q_weight])

    operations = {
        "gptq_marlin_repack": repack,
        "gptq_marlin_moe_repack": repack_experts,
        "machete_prepack_B": lambda weight, *_, **__: weight.contiguous().flip(0).clone(),
        "cutlass_scaled_mm_supports_fp8": lambda capability: capability >= 89,
    }

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
        patch.multiple(ops, **operations),
    ):
        yield


def _model(kind: str, scheme: str) -> torch.nn.Module:
    """A learner; with weights of whole kernel tiles."""
    from qarl_trl.quant import apply_quantization

    sizes = {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "intermediate_size": 512,
    }
    model = make_model(kind, **sizes)
    return model if scheme == "none" else apply_quantization(model, scheme)


def _start(folder: str, model: Any, capability: tuple[int, int]) -> tuple[Any, torch.nn.Module]:
    """vLLM's settings and its model with random weights, for a learner."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader

    from qarl_trl.export import quantization_config
    from qarl_trl.rollout import _vllm

    model.config.save_pretrained(folder)
    found = quantization_config(model)
    overrides = {} if found is None else {"quantization_config": found}
    ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    split = {"tensor_parallel_size": ranks, "enable_expert_parallel": bool(getattr(model.config, "num_experts", 0))}
    sizes = {"enforce_eager": True, "max_model_len": 64, "skip_tokenizer_init": True, "dtype": "bfloat16"}
    settings = EngineArgs(folder, load_format="dummy", hf_overrides=overrides, **sizes, **split).create_engine_config()
    _vllm.keep_cache_scales()
    with set_current_vllm_config(settings):
        if not torch.distributed.is_initialized():
            os.environ.setdefault("VLLM_DIST_IDENT", "")  # of a single process; `isolated_group` gives one
            init_distributed_environment(
                ranks, rank, "env://" if ranks > 1 else f"file://{folder}/store", rank, "gloo"
            )
            ensure_model_parallel_initialized(ranks, 1)
        with cuda(capability):
            loader = get_model_loader(settings.load_config)
            return settings, loader.load_model(vllm_config=settings, model_config=settings.model_config)


def _tensors(
    owner: Any, path: str = "", found: dict | None = None, seen: set | None = None
) -> dict[str, torch.Tensor]:
    """Every tensor that a forward could read: parameters, buffers, and what hangs on kernels and on experts."""
    found, seen = ({}, set()) if found is None else (found, seen)
    if id(owner) in seen:
        return found
    seen.add(id(owner))
    if isinstance(owner, torch.Tensor):
        if owner.device.type == "meta":  # what the reload keeps of a layer's form
            return found
        found[path.replace("_modules.", "").replace("_parameters.", "").replace("_buffers.", "")] = owner
    elif isinstance(owner, dict):
        parts = owner.items()
    elif isinstance(owner, list | tuple):
        parts = enumerate(owner)
    else:
        ours = type(owner).__module__.startswith(("vllm.model_executor", "torch.nn"))
        parts = vars(owner).items() if ours and hasattr(owner, "__dict__") else ()
    if not isinstance(owner, torch.Tensor):
        for name, part in list(parts):
            _tensors(part, f"{path}.{name}".removeprefix("."), found, seen)
    return found


def _reload(
    settings: Any, engine: torch.nn.Module, stream: dict[str, torch.Tensor], capability: tuple[int, int]
) -> dict:
    """A sync of a colocated engine; afterwards a copy of every tensor of the engine."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    from qarl_trl.rollout import _vllm

    def reload() -> None:
        initialize_layerwise_reload(engine)
        engine.load_weights(iter(stream.items()))
        finalize_layerwise_reload(engine, settings.model_config)

    with set_current_vllm_config(settings), cuda(capability):
        _vllm.reload_model(engine, reload)
    return {name: tensor.detach().clone() for name, tensor in _tensors(engine).items()}


def _sleep(engine: torch.nn.Module) -> None:
    """What a sleep of level 2 leaves: anything, but in buffers."""
    kept = {buffer.data_ptr() for buffer in engine.buffers()}
    for name, tensor in _tensors(engine).items():
        if tensor.numel() and tensor.data_ptr() not in kept and not name.endswith("_cpu"):
            tensor.data.untyped_storage().fill_(0x7F)


def _kernel(layer: Any) -> str:
    """The class that multiplies in a layer of the engine."""
    method, scheme = layer.quant_method, getattr(layer, "scheme", None)
    kernel = (
        getattr(scheme, "kernel", None) or getattr(scheme, "fp8_linear", None) or getattr(method, "experts_cls", None)
    )
    return (kernel if isinstance(kernel, type) else type(kernel or scheme or method)).__name__


def _syncs(
    folder: str, kind: str, scheme: str, capability: tuple[int, int] = (9, 0), fault: str = ""
) -> dict[str, Any]:
    """Syncs A, B, A with a sleep before each, and what the engine's tensors are then."""
    from qarl_trl.quant import iter_low_bit_weights
    from qarl_trl.rollout import _vllm

    if fault == "no loader":
        _vllm._prepare_biases = lambda model: {}
    model = _model(kind, scheme)
    settings, engine = _start(folder, model, capability)
    layer = engine.model.layers[0]
    mlp = layer.mlp.experts.routed_experts if hasattr(layer.mlp, "experts") else layer.mlp.down_proj
    scales = [layer.self_attn.attn._q_scale_float]
    places = {name: t.data_ptr() for name, t in _tensors(engine).items() if not name.endswith("_cpu")}
    streams, answers = [], []
    for _ in "AB":
        streams.append({name: tensor.clone() for name, tensor in iter_low_bit_weights(model)})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
    for which in (0, 1, 0):
        if answers:
            _sleep(engine)
        answers.append(_reload(settings, engine, streams[which], capability))
        scales.append(layer.self_attn.attn._q_scale_float)
    first, other, again = answers
    if fault == "repacked twice":
        again = {name: t.flip(0) if name.endswith("down_proj.weight_packed") else t for name, t in again.items()}
    # What a graph reads: of experts' scales vLLM makes second tensors, and goes on filling the first.
    stayed = {tensor.data_ptr() for name, tensor in _tensors(engine).items() if places.get(name) == tensor.data_ptr()}
    forms = ("weight_shape", "cos_sin_cache")  # alike in A and B
    return {
        "kernel": _kernel(mlp),
        "elements": sum(parameter.numel() for parameter in engine.parameters()),
        "moved": [name for name, place in places.items() if place not in stayed],
        "scales": set(scales),
        "same in b": [n for n, t in first.items() if t.numel() > 4 and _same(t, other[n]) and not n.endswith(forms)],
        "not a again": [name for name, t in first.items() if name not in again or not _same(t, again[name])],
    }


def _same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(x.contiguous().flatten().view(torch.uint8), y.contiguous().flatten().view(torch.uint8))


def _with_deep_gemm(folder: str, kind: str) -> dict[str, Any]:
    """FP8_BLOCK with a DeepGEMM, whose layout of scales is another permutation."""
    import vllm.utils.deep_gemm
    from vllm.platforms import current_platform

    from qarl_trl.rollout import _vllm

    def transform(sf: torch.Tensor, **_: Any) -> torch.Tensor:
        return sf.flip(-1).clone()

    sys.modules["deep_gemm"] = types.SimpleNamespace(fp8_gemm_nt=None, transform_sf_into_required_layout=transform)
    vllm.utils.deep_gemm.has_deep_gemm = lambda: True
    type(current_platform).support_deep_gemm = classmethod(lambda cls: True)
    _vllm.keep_block_scales()
    return _syncs(folder, kind, "FP8_BLOCK")


def _of_all(folder: str, capability: tuple[int, int]) -> dict[tuple[str, str], dict[str, Any]]:
    # The experts first: vLLM makes the group of their ranks with the first model of a process alone.
    cells = [(kind, scheme) for kind in ("qwen3_moe", *DENSE) for scheme in SCHEMES if (kind, scheme) != NO_EXPERTS]
    found = {}
    for kind, scheme in cells:
        (place := Path(folder) / kind / scheme).mkdir(parents=True)
        found[kind, scheme] = _syncs(str(place), kind, scheme, capability)
    return found


@pytest.mark.parametrize("generation", GPU_GENERATIONS)
def test_after_syncs_and_sleeps_every_tensor_is_in_its_place_with_its_bytes(generation, tmp_path):
    found = isolated(_of_all, str(tmp_path), GPU_GENERATIONS[generation])
    for cell, result in found.items():
        assert result | FAULTLESS == result, cell
    columns = next(line for line in PAGE.splitlines() if line.startswith("| scheme")).split(" | ")
    (column,) = (i for i, name in enumerate(columns) if name.startswith(generation))
    for scheme in SCHEMES:
        kernels = {found[kind, scheme]["kernel"] for kind in DENSE}
        assert len(kernels) == 1
        kernels = [*kernels, *(found[cell]["kernel"] for cell in [("qwen3_moe", scheme)] if cell in found)]
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{scheme}` |"))
        assert row.split(" | ")[column].removesuffix(" |") == ", ".join(kernels), (
            f"dev/gpu.md: {scheme} on {generation}"
        )


@pytest.mark.parametrize("kind, scheme", RANKED, ids=map("-".join, RANKED))
def test_ranks_of_an_engine_keep_their_parts(kind, scheme, tmp_path):
    """Tensor parallel; of experts each rank has half."""
    whole, *ranks = (
        isolated(_syncs, str(tmp_path), kind, scheme),
        *isolated_group(_syncs, 2, str(tmp_path), kind, scheme),
    )
    for result in ranks:
        assert result | FAULTLESS | {"kernel": whole["kernel"]} == result
        assert result["elements"] < 0.75 * whole["elements"]


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_block_scales_survive_the_layout_of_deep_gemm(kind, tmp_path):
    found = isolated(_with_deep_gemm, str(tmp_path), kind)
    assert found | FAULTLESS | {"kernel": "DeepGemmFp8BlockScaledMMKernel"} == found


def test_a_second_repack_is_found(tmp_path):
    """A control."""
    found = isolated(_syncs, str(tmp_path), "qwen2", "W4A16", (9, 0), "repacked twice")
    assert found["not a again"] == [f"model.layers.{i}.mlp.down_proj.weight_packed" for i in (0, 1)]


@pytest.mark.parametrize("scheme", ["NVFP4A16", "FP8_BLOCK"])
def test_without_its_loader_a_permuted_bias_stops_the_first_sync(scheme, tmp_path):
    """A control. Marlin puts a permuted bias without a loader in its place. When this fails vLLM has been repaired."""
    with pytest.raises(AssertionError):
        isolated(_syncs, str(tmp_path), "qwen2", scheme, (9, 0), "no loader")
