"""Dynamic activation quantization: scale, rounding and clamping of vLLM's kernels, bit for bit (paper Sec. 3.1, step 2).

A code that falls on the other side costs a step of 1/16 (float8) where a rounding costs 1/256.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .compiled import compiled_on_cuda, diverged, sample


FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
# vLLM's floor for a dynamic activation scale (1 / (448 * 512)): keeps an all-zero token from dividing by zero.
FP8_MIN_SCALE = 1.0 / (FP8_MAX * 512.0)
# vLLM's floor for the largest magnitude of a group of 128.
FP8_GROUP_MIN = 1e-10


class _LastResults(threading.local):
    """Of each function and its arguments: the last tensor, its state, and what the function gave for it."""

    def __init__(self) -> None:
        self.entries: dict[tuple, tuple[weakref.ref[Tensor], tuple[int, int], Any]] = {}


_last = _LastResults()


@torch.no_grad()
def memoize_last(function: Callable[..., Any], x: Tensor, *args: Any) -> Any:
    """
    `function(x, *args)`, or what it gave in this thread when it was last called, if that was with this very tensor.

    A model gives q, k, v, and gate, up, one tensor object: it is cast and quantized for the first of them. The result is
    forgotten when `x` is freed or has been written to. It has no gradient and must not be written to.
    """
    if x.is_inference():  # which counts no versions
        return function(x, *args)
    entries, key, state = _last.entries, (function, args), (x._version, x.data_ptr())
    last, its_state, result = entries.get(key, (None, None, None))
    if last is not None and last() is x and its_state == state:
        return result

    def forget(freed: weakref.ref[Tensor]) -> None:
        if entries.get(key, (None,))[0] is freed:
            entries.pop(key, None)

    result = function(x, *args)
    if result is not x:
        entries[key] = weakref.ref(x, forget), state, result
    return result


def _input_samples(x: Tensor, *_: Any) -> Iterator[tuple]:
    """Inputs that the compiled form of a quantizer is checked with: also tokens with a scale of 1, which has ties, and NaN."""
    numbers = sample(x.dtype)
    for low, high in ((-FP8_MAX, FP8_MAX), (-127.0, 127.0)):
        tokens = numbers[:256].clamp(low, high)
        tokens[:, ::128], tokens[:, 1::128] = low, high
        yield (tokens.to(x.device),)
    yield (numbers.to(x.device),)
    yield (diverged(tokens).to(x.device),)


def _quantized_samples(quantized: Tensor, scale: Tensor, dtype: torch.dtype) -> Iterator[tuple]:
    """Every quantized value, of 8 bits, with scales of all sizes, infinity and NaN."""
    scales = torch.cat((sample(torch.float32)[:512, :2].abs(), torch.tensor([[0.0, torch.inf], [torch.nan, 1.0]])))
    values = torch.arange(256).repeat(len(scales), 2).to(torch.uint8).view(quantized.dtype)
    yield values.to(quantized.device), scales.to(scale.device), dtype


@compiled_on_cuda(_input_samples)
def quantize_tokens_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Per-token float8: `x` `(tokens, in)` to quantized values float8_e4m3fn `(tokens, in)` and scale float32 `(tokens, 1)`."""
    amax = x.abs().amax(dim=-1, keepdim=True).float()
    scale = _divided(amax, FP8_MAX).clamp(min=FP8_MIN_SCALE)
    # vLLM multiplies by the reciprocal instead of dividing; the two differ in the last bit of some quantized values.
    return (x.float() * scale.reciprocal()).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


@compiled_on_cuda(_input_samples)
def quantize_groups_fp8(x: Tensor, group_size: int = 128) -> tuple[Tensor, Tensor]:
    """Float8 with one scale for each token and group: `x` to quantized values `(tokens, in)`, scale float32 `(tokens, in / group_size)`."""
    groups = x.float().unflatten(-1, (-1, group_size))
    scale = _divided(groups.abs().amax(dim=-1).clamp(min=FP8_GROUP_MIN), FP8_MAX)
    return (groups / scale.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX).to(FP8).flatten(-2), scale


@compiled_on_cuda(_input_samples)
def quantize_tokens_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric per-token int8: `x` to quantized values int8 `(tokens, in)` and scale float32 `(tokens, 1)`, 0 for a token of zeros."""
    x = x.float()
    amax = x.abs().amax(dim=-1, keepdim=True)
    scale = _divided(amax, 127.0)
    # The reciprocal is rounded once in vLLM's CUDA kernel (127 / amax) and twice in its CPU kernel.
    inverse = torch.full_like(amax, 127.0) / amax if x.device.type == "cuda" else scale.reciprocal()
    quantized = (x * inverse).clamp(-128, 127).round().nan_to_num(0.0).to(torch.int8)
    return quantized, scale


def quantize_tokens_int8_asymmetric(x: Tensor) -> tuple[Tensor, Tensor]:
    """
    Asymmetric per-token int8 of the CPU engine's 4-bit kernel, whatever the scheme says of symmetry.

    Returns code minus zero point, int16 `(tokens, in)` in [-255, 255], and scale float32 `(tokens, 1)`.
    """
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
@compiled_on_cuda(_quantized_samples)
def dequantize_activations(quantized: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Quantized values `(..., in)` times scale float32 `(..., groups)`, multiplied in float32 and rounded once to `dtype`."""
    groups = quantized.float().unflatten(-1, (scale.shape[-1], -1))
    return groups.mul_(scale.unsqueeze(-1)).flatten(-2).to(dtype)


def _divided(x: Tensor, by: float) -> Tensor:
    """`x / by`, rounded once: by a Python number torch's CUDA kernel multiplies with the reciprocal."""
    return x / torch.full_like(x, by)
