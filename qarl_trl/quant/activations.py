"""Dynamic activation quantization with the scale, rounding and clamping of vLLM's kernels, bit for bit (paper Sec. 3.1, step 2).

A value that rounds to the next float8 number is off by 1/16, where a bfloat16 rounding is off by 1/256.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .compiled import compiled_on_cuda


FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
# vLLM's lower bound of a dynamic activation scale (1 / (448 * 512)): no division by zero for an all-zero token.
FP8_MIN_SCALE = 1.0 / (FP8_MAX * 512.0)
# vLLM's lower bound of the largest magnitude in a group of 128.
FP8_GROUP_MIN = 1e-10


@torch.no_grad()
def memoize_last(function: Callable[..., Any], x: Tensor, *args: Any) -> Any:
    """
    `function(x, *args)`, or its last result for this tensor object, unless the tensor was written to since.

    q, k, v (and gate, up) get the same tensor object: only the first of them casts and quantizes it. The result is an
    attribute of `x` and lives as long as `x`. It has no gradient; do not write to it.
    """
    if x.is_inference():  # inference tensors count no versions
        return function(x, *args)
    results, state = x.__dict__.setdefault("_memoized", {}), (x._version, x.data_ptr())
    its_state, result = results.get((function, args), (None, None))
    if its_state == state:
        return result
    result = function(x, *args)
    if result is not x:  # else a reference cycle would keep it
        results[function, args] = state, result
    return result


@compiled_on_cuda
def quantize_tokens_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Per-token float8: `x` `(tokens, in)` to quantized values float8_e4m3fn `(tokens, in)` and scale float32 `(tokens, 1)`."""
    amax = x.abs().amax(dim=-1, keepdim=True).float()
    scale = _divided(amax, FP8_MAX).clamp(min=FP8_MIN_SCALE)
    # vLLM multiplies by the reciprocal instead of dividing; for some values the last bit differs.
    return (x.float() * scale.reciprocal()).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


@compiled_on_cuda
def quantize_groups_fp8(x: Tensor, group_size: int = 128) -> tuple[Tensor, Tensor]:
    """Float8 with one scale per token and group: `x` `(tokens, in)` to quantized values `(tokens, in)`, scale float32 `(tokens, in / group_size)`."""
    groups = x.float().unflatten(-1, (-1, group_size))
    scale = _divided(groups.abs().amax(dim=-1).clamp(min=FP8_GROUP_MIN), FP8_MAX)
    return (groups / scale.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX).to(FP8).flatten(-2), scale


@compiled_on_cuda
def quantize_tokens_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric per-token int8: `x` to quantized values int8 `(tokens, in)` and scale float32 `(tokens, 1)`, 0 for a token of zeros."""
    x = x.float()
    amax = x.abs().amax(dim=-1, keepdim=True)
    scale = _divided(amax, 127.0)
    # vLLM's CUDA kernel rounds the reciprocal once (127 / amax), its CPU kernel twice.
    inverse = torch.full_like(amax, 127.0) / amax if x.device.type == "cuda" else scale.reciprocal()
    quantized = (x * inverse).clamp(-128, 127).round().nan_to_num(0.0).to(torch.int8)
    return quantized, scale


def quantize_tokens_int8_asymmetric(x: Tensor) -> tuple[Tensor, Tensor]:
    """Like the CPU engine's 4-bit kernel, for any scheme: value minus zero point int16 `(tokens, in)`, and scale float32 `(tokens, 1)`."""
    x = x.float()
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    steps = torch.where(low == high, 1.0, torch.full_like(low, 255.0) / (high - low))
    from_low, from_high = -128 - low * steps, 127 - high * steps
    zero_point = (
        torch.where((low * steps - 128) + (high * steps + 127) > 0, from_low, from_high).clamp(-128, 127).round()
    )
    scaled = x * steps
    nearest = torch.copysign((scaled.abs() + 0.5).floor(), scaled)  # halves away from zero
    return ((nearest + zero_point).clamp(-128, 127) - zero_point).to(torch.int16), steps.reciprocal()


@torch.no_grad()
@compiled_on_cuda
def dequantize_activations(quantized: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply quantized values `(..., in)` by the scale float32 `(..., groups)` in float32, and round once to `dtype`."""
    groups = quantized.float().unflatten(-1, (scale.shape[-1], -1))
    return groups.mul_(scale.unsqueeze(-1)).flatten(-2).to(dtype)


def _divided(x: Tensor, by: float) -> Tensor:
    """`x / by`, rounded once; for a Python number torch's CUDA kernel would multiply by the reciprocal."""
    return x / torch.full_like(x, by)
