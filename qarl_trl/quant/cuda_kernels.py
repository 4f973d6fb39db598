"""What runs on a CUDA device as one kernel instead of many small ones: dequantizing 4-bit weights, quantizing inputs.

Both give the bytes of the plain operations (`reference`, `activations`):
    4-bit weights: a product of two numbers of 8 and 4 bits is exact in float32, and rounded to bfloat16 once, as torch
        rounds the product of two bfloat16 numbers. A process uses the kernel of a scheme only after it gave the bytes
        of the plain operations for the first weight.
    Inputs: vLLM's own operations, which the engine calls, where a vLLM for GPUs is installed.

Measured on an H200 in the shape of Qwen2.5-1.5B, forward and backward of 8 x 552 tokens: the plain operations of 196
layers add half to nine tenths to its time, nearly all of it launches. What `torch.compile` made of them was slower
(2.2 times for a weight of 1536 x 8960), and rounded a division differently (torch 2.11). The kernel itself
has not run on a GPU.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor

from .scheme import quantized_key


# By device, scheme and dtypes: whether the kernel is used.
_CHOSEN: dict[tuple[Any, ...], bool] = {}
Decode = Callable[..., Tensor]


# Dequantizing --------------------------------------------------------------------------------------------------------


def decode_int4(
    words: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    scheme: QuantizationScheme,
    dtype: torch.dtype,
    plain: Decode,
) -> Tensor:
    """
    The matrix of packed 4-bit integers: by one kernel on CUDA, if that gives the bytes of the plain operations.

    Args:
        words: Int32 `(out, in / 8)`, eight values to a word, the first in the lowest bits, each plus 8.
        scale: Bfloat16 `(out, groups)`.
        zero_point: Int8 `(out, groups)`, or `None`.
        scheme: Their scheme.
        dtype: Dtype of the matrix: bfloat16, or float32 of the same numbers.
        plain: The plain operations, called with these arguments but the last.

    Returns:
        `(out, in)`.
    """
    if not _can_run(words):
        return plain(words, scale, zero_point, scheme, dtype)

    # Not by shape: rounding depends on the scheme and the dtypes alone.
    case = (words.device, quantized_key(scheme.weights), scale.dtype, dtype)
    if case not in _CHOSEN:
        _CHOSEN[case] = _gives_the_bytes(plain, words, scale, zero_point, scheme, dtype)

    if _CHOSEN[case]:
        return launch_decode_int4(words, scale, zero_point, dtype)
    return plain(words, scale, zero_point, scheme, dtype)


def _can_run(tensor: Tensor) -> bool:
    """Whether there is a kernel for a tensor."""
    # Subclasses, such as those of a pretended device, have operations of their own.
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter)
    return tensor.device.type == "cuda" and is_plain and tensor.numel() > 0


def _gives_the_bytes(plain: Decode, words: Tensor, scale: Tensor, zero_point: Any, scheme: Any, dtype: Any) -> bool:
    """Whether the kernel gives what the plain operations give; warns if not."""
    try:
        matrix = launch_decode_int4(words, scale, zero_point, dtype)
        if torch.equal(matrix, plain(words, scale, zero_point, scheme, dtype)):
            return True
        problem = "gives other numbers than plain operations; please report this with the versions of torch and triton"
    except Exception as error:  # of any compiler
        problem = f"does not run ({type(error).__name__}: {str(error)[:500]})"

    warnings.warn(f"The kernel that dequantizes 4-bit weights {problem}. Plain operations run: slower.", stacklevel=4)
    return False


def launch_decode_int4(words: Tensor, scale: Tensor, zero_point: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The kernel of [`decode_int4`]."""
    rows, words_of_row = words.shape
    groups_of_row = scale.shape[1]
    matrix = torch.empty((rows, 8 * words_of_row), dtype=dtype, device=words.device)

    # Words of a program, which writes eight values for each.
    block = 512
    number = words.numel()
    _kernel()[((number + block - 1) // block,)](
        # The kernel computes addresses from shapes, without strides.
        words.contiguous(),
        scale.contiguous(),
        zero_point if zero_point is None else zero_point.contiguous(),
        matrix,
        number,
        words_of_row,
        words_of_row // groups_of_row,
        groups_of_row,
        has_zero_point=zero_point is not None,
        block=block,
    )
    return matrix


@functools.cache
def _kernel() -> Any:
    """The kernel, for which Triton must be installed; torch for CUDA brings it."""
    from ._decode_int4 import decode_int4_kernel

    return decode_int4_kernel


# Quantizing inputs ---------------------------------------------------------------------------------------------------


def engine_operation(name: str, x: Tensor) -> Callable[..., Any] | None:
    """
    vLLM's operation `name` for a CUDA tensor `x`; `None` on other devices, or without a vLLM for GPUs.

    Args:
        name: A function of `vllm._custom_ops`.
        x: What it will be called with.
    """
    if not _can_run(x) or not _vllm_is_for_gpus():
        return None

    from vllm import _custom_ops as ops

    return getattr(ops, name)


@functools.cache
def _vllm_is_for_gpus() -> bool:
    if importlib.util.find_spec("vllm") is None:
        return False

    from vllm.platforms import current_platform

    return current_platform.is_cuda()
