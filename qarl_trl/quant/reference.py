"""Encode and decode quantized values in plain tensor operations.

Invariant: the bytes equal those of compressed-tensors' compressors (CPU). The division rounds to bfloat16, as theirs
does: in float32 it would change about one quantized value in a hundred (paper Sec. 3.1, `W_low-bit = Quant(theta)`).

Everywhere in this file:
    weight: bfloat16 `(out, in)`, contiguous.
    scheme: A supported scheme, with `format` set.
    scale: One for each tile of the weight, `(out / height, in / width)` ([`as_tiles`]): bfloat16, or float8_e4m3fn
        below a global scale.
    zero_point: int8 of the same shape, or `None` for symmetric schemes.
    global_scale: Float32 `(1,)`, or `None` for a scheme without one.
"""

from __future__ import annotations

import torch
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationScheme, QuantizationType
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor

from .scheme import effective_group_size


FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
# Between 128 and 256 bfloat16 numbers are 1 apart. So adding 136 rounds a small number to the nearest integer (ties to
# even) and leaves that integer plus 8 in the low bits of the mantissa.
_INT4_BIAS = 136.0


# The producer --------------------------------------------------------------------------------------------------------


def extremes(weight: Tensor, scheme: QuantizationScheme) -> tuple[Tensor, Tensor]:
    """
    Minimum and maximum of zero and the weights of each scale; for symmetric schemes minus and plus the largest
    magnitude.

    Args:
        weight: The weight. NaN and infinity in it stay NaN and infinity.
        scheme: Its scheme.

    Returns:
        Two tensors, bfloat16, in the shape of the scale.
    """
    tiles = as_tiles(weight, scheme)
    if scheme.weights.symmetric:
        high = absmax(tiles).amax(1)
        return -high, high

    # The range contains zero, as in compressed-tensors, so that zero is a quantized value.
    # On a CPU both together are faster than `aminmax`. Adding zero makes -0.0 a 0.0.
    low = tiles.amin((1, 3)).clamp_(max=0).add_(0.0)
    high = tiles.amax((1, 3)).clamp_(min=0).add_(0.0)
    return low, high


def qparams_of(
    low: Tensor, high: Tensor, scheme: QuantizationScheme, global_scale: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """
    Scale and zero point, computed by compressed-tensors: small tensors.

    Args:
        low: From [`extremes`].
        high: From [`extremes`].
        scheme: The scheme of the weight.
        global_scale: Its global scale.
    """
    scale, zero_point = calculate_qparams(low, high, scheme.weights, global_scale)
    # Below a global scale compressed-tensors may return the float8 values in a wider dtype.
    scale = scale.to(scheme.weights.scale_dtype or scale.dtype)

    if scheme.weights.symmetric:
        return scale, None
    return scale, zero_point


def encode(weight: Tensor, scale: Tensor, zero_point: Tensor | None, scheme: QuantizationScheme) -> Tensor:
    """
    Quantized values of a weight in the checkpoint format, for schemes without a global scale.

    Args:
        weight: The weight.
        scale: Its scale, above zero.
        zero_point: Its zero point.
        scheme: Its scheme.

    Returns:
        Packed schemes: int32 `(out, in * bits / 32)`. Others: float8_e4m3fn or int8 `(out, in)`.
    """
    tiles = as_tiles(weight, scheme)
    tile_zero_point = None if zero_point is None else per_tile(zero_point)
    quotient = in_units_of_scale(tiles, per_tile(scale), tile_zero_point).reshape(weight.shape)

    if scheme.weights.type == QuantizationType.FLOAT:
        # The cast to float8 rounds by itself.
        return fp8_quantized(quotient)

    packs = scheme.format == "pack-quantized"
    if packs and scheme.weights.num_bits == 4:
        return pack_int4(quotient)

    quantized = int_quantized(quotient, scheme.weights.num_bits)
    if packs:
        return pack_int8(quantized)
    return quantized


def decode(
    quantized: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    scheme: QuantizationScheme,
    dtype: torch.dtype,
    global_scale: Tensor | None = None,
) -> Tensor:
    """
    The matrix of quantized values in the checkpoint format, bit for bit as compressed-tensors decompresses it.

    Subtracts the zero point, multiplies by the scale in bfloat16, and then casts to `dtype`; with a global scale it
    multiplies in float32.

    Args:
        quantized: As from [`encode`]; with a global scale uint8 `(out, in / 2)`.
        scale: Their scale.
        zero_point: Their zero point.
        scheme: Their scheme.
        dtype: Dtype of the matrix.
        global_scale: Their global scale.

    Returns:
        `(out, in)`, in new storage.
    """
    if global_scale is not None:
        return _decode_fp4(quantized, scale, scheme, global_scale).to(dtype)

    if scheme.format == "pack-quantized":
        quantized = unpacked(quantized, scheme.weights.num_bits)

    # A new tensor, so the operations in place below leave the quantized values as they are.
    tiles = as_tiles(quantized, scheme).to(scale.dtype)
    if zero_point is not None:
        tiles.sub_(per_tile(zero_point.to(scale.dtype)))
    return tiles.mul_(per_tile(scale)).reshape(quantized.shape).to(dtype)


def _decode_fp4(packed: Tensor, scale: Tensor, scheme: QuantizationScheme, global_scale: Tensor) -> Tensor:
    """The bfloat16 matrix `(out, in)` of 4-bit floats uint8 `(out, in / 2)`."""
    rows, octets = packed.shape
    values = unpack_fp4_from_uint8(packed, rows, 2 * octets, torch.float32)

    # Float32 throughout, as compressed-tensors decompresses: both scales and their quotient would round in bfloat16.
    product = as_tiles(values, scheme) * per_tile(scale.float() / global_scale)
    return product.reshape(values.shape).to(torch.bfloat16)


# Tiles ---------------------------------------------------------------------------------------------------------------


def as_tiles(matrix: Tensor, scheme: QuantizationScheme) -> Tensor:
    """
    View a matrix as tiles with one scale each.

    Args:
        matrix: `(out, in)`.
        scheme: Its scheme.

    Returns:
        `(out / height, height, in / width, width)`; `height` is 1 for groups and channels, 128 for blocks.
    """
    if scheme.weights.block_structure is not None:
        height, width = scheme.weights.block_structure
    else:
        height = 1
        width = effective_group_size(scheme) or matrix.shape[1]
    # Columns first: the number of dimension 1 would change if rows were unflattened before.
    return matrix.unflatten(1, (-1, width)).unflatten(0, (-1, height))


def per_tile(scale: Tensor) -> Tensor:
    """Scales or zero points `(out / height, in / width)` in a shape that broadcasts with [`as_tiles`]."""
    # A tile has its elements along the second and the last dimension.
    return scale.unsqueeze(1).unsqueeze(-1)


def absmax(weight: Tensor) -> Tensor:
    """Largest magnitude along the last dimension of a bfloat16 tensor; NaN and infinity stay."""
    # Without the sign bit, bfloat16 patterns are ordered like integers, and integer maxima need no conversion.
    magnitude = weight.view(torch.int16) & 0x7FFF
    width = magnitude.shape[-1]

    if width > 128 and width % 128 == 0:
        magnitude = magnitude.unflatten(-1, (-1, 128)).amax(-1)  # short rows reduce faster than long ones
    return magnitude.amax(-1).view(torch.bfloat16)


# Rounding and packing ------------------------------------------------------------------------------------------------


def in_units_of_scale(weight: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """`weight / scale + zero_point`, each operation rounded to bfloat16; a new tensor of `weight`'s shape."""
    quotient = weight / scale
    if zero_point is None:
        return quotient
    return quotient.add_(zero_point.to(quotient.dtype))


def fp8_quantized(quotient: Tensor) -> Tensor:
    """Round to float8_e4m3fn of the same shape; overwrites `quotient`."""
    # Adding zero turns -0.0 into 0.0, as the zero point of compressed-tensors does.
    return quotient.add_(0.0).clamp_(-FP8_MAX, FP8_MAX).to(FP8)


def int_quantized(quotient: Tensor, num_bits: int) -> Tensor:
    """Round to integers of `num_bits` bits, int8 of the same shape; overwrites `quotient`."""
    half = 1 << (num_bits - 1)
    return quotient.clamp_(-half, half - 1).round_().to(torch.int8)


def pack_int8(quantized: Tensor) -> Tensor:
    """Pack int8 `(out, in)` four to a word, the first in the lowest bits, each plus 128: int32 `(out, in / 4)`."""
    # Adding 128 flips the highest bit. Four bytes in memory are a word on a little-endian machine.
    return (quantized.view(torch.uint8) ^ 0x80).view(torch.int32)


def pack_int4(quotient: Tensor) -> Tensor:
    """
    Round to 4-bit values in [-8, 7], add 8, and pack eight to a word, the first in the lowest bits.

    Args:
        quotient: Bfloat16 `(out, in)` in units of the scale; overwritten.

    Returns:
        Int32 `(out, in / 8)`.
    """
    shifted = quotient.add_(_INT4_BIAS).clamp_(_INT4_BIAS - 8, _INT4_BIAS + 7)
    # Two bfloat16 numbers side by side, read as one int32, the first in the low half.
    pairs = shifted.view(torch.int32)

    # Each half holds 0x4300 + value + 8. Shifted by 12, the upper value lands in bits 4 to 7 above a 4 of the
    # exponent.
    octets = (pairs >> 12).add_(pairs).sub_(4).to(torch.uint8)
    return octets.view(torch.int32)


def unpacked(words: Tensor, num_bits: int) -> Tensor:
    """
    Unpack words of 4-bit or 8-bit values, the inverse of [`pack_int4`] and [`pack_int8`].

    Args:
        words: Int32 `(out, in * num_bits / 32)`.
        num_bits: 4 or 8.

    Returns:
        Int8 `(out, in)`.
    """
    octets = words.view(torch.uint8)
    if num_bits == 8:
        return (octets ^ 0x80).view(torch.int8)

    # Little-endian: byte i of a word holds the values 2i (low bits) and 2i + 1 (high bits), each plus 8.
    pairs = torch.stack((octets & 0xF, octets >> 4), dim=-1)
    return pairs.flatten(-2).view(torch.int8) - 8


def unpack_zero_points(words: Tensor, rows: int) -> Tensor:
    """
    Unpack zero points without waiting for the device.

    Args:
        words: Int32 `(ceil(rows / 8), groups)`; eight rows to a word.
        rows: Number of rows.

    Returns:
        Int8 `(rows, groups)`.
    """
    # The shifts of the eight values of a word, `(8, 1)`, against words `(words, 1, groups)`.
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device).unsqueeze(-1)
    values = (words.unsqueeze(1) >> shifts & 0xF) - 8
    return values.to(torch.int8).flatten(0, 1)[:rows]
