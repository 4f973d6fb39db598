"""Codes of a weight in as few passes over it as plain tensor operations allow.

Invariant: every function gives the bytes of compressed-tensors' compressors (CPU), which `tests/quant/test_codes.py` compares
on golden rows and 10^7 random weights per scheme. The division is rounded to bfloat16, as theirs is: in float32 it would
flip about one code in a hundred and cost alignment with the engine (paper Sec. 3.1, `W_low-bit = Quant(theta)`).
"""

from __future__ import annotations

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from torch import Tensor


FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max

# In [128, 256) neighbouring bfloat16 numbers are 1 apart, so adding 136 rounds a small number to the nearest integer, ties
# to even, and leaves that integer plus 8 in the low bits of the mantissa.
_INT4_BIAS = 136.0


def absmax(weight: Tensor) -> Tensor:
    """Largest magnitude along the last dimension of a bfloat16 tensor; NaN and infinity come out as such."""
    # Without the sign bit, bfloat16 patterns are ordered like integers, and integer maxima need no conversion.
    magnitude = weight.view(torch.int16) & 0x7FFF
    if magnitude.shape[-1] > 128 and magnitude.shape[-1] % 128 == 0:
        magnitude = magnitude.unflatten(-1, (-1, 128)).amax(-1)  # short rows reduce faster than long ones
    return magnitude.amax(-1).view(torch.bfloat16)


def steps(weight: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """`weight / scale + zero_point`, each operation rounded to bfloat16; a new tensor of `weight`'s shape."""
    quotient = weight / scale
    return quotient if zero_point is None else quotient.add_(zero_point.to(quotient.dtype))


def pack_int4(quotient: Tensor) -> Tensor:
    """
    Round to 4-bit codes in [-8, 7] and pack eight to a word, the first in the lowest bits, each plus 8.

    Args:
        quotient (`Tensor`): bfloat16 `(out, in)` in units of the scale; overwritten.

    Returns:
        `Tensor`: int32 `(out, ceil(in / 8))`.
    """
    if quotient.shape[-1] % 8:
        return packed(int_codes(quotient, 4), 4)
    pairs = quotient.add_(_INT4_BIAS).clamp_(_INT4_BIAS - 8, _INT4_BIAS + 7).view(torch.int32)
    # Each half holds 0x4300 + code + 8. Shifted by 12, the upper code lands in bits 4 to 7 above a 4 of the exponent.
    return (pairs >> 12).add_(pairs).sub_(4).to(torch.uint8).view(torch.int32)


def pack_int8(quotient: Tensor) -> Tensor:
    """As [`pack_int4`], for 8-bit codes, four to a word, each plus 128: int32 `(out, ceil(in / 4))`."""
    if quotient.shape[-1] % 4:
        return packed(int_codes(quotient, 8), 8)
    return quotient.clamp_(-128, 127).round_().add_(128).to(torch.uint8).view(torch.int32)


def packed(values: Tensor, num_bits: int, dim: int = 1) -> Tensor:
    """Codes int8 `(out, in)` of any size to words along `dim`, by compressed-tensors."""
    # It cuts and transposes; with one column left `contiguous()` would keep strides that refuse a view of the bytes.
    return pack_to_int32(values, num_bits, packed_dim=dim).clone(memory_format=torch.contiguous_format)


def int_codes(quotient: Tensor, num_bits: int) -> Tensor:
    """Round to integer codes, int8 of the same shape; overwrites `quotient`."""
    half = 1 << (num_bits - 1)
    return quotient.clamp_(-half, half - 1).round_().to(torch.int8)


def fp8_codes(quotient: Tensor) -> Tensor:
    """Round to float8_e4m3fn of the same shape; overwrites `quotient`."""
    # Adding zero turns -0.0 into 0.0, as the zero point of compressed-tensors does.
    return quotient.add_(0.0).clamp_(-FP8_MAX, FP8_MAX).to(FP8)
