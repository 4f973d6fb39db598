"""Encode and decode quantized values in plain tensor operations, which `torch.compile` can compile.

Invariant: the bytes equal those of compressed-tensors' compressors (CPU). The division rounds to bfloat16, as theirs does: in
float32 it would change about one quantized value in a hundred (paper Sec. 3.1, `W_low-bit = Quant(theta)`).
"""

from __future__ import annotations

import torch
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationScheme, QuantizationType
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor

from .activations import FP8, FP8_MAX
from .compiled import compiled_on_cuda
from .scheme import effective_group_size


# In this file `weight` is bfloat16 `(out, in)` and contiguous, `scheme` is a supported scheme, and `global_scale` is float32
# `(1,)`, or `None` for a scheme without one.

# Scale: bfloat16, or float8_e4m3fn with a global scale. Zero point: int8, or `None` for symmetric schemes.
QParams = tuple[Tensor, Tensor | None]

# Between 128 and 256 bfloat16 numbers are 1 apart. So adding 136 rounds a small number to the nearest integer (ties to even)
# and leaves that integer plus 8 in the low bits of the mantissa.
_INT4_BIAS = 136.0


# The producer ---------------------------------------------------------------------------------------------------------


@compiled_on_cuda
def extremes(weight: Tensor, scheme: QuantizationScheme) -> tuple[Tensor, Tensor]:
    """
    Minimum and maximum of zero and the weights of each scale, bfloat16; for symmetric schemes minus and plus the largest magnitude.

    NaN and infinity in a weight stay NaN and infinity.
    """
    tiles = as_tiles(weight, scheme)
    if scheme.weights.symmetric:
        high = absmax(tiles).amax(1)
        return -high, high
    # On a CPU both together are faster than `aminmax`. Adding zero makes -0.0 a 0.0.
    return tiles.amin((1, 3)).clamp_(max=0).add_(0.0), tiles.amax((1, 3)).clamp_(min=0).add_(0.0)


def qparams_of(low: Tensor, high: Tensor, scheme: QuantizationScheme, global_scale: Tensor | None = None) -> QParams:
    """Scale and zero point from [`extremes`], computed by compressed-tensors: small tensors, never compiled."""
    scale, zero_point = calculate_qparams(low, high, scheme.weights, global_scale)
    return scale.to(scheme.weights.scale_dtype or scale.dtype), None if scheme.weights.symmetric else zero_point


@compiled_on_cuda
def encode(weight: Tensor, qparams: QParams, scheme: QuantizationScheme) -> Tensor:
    """
    Quantized values of a weight in the checkpoint format, for schemes without a global scale.

    Packed schemes: int32 `(out, in * bits / 32)`. Others: float8_e4m3fn or int8 `(out, in)`. The scale must be above zero.
    """
    (scale, zero_point), tiles = qparams, as_tiles(weight, scheme)
    quotient = steps(tiles, per_tile(scale), None if zero_point is None else per_tile(zero_point))
    quotient, bits = quotient.reshape(weight.shape), scheme.weights.num_bits
    if scheme.weights.type == QuantizationType.FLOAT:
        return fp8_quantized(quotient)
    if scheme.format == "pack-quantized" and bits == 4:
        return pack_int4(quotient)
    quantized = int_quantized(quotient, bits)
    # Packed: four to a word, each plus 128.
    return (quantized.view(torch.uint8) ^ 0x80).view(torch.int32) if scheme.format == "pack-quantized" else quantized


@compiled_on_cuda
def decode(
    quantized: Tensor, qparams: QParams, scheme: QuantizationScheme, dtype: torch.dtype, global_scale: Tensor | None
) -> Tensor:
    """
    The matrix `(out, in)` of quantized values in the checkpoint format, in new storage.

    Subtracts the zero point, multiplies by the scale in bfloat16, and then casts to `dtype`; with a global scale it multiplies in
    float32. Bit for bit the decompression of compressed-tensors.
    """
    scale, zero_point = qparams
    if global_scale is not None:
        values = unpack_fp4_from_uint8(quantized, quantized.shape[0], 2 * quantized.shape[1], torch.float32)
        product = as_tiles(values, scheme) * per_tile(scale.float() / global_scale)
        return product.reshape(values.shape).to(torch.bfloat16).to(dtype)
    if scheme.format == "pack-quantized":
        quantized = unpacked(quantized, scheme.weights.num_bits)
    tiles = as_tiles(quantized, scheme).to(scale.dtype)
    if zero_point is not None:
        tiles.sub_(per_tile(zero_point.to(scale.dtype)))
    return tiles.mul_(per_tile(scale)).reshape(quantized.shape).to(dtype)


# Pieces ---------------------------------------------------------------------------------------------------------------


def as_tiles(matrix: Tensor, scheme: QuantizationScheme) -> Tensor:
    """
    View a matrix `(out, in)` as `(out / height, height, in / width, width)`: tiles with one scale each.

    `height` is 1 for groups and channels, 128 for blocks.
    """
    height, width = scheme.weights.block_structure or (1, effective_group_size(scheme) or matrix.shape[1])
    return matrix.unflatten(1, (-1, width)).unflatten(0, (-1, height))


def per_tile(scale: Tensor) -> Tensor:
    """Scales or zero points `(out / height, in / width)` in a shape that broadcasts with [`as_tiles`]."""
    return scale.unsqueeze(1).unsqueeze(-1)


def absmax(weight: Tensor) -> Tensor:
    """Largest magnitude along the last dimension of a bfloat16 tensor; NaN and infinity stay."""
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
    Round to 4-bit values in [-8, 7], add 8, and pack eight to a word, the first in the lowest bits.

    `quotient` is bfloat16 `(out, in)` in units of the scale and is overwritten; the result is int32 `(out, in / 8)`.
    """
    pairs = quotient.add_(_INT4_BIAS).clamp_(_INT4_BIAS - 8, _INT4_BIAS + 7).view(torch.int32)
    # Each half holds 0x4300 + value + 8. Shifted by 12, the upper value lands in bits 4 to 7 above a 4 of the exponent.
    return (pairs >> 12).add_(pairs).sub_(4).to(torch.uint8).view(torch.int32)


def unpacked(words: Tensor, num_bits: int) -> Tensor:
    """Unpack words of 4-bit or 8-bit values to int8 `(out, in)`."""
    octets = words.view(torch.uint8)
    if num_bits == 8:
        return (octets ^ 0x80).view(torch.int8)
    # Little-endian: byte i of a word holds the values 2i (low bits) and 2i + 1 (high bits), each plus 8.
    return torch.stack((octets & 0xF, octets >> 4), dim=-1).flatten(-2).view(torch.int8) - 8


def unpack_zero_points(words: Tensor, rows: int) -> Tensor:
    """Unpack words int32 `(ceil(rows / 8), groups)` to zero points int8 `(rows, groups)`, without waiting for the device."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device).unsqueeze(-1)
    return ((words.unsqueeze(1) >> shifts & 0xF) - 8).to(torch.int8).flatten(0, 1)[:rows]


def int_quantized(quotient: Tensor, num_bits: int) -> Tensor:
    """Round to int8 of the same shape; overwrites `quotient`."""
    half = 1 << (num_bits - 1)
    return quotient.clamp_(-half, half - 1).round_().to(torch.int8)


def fp8_quantized(quotient: Tensor) -> Tensor:
    """Round to float8_e4m3fn of the same shape; overwrites `quotient`."""
    # Adding zero turns -0.0 into 0.0, as the zero point of compressed-tensors does.
    return quotient.add_(0.0).clamp_(-FP8_MAX, FP8_MAX).to(FP8)
