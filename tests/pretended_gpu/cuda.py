"""vLLM's code for CUDA GPUs, in a build for CPUs: its loader, its choice of kernels, its repacking, no kernel run."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch


@contextmanager
def cuda(capability: tuple[int, int]) -> Iterator[None]:
    """Let vLLM take the code paths of a CUDA GPU of this compute capability; tensors stay on the CPU."""
    _import_for_cpu()
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    with ExitStack() as stack:
        stack.enter_context(patch.multiple(type(current_platform), **_platform(capability)))
        stack.enter_context(patch.multiple(torch.accelerator, **ACCELERATOR))
        stack.enter_context(patch.multiple(ops, **OPERATIONS))
        yield


def _import_for_cpu() -> None:
    """What is imported before the pretence looks for the libraries of a CPU only."""
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


def _platform(capability: tuple[int, int]) -> dict[str, Any]:
    """Attributes of vLLM's platform that say what device there is."""
    from vllm.platforms import PlatformEnum
    from vllm.platforms.interface import DeviceCapability

    def compare(relation: Callable[[Any, Any], bool]) -> Any:
        def method(cls: Any, other: Any, device_id: int = 0) -> bool:
            # A pair, or a number such as 90.
            wanted = tuple(other) if isinstance(other, tuple) else divmod(other, 10)
            return relation(capability, wanted)

        return classmethod(method)

    return {
        "_enum": PlatformEnum.CUDA,
        "is_cuda": lambda self: True,
        "is_cuda_alike": lambda self: True,
        "is_cpu": lambda self: False,
        "get_device_capability": classmethod(lambda cls, device_id=0: DeviceCapability(*capability)),
        "has_device_capability": compare(operator.ge),
        "is_device_capability": compare(operator.eq),
    }


# Operations without a CPU form, as permutations that keep values: a wrong, a lost or a second one shows.


def _repack(
    b_q_weight: torch.Tensor, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool = False
) -> torch.Tensor:
    """Marlin's form of a weight."""
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
    "cutlass_scaled_mm_supports_fp8": lambda capability: capability >= 89,
}
ACCELERATOR: dict[str, Callable[..., Any]] = {
    "max_memory_allocated": lambda *_: 0,
    "synchronize": lambda *_: None,
    "empty_cache": lambda *_: None,
}
