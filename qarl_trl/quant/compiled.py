"""Run the quantizer's plain operations through `torch.compile` on a CUDA device, where that gives the same bytes.

Invariant: a process uses a compiled form only after it gave the bytes of the eager form for the first tensors of this
device, scheme and dtypes. Otherwise the eager form runs, and one warning says why.

On a CPU the eager form always runs, because inductor is no faster. There is no hand-written kernel, because quantizing
takes at most 2 % of a step. Measured on SmolLM2-135M: quantizing and dequantizing 106 M weights five times takes 1.6 s
of a step of 85 s.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor

from .scheme import quantized_key


# Devices on which to try the compiled form.
DEVICES = ("cuda",)
# These make a fused kernel round as the eager operations do: to bfloat16 after each operation, without fused
# multiply-add; by IEEE division instead of an approximate one; and without flushing float32 denormals, because
# bfloat16 denormals are among them.
OPTIONS: dict[str, Any] = {
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
}
Function = Callable[..., Any]
# For each function and the static parts of its arguments: the form that runs.
_CHOSEN: dict[tuple[Any, ...], Function] = {}


def compiled_on_cuda(plain: Function) -> Function:
    """
    Decorator: run a function of tensors compiled on CUDA.

    Args:
        plain: A function that does not write to its arguments. The first one is a tensor, on the device where it runs.
    """

    @functools.wraps(plain)
    def function(*args: Any) -> Any:
        if not _can_compile(args[0]):
            return plain(*args)

        case = (plain, *map(_static, args))
        if case not in _CHOSEN:
            _CHOSEN[case] = _choose(plain, args)
        return _CHOSEN[case](*args)

    return function


def _can_compile(tensor: Tensor) -> bool:
    """Whether to try the compiled form for a first argument."""
    # Subclasses, such as those of a pretended device or of FSDP2, have operations of their own.
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter)
    return tensor.device.type in DEVICES and is_plain and tensor.numel() > 0


def _static(arg: Any) -> Any:
    """The part of an argument that a kernel is compiled for: device, dtype and scheme, but no sizes."""
    if isinstance(arg, Tensor):
        return arg.device, arg.dtype
    if isinstance(arg, QuantizationScheme):
        return arg.format, quantized_key(arg.weights)
    return arg


def _choose(plain: Function, args: tuple[Any, ...]) -> Function:
    """The compiled form of a function, or the function itself after a warning."""
    compiled = torch.compile(plain, dynamic=True, options=OPTIONS)  # one kernel for the sizes of all layers

    try:
        if _same_bytes(compiled(*args), plain(*args)):
            return compiled
        problem = "gives other bytes than eager operations; please report this with the versions of torch and triton"
    except Exception as error:  # of any compiler
        problem = f"does not run ({type(error).__name__}: {str(error)[:500]})"

    warnings.warn(f"torch.compile of {plain.__name__} {problem}. Eager operations run instead: slower.", stacklevel=3)
    return plain


def _same_bytes(result: Any, expected: Any) -> bool:
    """Whether two tensors, or two tuples of tensors, have the same dtypes and bytes."""
    if isinstance(expected, tuple):
        return all(map(_same_bytes, result, expected))

    result_bytes = result.contiguous().view(torch.uint8)
    expected_bytes = expected.contiguous().view(torch.uint8)
    return result.dtype == expected.dtype and torch.equal(result_bytes, expected_bytes)
