"""Quantized values of a weight, and back, in plain tensor operations, which `torch.compile` takes as they are.

Invariant: the bytes of compressed-tensors' compressors (CPU). The division is rounded to bfloat16, as theirs is: in float32
it would flip about one quantized value in a hundred and cost alignment with the engine (paper Sec. 3.1, `W_low-bit = Quant(theta)`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationScheme, QuantizationType
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor, nn

from .activations import FP8, FP8_MAX
from .compiled import compiled_on_cuda, diverged, sample
from .scheme import effective_group_size, has_global_scale


# Throughout, `weight` is bfloat16 `(out, in)` and contiguous, `scheme` is a supported scheme, and `global_scale` is float32
# `(1,)`, or `None` for a scheme without one.

# Scale, bfloat16 or, below a global scale, float8_e4m3fn, and zero point, int8, or `None` with symmetric quantized values.
QParams = tuple[Tensor, Tensor | None]
FP4_MAX = 6.0

# The largest float32 number that each 4-bit float but the last is nearest to: a tie goes to the one with an even code.
_FP4_LIMITS = (0.25, 0.75 - 2**-24, 1.25, 1.75 - 2**-23, 2.5, 3.5 - 2**-22, 5.0)
_FP4_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

# In [128, 256) neighbouring bfloat16 numbers are 1 apart, so adding 136 rounds a small number to the nearest integer, ties
# to even, and leaves that integer plus 8 in the low bits of the mantissa.
_INT4_BIAS = 136.0


# What the compiled forms are checked with ------------------------------------------------------------------------------


def _quantizations(
    scheme: QuantizationScheme, device: torch.device
) -> Iterator[tuple[Tensor, QParams, QuantizationScheme, Tensor | None]]:
    """Arguments of [`encode`]: each scale and a quarter of it, which saturates; below global scales for several sizes of weights."""
    weight, global_scales = sample().to(device), [None]
    if has_global_scale(scheme):
        global_scales = [
            torch.tensor([FP8_MAX * FP4_MAX / largest], device=device) for largest in (1e37, 1e15, 8, 1e-10, 1e-30)
        ]
    for global_scale in global_scales:
        scale, zero_point = qparams_of(*extremes.__wrapped__(weight, scheme), scheme, global_scale)
        quarter = (scale.float() / 4).to(scale.dtype)
        for some in (scale, torch.where(quarter.float() > 0, quarter.float(), scale.float()).to(scale.dtype)):
            yield weight, (some, zero_point), scheme, global_scale


def _extremes_samples(weight: Tensor, scheme: QuantizationScheme) -> Iterator[tuple]:
    numbers = sample().to(weight.device)
    return ((x, scheme) for x in (numbers, diverged(numbers)))


def _encode_samples(weight: Tensor, qparams: QParams, scheme: QuantizationScheme, *_: Any) -> Iterator[tuple]:
    return _quantizations(scheme, weight.device)


def _decode_samples(
    quantized: Tensor, qparams: QParams, scheme: QuantizationScheme, columns: int, dtype: torch.dtype, *_: Any
) -> Iterator[tuple]:
    for weight, *args in _quantizations(scheme, quantized.device):
        yield encode.__wrapped__(weight, *args), args[0], scheme, weight.shape[1], dtype, args[-1]


# The producer ---------------------------------------------------------------------------------------------------------


@compiled_on_cuda(_extremes_samples)
def extremes(weight: Tensor, scheme: QuantizationScheme) -> tuple[Tensor, Tensor]:
    """
    Extremes of zero and the weights of each scale, bfloat16; with symmetric quantized values minus and plus the largest magnitude.

    NaN and infinity in a weight come out as such.
    """
    blocks = as_blocks(weight, scheme)
    if scheme.weights.symmetric:
        high = absmax(blocks)
        return -high, high
    # On CPU together faster than `aminmax`. Adding zero takes the sign of zero away.
    return blocks.amin(-1).clamp_(max=0).add_(0.0), blocks.amax(-1).clamp_(min=0).add_(0.0)


def qparams_of(low: Tensor, high: Tensor, scheme: QuantizationScheme, global_scale: Tensor | None = None) -> QParams:
    """Scale and zero point between [`extremes`], by compressed-tensors itself: a few small tensors, never compiled."""
    scale, zero_point = calculate_qparams(low, high, scheme.weights, global_scale)
    return scale.to(scheme.weights.scale_dtype or scale.dtype), None if scheme.weights.symmetric else zero_point


@compiled_on_cuda(_encode_samples)
def encode(weight: Tensor, qparams: QParams, scheme: QuantizationScheme, global_scale: Tensor | None = None) -> Tensor:
    """
    Quantized values of a weight, as the checkpoint format of the scheme holds them.

    Packed schemes: int32 `(out, ceil(in * bits / 32))`, or uint8 `(out, in / 2)` below a global scale. Others: float8_e4m3fn
    or int8 `(out, in)`. The scale is above zero.
    """
    (scale, zero_point), blocks = qparams, as_blocks(weight, scheme)
    if global_scale is not None:
        return pack_fp4((blocks / (scale.float() / global_scale).unsqueeze(-1)).flatten(1))  # float32, all of it
    quotient = steps(blocks, scale.unsqueeze(-1), None if zero_point is None else zero_point.unsqueeze(-1))
    quotient, bits = as_matrix(quotient, weight.shape, scheme), scheme.weights.num_bits
    if scheme.weights.type == QuantizationType.FLOAT:
        return fp8_quantized(quotient)
    if scheme.format == "pack-quantized":
        return pack_int4(quotient) if bits == 4 else pack_int8(quotient)
    return int_quantized(quotient, bits)


@compiled_on_cuda(_decode_samples)
def decode(
    quantized: Tensor,
    qparams: QParams,
    scheme: QuantizationScheme,
    columns: int,
    dtype: torch.dtype,
    global_scale: Tensor | None = None,
) -> Tensor:
    """
    The matrix `(out, columns)` that the quantized values of [`encode`] stand for, in new storage.

    Quantized values minus the zero point, times scale, multiplied and rounded in bfloat16 and only then cast to `dtype`; below a global
    scale multiplied in float32: bit for bit the decompression of compressed-tensors.
    """
    scale, zero_point = qparams
    if global_scale is not None:
        blocks = as_blocks(unpack_fp4(quantized), scheme)
        return (blocks * (scale.float() / global_scale).unsqueeze(-1)).flatten(1).to(torch.bfloat16).to(dtype)
    if scheme.format == "pack-quantized":
        quantized = unpacked(quantized, scheme.weights.num_bits, columns)
    blocks = as_blocks(quantized, scheme).to(scale.dtype)
    if zero_point is not None:
        blocks.sub_(zero_point.to(blocks.dtype).unsqueeze(-1))
    return as_matrix(blocks.mul_(scale.unsqueeze(-1)), quantized.shape, scheme).to(dtype)


# Pieces ---------------------------------------------------------------------------------------------------------------


def as_blocks(weight: Tensor, scheme: QuantizationScheme) -> Tensor:
    """A matrix `(out, in)` with the elements of one scale along the last dimension: `(out, groups, group_size)` for groups."""
    if scheme.weights.block_structure is not None:
        height, width = scheme.weights.block_structure
        tiles = weight.unflatten(1, (-1, width)).unflatten(0, (-1, height))
        return tiles.transpose(1, 2).flatten(-2)
    return weight.unflatten(-1, (-1, width_of_scales(weight.shape[1], scheme)))


def as_matrix(blocks: Tensor, shape: torch.Size, scheme: QuantizationScheme) -> Tensor:
    """The inverse of [`as_blocks`]: back to `shape` `(out, in)`."""
    if scheme.weights.block_structure is not None:
        blocks = blocks.unflatten(-1, tuple(scheme.weights.block_structure)).transpose(1, 2)
    return blocks.reshape(shape)


def width_of_scales(columns: int, scheme: QuantizationScheme) -> int:
    """Neighbouring weights that share a scale, in a row of `columns`."""
    if scheme.weights.block_structure is not None:
        return scheme.weights.block_structure[1]
    return effective_group_size(scheme) or columns


def rows_of_scales(scale: Tensor, scheme: QuantizationScheme) -> Tensor:
    """`scale` with one row for each row of the weight, `(out, in / width)`."""
    blocks = scheme.weights.block_structure
    return scale if blocks is None else scale.repeat_interleave(blocks[0], 0)


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
    Round to 4-bit quantized values in [-8, 7] and pack eight to a word, the first in the lowest bits, each plus 8.

    From bfloat16 `(out, in)` in units of the scale, which is overwritten, to int32 `(out, ceil(in / 8))`.
    """
    if quotient.shape[-1] % 8:
        return packed(int_quantized(quotient, 4), 4)
    pairs = quotient.add_(_INT4_BIAS).clamp_(_INT4_BIAS - 8, _INT4_BIAS + 7).view(torch.int32)
    # Each half holds 0x4300 + code + 8. Shifted by 12, the upper code lands in bits 4 to 7 above a 4 of the exponent.
    return (pairs >> 12).add_(pairs).sub_(4).to(torch.uint8).view(torch.int32)


def pack_int8(quotient: Tensor) -> Tensor:
    """As [`pack_int4`], for 8-bit quantized values, four to a word, each plus 128: int32 `(out, ceil(in / 4))`."""
    if quotient.shape[-1] % 4:
        return packed(int_quantized(quotient, 8), 8)
    return quotient.clamp_(-128, 127).round_().add_(128).to(torch.uint8).view(torch.int32)


def pack_zero_points(zero_point: Tensor) -> Tensor:
    """Zero points int8 `(out, groups)` of 4 bits to words int32 `(ceil(out / 8), groups)`."""
    return packed(zero_point, 4, dim=0)


def unpack_zero_points(words: Tensor, rows: int) -> Tensor:
    """The inverse of [`pack_zero_points`]: int8 `(rows, groups)`."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device).unsqueeze(-1)
    return ((words.unsqueeze(1) >> shifts & 0xF) - 8).to(torch.int8).flatten(0, 1)[:rows]


def packed(values: Tensor, num_bits: int, dim: int = 1) -> Tensor:
    """Quantized values int8 `(out, in)` of any size to words int32 along `dim`, the first in the lowest bits; the last is filled up."""
    count = 32 // num_bits
    missing = -values.shape[dim] % count
    lanes = nn.functional.pad(values.int() + (1 << (num_bits - 1)), (0, missing) if dim == 1 else (0, 0, 0, missing))
    shifts = torch.arange(0, 32, num_bits, dtype=torch.int32, device=values.device)
    shifted = lanes.unflatten(dim, (-1, count)) << (shifts if dim == 1 else shifts.unsqueeze(-1))
    return shifted.sum(dim + 1, dtype=torch.int32)


def unpacked(words: Tensor, num_bits: int, columns: int) -> Tensor:
    """Quantized values of [`packed`] words of 4 or 8 bits, int8 `(out, columns)`."""
    octets = words.view(torch.uint8)
    if num_bits == 8:
        return (octets ^ 0x80).view(torch.int8)[:, :columns]
    # Little-endian: byte i of a word holds quantized values 2i (low) and 2i + 1 (high), each plus 8.
    quantized = torch.stack((octets & 0xF, octets >> 4), dim=-1).flatten(-2).view(torch.int8)
    return (quantized - 8)[:, :columns]


def int_quantized(quotient: Tensor, num_bits: int) -> Tensor:
    """Round to integer quantized values, int8 of the same shape; overwrites `quotient`."""
    half = 1 << (num_bits - 1)
    return quotient.clamp_(-half, half - 1).round_().to(torch.int8)


def fp8_quantized(quotient: Tensor) -> Tensor:
    """Round to float8_e4m3fn of the same shape; overwrites `quotient`."""
    # Adding zero turns -0.0 into 0.0, as the zero point of compressed-tensors does.
    return quotient.add_(0.0).clamp_(-FP8_MAX, FP8_MAX).to(FP8)


def pack_fp4(quotient: Tensor) -> Tensor:
    """
    Round to 4-bit floats (0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign) and pack two to a byte, the first in the lower bits.

    From float32 `(out, in)` in units of the scale, which is overwritten, to uint8 `(out, in / 2)`.
    """
    # As with float8: only zero itself loses its sign.
    negative = quotient.add_(0.0).signbit()
    quantized = torch.bucketize(quotient.abs_(), torch.tensor(_FP4_LIMITS, device=quotient.device), out_int32=True)
    quantized = quantized.to(torch.uint8).add_(negative, alpha=8).view(torch.int16)
    return (quantized | (quantized >> 4)).to(torch.uint8)


def unpack_fp4(quantized: Tensor) -> Tensor:
    """The numbers of [`pack_fp4`]'s quantized values, float32 `(out, in)`."""
    numbers = torch.tensor(_FP4_NUMBERS, device=quantized.device)
    return torch.cat((numbers, -numbers))[torch.stack((quantized & 0xF, quantized >> 4), dim=-1).flatten(-2).int()]
