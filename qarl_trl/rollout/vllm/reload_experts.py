"""Kernels of experts over a reload, on GPUs.

For every reload vLLM makes new kernels of experts (`moe_kernel` of the layer's `quant_method`, made of classes in
`fused_moe/`). But CUDA graphs go on reading the tensors of the first ones: scales, which are the layer's parameters,
and constants such as CUTLASS's strides. A reload fills parameters only; the constants would be freed with their
kernel, and a sleep of level 2 throws them away. A new kernel would also keep second copies of all scales, in memory
that does not sleep.

So the first kernels stay, and take over the contents of the new ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .platform import is_cpu_engine


# What a kernel of experts consists of: vLLM's classes in this package, and containers of them.
_PACKAGE = "vllm.model_executor.layers.fused_moe."


@dataclass(frozen=True)
class _FirstKernel:
    """
    The kernel of a layer of experts, as CUDA graphs were captured with it.

    Attributes:
        layer: Holds the weights and scales, as parameters.
        method: vLLM's quantization method of the layer, which holds the kernel.
        kernel: Multiplies.
        scales: vLLM's description of the kernel's scales.
    """

    layer: nn.Module
    method: Any
    kernel: Any
    scales: Any


@contextmanager
def keep_expert_kernels(model: nn.Module) -> Iterator[None]:
    """
    Give experts back the kernels that they had before a reload of the model, with the contents of the new ones.

    An engine on a CPU has no graphs, and its kernels hold packed weights: it keeps the new kernels.

    Args:
        model: The engine's model, which is reloaded inside this context.

    Raises:
        RuntimeError: if the new kernel of a layer has other parts, or numbers that depend on the weights. A captured
            graph could not follow it.
    """
    if is_cpu_engine():
        yield
        return

    first_kernels = _first_kernels(model)
    yield

    for first in first_kernels:
        method = first.method
        # Of bfloat16 experts vLLM itself keeps the kernel.
        if method.moe_kernel is not first.kernel:
            _take_over(first.layer, first.kernel, method.moe_kernel)
            _take_over(first.layer, first.scales, method.moe_quant_config)
            method.moe_kernel = first.kernel
            method.moe_quant_config = first.scales


def _first_kernels(model: nn.Module) -> list[_FirstKernel]:
    """One for each layer of experts that has a kernel."""
    kernels = []
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        kernel = getattr(method, "moe_kernel", None)
        if kernel is not None:
            kernels.append(_FirstKernel(layer, method, kernel, method.moe_quant_config))
    return kernels


def _take_over(layer: nn.Module, first: Any, new: Any) -> None:
    """Copy the tensors of a new kernel, or of a new description of scales, into those of the first."""
    # The reload has filled these.
    filled = {_address(tensor) for tensor in (*layer.parameters(), *layer.buffers())}

    # The first kernel may have more parts: memory that its first forward made, and which does not sleep.
    old_parts = _parts(first)
    for path, part in _parts(new).items():
        old_part: Any = old_parts.get(path)
        if not _alike(old_part, part):
            raise RuntimeError(
                f"{path} of an expert kernel must stay {_described(old_part)} over a weight sync, got "
                f"{_described(part)}: CUDA graphs would compute with the old one. "
                "Please report the model, the scheme and the version of vLLM."
            )

        if isinstance(part, Tensor) and _address(old_part) not in filled:
            old_part.copy_(part)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _alike(old_part: Any, part: Any) -> bool:
    """Whether a tensor can take the place of another, or a number is the same."""
    if isinstance(old_part, Tensor) and isinstance(part, Tensor):
        return old_part.shape == part.shape and old_part.dtype == part.dtype
    return type(old_part) is type(part) and old_part == part


def _described(part: Any) -> str:
    return f"{part.dtype} of shape {tuple(part.shape)}" if isinstance(part, Tensor) else repr(part)


def _parts(kernel: Any) -> dict[str, Any]:
    """The tensors and the numbers with a fraction that a kernel holds, by the path to them."""
    parts: dict[str, Any] = {}
    _collect(kernel, type(kernel).__name__, parts, seen=set())
    return parts


def _collect(owner: Any, path: str, parts: dict[str, Any], seen: set[int]) -> None:
    """Add the parts of an object, each object once."""
    # No integers and no flags: they follow from the model's sizes, which a sync does not change.
    if isinstance(owner, Tensor | float):
        parts[path] = owner
        return

    if id(owner) in seen:
        return
    seen.add(id(owner))

    for name, value in _attributes(owner):
        _collect(value, f"{path}.{name}", parts, seen)


def _attributes(owner: Any) -> Iterable[tuple[Any, Any]]:
    """What a container, or an object of vLLM's experts, holds. A layer in it has a kernel of its own."""
    if isinstance(owner, dict):
        return owner.items()
    if isinstance(owner, list | tuple):
        return enumerate(owner)
    if type(owner).__module__.startswith(_PACKAGE) and not isinstance(owner, nn.Module):
        return getattr(owner, "__dict__", {}).items()
    return ()
