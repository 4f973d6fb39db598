"""Dynamic activation quantization with the scale, rounding and clamping of vLLM's kernels, bit for bit.

Paper Sec. 3.1, step 2. A value that rounds to the next float8 number is off by 1/16, where a bfloat16 rounding is off
by 1/256.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..cuda_kernels import engine_operation
from ..reference import FP8, FP8_MAX


# vLLM's lower bound of a dynamic activation scale (1 / (448 * 512)): no division by zero for an all-zero token.
FP8_MIN_SCALE = 1.0 / (FP8_MAX * 512.0)
# vLLM's lower bound of the largest magnitude in a group of 128.
FP8_GROUP_MIN = 1e-10


@torch.no_grad()
def memoize_last(function: Callable[..., Any], x: Tensor, *args: Any) -> Any:
    """
    Compute `function(x, *args)`, or return its last result for this tensor object if nobody wrote to the tensor since.

    q, k, v (and gate, up) get the same tensor object: only the first of them casts and quantizes it. The result is an
    attribute of `x` and lives as long as `x`.

    Args:
        function: A function of a tensor.
        x: The tensor.
        args: Its other arguments; they must have hashes.

    Returns:
        The result, without a gradient. Do not write to it.
    """
    if x.is_inference():  # inference tensors count no versions
        return function(x, *args)

    # New storage (`x.data = ...`) raises no version, so its address counts too.
    state = (x._version, x.data_ptr())
    results = x.__dict__.setdefault("_memoized", {})
    call = (function, args)

    if call in results:
        state_then, result = results[call]
        if state_then == state:
            return result

    result = function(x, *args)
    if result is not x:  # else a reference cycle would keep it
        results[call] = (state, result)
    return result


# Float8 --------------------------------------------------------------------------------------------------------------


def quantize_tokens_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """
    Float8 with one scale per token.

    Args:
        x: `(tokens, in)`, bfloat16 or float32.

    Returns:
        Quantized values float8_e4m3fn `(tokens, in)`, and scale float32 `(tokens, 1)`.
    """
    operation = engine_operation("scaled_fp8_quant", x)
    if operation is not None:
        quantized, scale = operation(x.reshape(-1, x.shape[-1]), use_per_token_if_dynamic=True)
        return quantized.view(x.shape), scale.view(*x.shape[:-1], 1)
    return plain_tokens_fp8(x)


def plain_tokens_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """[`quantize_tokens_fp8`] in plain operations."""
    # The largest of bfloat16 numbers is one of them, so the cast may come after.
    largest = x.abs().amax(dim=-1, keepdim=True).float()
    scale = _divided(largest, FP8_MAX).clamp(min=FP8_MIN_SCALE)

    # vLLM's CUDA kernel divides, its CPU kernel multiplies by the reciprocal: the last bit of some quotients differs.
    quotient = x.float() / scale if x.device.type == "cuda" else x.float() * scale.reciprocal()
    return quotient.clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


def quantize_groups_fp8(x: Tensor, group_size: int = 128) -> tuple[Tensor, Tensor]:
    """
    Float8 with one scale per token and group.

    Args:
        x: `(tokens, in)`, bfloat16 or float32.
        group_size: Number of values that share a scale.

    Returns:
        Quantized values float8_e4m3fn `(tokens, in)`, and scale float32 `(tokens, in / group_size)`.
    """
    groups = x.float().unflatten(-1, (-1, group_size))
    largest = groups.abs().amax(dim=-1).clamp(min=FP8_GROUP_MIN)
    scale = _divided(largest, FP8_MAX)

    # Here vLLM divides.
    quotient = (groups / scale.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX)
    return quotient.to(FP8).flatten(-2), scale


# Int8 ----------------------------------------------------------------------------------------------------------------


def quantize_tokens_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """
    Symmetric int8 with one scale per token.

    Args:
        x: `(tokens, in)`, bfloat16 or float32.

    Returns:
        Quantized values int8 `(tokens, in)`, and scale float32 `(tokens, 1)`, 0 for a token of zeros.
    """
    operation = engine_operation("scaled_int8_quant", x)
    if operation is not None:
        quantized, scale, _ = operation(x.reshape(-1, x.shape[-1]))
        return quantized.view(x.shape), scale.view(*x.shape[:-1], 1)
    return plain_tokens_int8(x)


def plain_tokens_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """[`quantize_tokens_int8`] in plain operations."""
    x = x.float()
    largest = x.abs().amax(dim=-1, keepdim=True)
    scale = _divided(largest, 127.0)

    # vLLM's CUDA kernel rounds the reciprocal once (127 / largest), its CPU kernel twice.
    on_cuda = x.device.type == "cuda"
    inverse = torch.full_like(largest, 127.0) / largest if on_cuda else scale.reciprocal()

    # For a token of zeros the reciprocal is infinite, and the product NaN.
    quotient = (x * inverse).clamp(-128, 127).round().nan_to_num(0.0)
    return quotient.to(torch.int8), scale


def quantize_tokens_int8_asymmetric(x: Tensor) -> tuple[Tensor, Tensor]:
    """
    Int8 with one scale and zero point per token, as in the CPU engine's 4-bit kernel.

    Args:
        x: `(tokens, in)`, any float dtype.

    Returns:
        Quantized values minus the zero point int16 `(tokens, in)`, and scale float32 `(tokens, 1)`.
    """
    x = x.float()
    # The range contains zero, as in the kernel.
    low = x.amin(-1, keepdim=True).clamp(max=0)
    high = x.amax(-1, keepdim=True).clamp(min=0)
    # A token of zeros has no range to divide by.
    inverse = torch.where(low == high, 1.0, torch.full_like(low, 255.0) / (high - low))

    # From the minimum or the maximum, as the kernel chooses: the two differ by roundings, which count where one is
    # halfway.
    from_low = -128 - low * inverse
    from_high = 127 - high * inverse
    takes_low = (low * inverse - 128) + (high * inverse + 127) > 0
    zero_point = torch.where(takes_low, from_low, from_high).clamp(-128, 127).round()

    quotient = x * inverse
    nearest = torch.copysign((quotient.abs() + 0.5).floor(), quotient)  # halves away from zero
    quantized = (nearest + zero_point).clamp(-128, 127)
    # A difference of two int8 numbers needs nine bits.
    return (quantized - zero_point).to(torch.int16), inverse.reciprocal()


# Back to numbers -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def dequantize_activations(quantized: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """
    Multiply quantized values by their scale in float32, and round once to `dtype`.

    Args:
        quantized: `(..., in)`, any dtype.
        scale: Float32 `(..., groups)`.
        dtype: Dtype of the result.

    Returns:
        `(..., in)`.
    """
    groups = quantized.float().unflatten(-1, (scale.shape[-1], -1))
    return groups.mul_(scale.unsqueeze(-1)).flatten(-2).to(dtype)


def _divided(x: Tensor, by: float) -> Tensor:
    """`x / by`, rounded once; for a Python number torch's CUDA kernel would multiply by the reciprocal."""
    return x / torch.full_like(x, by)
