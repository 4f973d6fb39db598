"""
vLLM's code for CUDA GPUs, in a build for CPUs: its loader, its choice of kernels, its repacking, no kernel run.

What vLLM asks about the device is answered by its own class for CUDA, which knows nothing but the compute capability,
and what it asks of compiled operations by `QUESTIONS`. A question without an answer raises [`NoAnswer`].
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import _lru_cache_wrapper, cache
from typing import Any
from unittest.mock import patch

import torch


class NoAnswer(Exception):
    """vLLM asks what no table of this file answers. Not an `AttributeError`, which vLLM takes for "no"."""


@contextmanager
def cuda(capability: tuple[int, int]) -> Iterator[None]:
    """Let vLLM take the code paths of a CUDA GPU of this compute capability; tensors stay on the CPU."""
    _import_for_cpu()
    from vllm import _custom_ops as ops

    # vLLM's compiled operations take 90 for (9, 0).
    number = 10 * capability[0] + capability[1]
    with ExitStack() as stack:
        stack.enter_context(_platform(capability))
        stack.enter_context(patch.multiple(torch.accelerator, **ACCELERATOR))
        stack.enter_context(patch.multiple(ops, **OPERATIONS))
        stack.enter_context(patch.object(torch.ops, "_C", _Library(torch.ops._C)))
        stack.enter_context(patch.object(torch.ops, "_moe_C", _Library(torch.ops._moe_C)))
        stack.enter_context(_deep_gemm())

        # Computed when vLLM is imported.
        block_fp8 = QUESTIONS["cutlass_scaled_mm_supports_block_fp8"](number)
        stack.enter_context(_everywhere("CUTLASS_BLOCK_FP8_SUPPORTED", block_fp8))

        _forget_answers()
        yield
    _forget_answers()


def _import_for_cpu() -> None:
    """What is imported before the pretence looks for the libraries of a CPU only."""
    import vllm.model_executor.layers.fused_moe.experts.fused_humming_moe
    import vllm.model_executor.layers.fused_moe.experts.triton_cutlass_moe
    import vllm.model_executor.layers.fused_moe.experts.triton_deep_gemm_moe
    import vllm.model_executor.layers.fused_moe.experts.trtllm_fp8_moe
    import vllm.model_executor.layers.fused_moe.oracle.fp8
    import vllm.model_executor.layers.fused_moe.oracle.int_wna16
    import vllm.model_executor.layers.quantization.auto_awq
    import vllm.model_executor.layers.quantization.auto_gptq
    import vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors
    import vllm.model_executor.layers.quantization.moe_wna16
    import vllm.model_executor.models.llama
    import vllm.model_executor.models.qwen2
    import vllm.model_executor.models.qwen3
    import vllm.model_executor.models.qwen3_moe
    import vllm.utils.deep_gemm  # noqa: F401


# The device ---------------------------------------------------------------------------------------------------------


@contextmanager
def _platform(capability: tuple[int, int]) -> Iterator[None]:
    """Make vLLM's platform one of its class for CUDA. What that would ask of a driver raises."""
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    for_cpu = type(current_platform)

    class PretendedGPU(_cuda_platform()):
        # Tensors stay on the CPU, and attention, which no test here runs, is that of the CPU.
        device_type = for_cpu.device_type
        dispatch_key = for_cpu.dispatch_key
        dist_backend = for_cpu.dist_backend
        get_attn_backend_cls = for_cpu.get_attn_backend_cls

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(*capability)

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132  # the size of workspaces, which no kernel uses here

    # Other modules hold this very object.
    current_platform.__class__ = PretendedGPU
    try:
        yield
    finally:
        current_platform.__class__ = for_cpu


@cache
def _cuda_platform() -> type:
    """vLLM's, whose module loads the compiled operations for GPUs."""
    # An empty module in its place, as long as the import lasts: a build for CPUs has none.
    library = "vllm._C_stable_libtorch"
    sys.modules[library] = types.ModuleType(library)
    try:
        from vllm.platforms.cuda import CudaPlatformBase
    finally:
        del sys.modules[library]
    return CudaPlatformBase


def _forget_answers() -> None:
    """Empty vLLM's caches, in which answers for the other device may be."""
    for module in _modules_of_vllm():
        for value in list(vars(module).values()):
            if isinstance(value, _lru_cache_wrapper) and value.__module__.startswith("vllm."):
                value.cache_clear()


def _modules_of_vllm() -> list[types.ModuleType]:
    modules = []
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm."):
            modules.append(module)
    return modules


@contextmanager
def _everywhere(name: str, value: Any) -> Iterator[None]:
    """Replace a function or constant of vLLM in every module that has it."""
    holders = [module for module in _modules_of_vllm() if name in vars(module)]
    if not holders:
        raise NoAnswer(f"{name} is nowhere in vLLM")

    with ExitStack() as stack:
        for module in holders:
            stack.enter_context(patch.object(module, name, value))
        yield


# Compiled operations ------------------------------------------------------------------------------------------------

# What vLLM's operations for GPUs answer for a capability such as 90: csrc/quantization/w8a8/cutlass/scaled_mm_entry.cu
# and csrc/moe of vLLM 0.31, compiled for CUDA 13.0.
QUESTIONS: dict[str, Callable[..., bool]] = {
    "cutlass_scaled_mm_supports_fp8": lambda capability: capability >= 89,
    "cutlass_scaled_mm_supports_block_fp8": lambda capability: capability >= 90,
    "cutlass_group_gemm_supported": lambda capability: 90 <= capability < 110,
    "moe_permute_unpermute_supported": lambda: True,
}


class _Library:
    """A library of operations: the answers, and what the build for CPUs has."""

    def __init__(self, for_cpu: Any) -> None:
        self._for_cpu = for_cpu

    def __getattr__(self, name: str) -> Any:
        if name in QUESTIONS:
            return QUESTIONS[name]

        try:
            return getattr(self._for_cpu, name)
        except AttributeError as error:
            raise NoAnswer(f"torch.ops.{self._for_cpu.name}.{name} has no answer on the pretended GPU") from error


# Operations without a CPU form, as permutations that keep values: a wrong, a lost or a second one shows.


def _repack(
    b_q_weight: torch.Tensor, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool = False
) -> torch.Tensor:
    """Marlin's form of a weight."""
    # In the shape of Marlin's tiles of 16 rows.
    permuted = b_q_weight.contiguous().flip(1)
    return permuted.reshape(size_k // 16, size_n * num_bits // 2).clone()


def _repack_experts(
    b_q_weight: torch.Tensor, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool = False
) -> torch.Tensor:
    return torch.stack([_repack(expert, size_k, size_n, num_bits) for expert in b_q_weight])


def _prepack(weight: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Machete's form of a weight."""
    return weight.contiguous().flip(0).clone()


OPERATIONS: dict[str, Callable[..., Any]] = {
    "gptq_marlin_repack": _repack,
    "gptq_marlin_moe_repack": _repack_experts,
    "machete_prepack_B": _prepack,
}
ACCELERATOR: dict[str, Callable[..., Any]] = {
    "max_memory_allocated": lambda *_: 0,
    "synchronize": lambda *_: None,
    "empty_cache": lambda *_: None,
}


# Packages -----------------------------------------------------------------------------------------------------------


@contextmanager
def _deep_gemm() -> Iterator[None]:
    """DeepGEMM, which is in vLLM's package for GPUs; its layout of scales is another permutation."""
    module = types.SimpleNamespace(
        fp8_gemm_nt=_not_run,
        m_grouped_fp8_gemm_nt_contiguous=_not_run,
        transform_sf_into_required_layout=lambda sf, **_: sf.flip(-1).clone(),
        get_mk_alignment_for_contiguous_layout=lambda: 128,
    )
    with patch.dict(sys.modules, {"deep_gemm": module}), _everywhere("has_deep_gemm", lambda: True):
        yield


def _not_run(*_: Any, **__: Any) -> None:
    raise NoAnswer("No kernel is run on the pretended GPU.")
