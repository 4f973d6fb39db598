"""Quantization on a GPU in two passes over the weight, by Triton kernels: one for extremes, one for quantized values. And back in one.

The functions are those of `reference`. They take float32 weights too, without a bfloat16 copy of them. Not run on a GPU yet:
the tests run the kernels in Triton's interpreter, which does not show what the compiler makes of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from compressed_tensors.quantization import QuantizationScheme, QuantizationType
from torch import Tensor

from ..reference import FP8, QParams, pack_zero_points, qparams_of, rows_of_scales, width_of_scales


__all__ = ["decode", "encode", "extremes", "pack_zero_points", "quantize"]

# A word is two neighbouring numbers. Roundings are written on the bits, because a compiler may drop a cast to bfloat16 and
# back.
_WORDS_PER_PROGRAM = 2048
_INT, _FLOAT8, _FLOAT4 = 0, 1, 2


def extremes(weight: Tensor, scheme: QuantizationScheme) -> tuple[Tensor, Tensor]:
    """As [`reference.extremes`]."""
    words = _words(weight, scheme)
    shape = weight.shape[0], words.shape[0] // weight.shape[0]
    low, high = (torch.empty(shape, dtype=torch.int32, device=weight.device) for _ in range(2))
    tile = _tile(words.shape[1])
    with torch.cuda.device_of(weight):
        _extremes[(triton.cdiv(words.shape[0], tile[0]),)](words, low, high, *words.shape, *tile)
    low, high = (bits.view(torch.float32).to(torch.bfloat16) for bits in (low, high))
    if scheme.weights.block_structure is not None:
        height = scheme.weights.block_structure[0]
        low, high = low.unflatten(0, (-1, height)).amin(1), high.unflatten(0, (-1, height)).amax(1)
    if scheme.weights.symmetric:
        high = torch.maximum(high.abs(), low.abs())
        return -high, high
    return low.clamp_(max=0).add_(0.0), high.clamp_(min=0).add_(0.0)


def quantize(weight: Tensor, scheme: QuantizationScheme, global_scale: Tensor | None = None) -> tuple[Tensor, QParams]:
    """As [`reference.quantize`]."""
    qparams = qparams_of(*extremes(weight, scheme), scheme, global_scale)
    return encode(weight, qparams, scheme, global_scale), qparams


def encode(weight: Tensor, qparams: QParams, scheme: QuantizationScheme, global_scale: Tensor | None = None) -> Tensor:
    """As [`reference.encode`]."""
    scale, zero_point = qparams
    words, scales = _words(weight, scheme), rows_of_scales(scale, scheme).float().contiguous()
    if global_scale is not None:
        scales = scales / global_scale
    zeros = scales if zero_point is None else zero_point.float().contiguous()
    bits, packed = scheme.weights.num_bits, scheme.format == "pack-quantized"
    nibbles = bits == 4 and scheme.format != "int-quantized"
    # Little end first: two quantized values of 4 bits are a byte, two of 8 bits are 16.
    out = torch.empty(words.shape, dtype=torch.uint8 if nibbles else torch.int16, device=weight.device)
    half = 1 << (bits - 1)
    kind = _INT if scheme.weights.type == QuantizationType.INT else _FLOAT8 if bits == 8 else _FLOAT4
    constants = {"KIND": kind, "ASYMMETRIC": zero_point is not None}
    constants |= {"LOW": float(-half), "HIGH": float(half - 1), "CODE_BITS": 4 if nibbles else 8}
    # In a packed word a code has half its range added, which is its two's complement with the highest bit turned.
    _over_tiles(_encode, words, scales, zeros, out, FLIP=half if packed else 0, **constants)
    out = out.view(weight.shape[0], -1)
    if global_scale is not None:
        return out
    return out.view(FP8 if scheme.weights.type == QuantizationType.FLOAT else torch.int32 if packed else torch.int8)


def decode(
    quantized: Tensor,
    qparams: QParams,
    scheme: QuantizationScheme,
    columns: int,
    dtype: torch.dtype,
    global_scale: Tensor | None = None,
) -> Tensor:
    """As [`reference.decode`]."""
    (scale, zero_point), out = qparams, torch.empty(quantized.shape[0], columns, dtype=dtype, device=quantized.device)
    words, scales = _words(out, scheme), rows_of_scales(scale, scheme).float().contiguous()
    if global_scale is not None:
        scales = scales / global_scale
    zeros = scales if zero_point is None else zero_point.float().contiguous()
    packed = scheme.format == "pack-quantized"
    size = scheme.weights.num_bits if packed or global_scale is not None else 8
    half = 1 << (size - 1)
    pairs = quantized.contiguous().view(torch.uint8 if size == 4 else torch.int16)
    constants = {"FLOAT": scheme.weights.type == QuantizationType.FLOAT, "ASYMMETRIC": zero_point is not None}
    # Integers in packed words have half their range added; others get it with their highest bit turned.
    constants |= {"CODE_BITS": size, "FLIP": 0 if packed else half, "OFFSET": float(half), "ROUNDED": True}
    _over_tiles(_decode, words, scales, zeros, pairs, **constants)
    return out


def quantize_activations(
    plain: Callable[..., Any], x: Tensor, width: int, dtype: torch.dtype, divided: bool, *limits: float
) -> tuple[Tensor, Tensor]:
    """As `plain` of contiguous `x`; the rest is what [`fast.RULES`] says of it."""
    quantized = x.new_empty(x.shape, dtype=dtype)
    scale = x.new_empty((*x.shape[:-1], x.shape[-1] // width), dtype=torch.float32)
    words = x.view(torch.int32 if x.dtype == torch.bfloat16 else torch.int64).view(-1, width // 2)
    tile = _tile(words.shape[1])
    constants = dict(zip(("LARGEST", "LEAST", "FLOOR"), limits, strict=True))
    # On a GPU the reciprocal of an int8 scale is rounded once.
    constants |= {"DIVIDED": divided, "FLOAT8": dtype == FP8, "ONCE": dtype != FP8 and x.is_cuda}
    with torch.cuda.device_of(x):
        grid = (triton.cdiv(words.shape[0], tile[0]),)
        _activation_quantized[grid](words, scale, quantized.view(torch.int16), *words.shape, *tile, **constants)
    return quantized, scale


def dequantize_activations(quantized: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """As [`activations.dequantize_activations`] of contiguous tensors."""
    out, width = quantized.new_empty(quantized.shape, dtype=dtype), quantized.shape[-1] // scale.shape[-1]
    words = out.view(torch.int32 if dtype == torch.bfloat16 else torch.int64).view(-1, width // 2)
    constants = {"FLOAT": quantized.dtype == FP8, "ASYMMETRIC": False, "CODE_BITS": 8, "FLIP": 0x80, "OFFSET": 128.0}
    _over_tiles(
        _decode, words, scale, scale, quantized.view(torch.int16), ROUNDED=dtype == torch.bfloat16, **constants
    )
    return out


def _words(weight: Tensor, scheme: QuantizationScheme) -> Tensor:
    """Two numbers a word, one row for each scale (of a block: for each of its rows)."""
    words = weight.view(torch.int32 if weight.dtype == torch.bfloat16 else torch.int64)
    return words.view(-1, width_of_scales(weight.shape[1], scheme) // 2)


def _over_tiles(kernel: triton.JITFunction, words: Tensor, *tensors: Tensor, **constants: Any) -> None:
    """Call a kernel that takes a tile of words and what belongs to it."""
    tile = _tile(words.shape[1])
    grid = tuple(triton.cdiv(size, part) for size, part in zip(words.shape, tile, strict=True))
    with torch.cuda.device_of(words):  # Triton launches on the current device
        kernel[grid](words, *tensors, *words.shape, *tile, **constants)


def _tile(columns: int) -> tuple[int, int]:
    """Rows and columns of words that one program works on at a time, powers of 2."""
    width = min(triton.next_power_of_2(columns), _WORDS_PER_PROGRAM)
    return _WORDS_PER_PROGRAM // width, width


@triton.jit
def _to_bfloat16(bits):
    """Bits of a float32 number to those of the nearest bfloat16 number, ties to even."""
    return (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536


@triton.jit
def _halves(word):
    """Bits, as of float32, of the two bfloat16 or the two float32 numbers in a word."""
    if word.dtype == tl.int64:
        first, second = word.to(tl.int32), (word >> 32).to(tl.int32)
    else:
        first, second = word << 16, word & -65536
    return first, second


@triton.jit
def _ordered(bits):
    """An integer in the order of the numbers, NaN at both ends; its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _extremes(words, low, high, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    least = tl.full((ROWS, COLUMNS), 0x7FFFFFFF, tl.int32)
    greatest = tl.full((ROWS, COLUMNS), -0x80000000, tl.int32)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        word = tl.load(words + row.to(tl.int64)[:, None] * columns + column[None, :], mask)
        first, second = _halves(word)
        first, second = _ordered(first), _ordered(second)
        least = tl.where(mask, tl.minimum(least, tl.minimum(first, second)), least)
        greatest = tl.where(mask, tl.maximum(greatest, tl.maximum(first, second)), greatest)
    tl.store(low + row, _ordered(tl.min(least, 1)), row < rows)
    tl.store(high + row, _ordered(tl.max(greatest, 1)), row < rows)


@triton.jit
def _steps(bits, scale, zero, WIDE: tl.constexpr, KIND: tl.constexpr, ASYMMETRIC: tl.constexpr):
    """`reference.steps`: the number, its quotient and the sum are rounded to bfloat16 each; for 4-bit floats only the number."""
    if WIDE:
        bits = _to_bfloat16(bits)
    # `/` may be an approximate division.
    quotient = tl.div_rn(bits.to(tl.float32, bitcast=True), scale)
    if KIND != 2:
        quotient = _to_bfloat16(quotient.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    if ASYMMETRIC:
        quotient = _to_bfloat16((quotient + zero).to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    return quotient


@triton.jit
def _integer(x, LOW: tl.constexpr, HIGH: tl.constexpr):
    """The nearest integer between two, ties to even, in two's complement; only the lowest bits mean anything."""
    x = tl.minimum(tl.maximum(x, LOW), HIGH)
    # In [2^23, 2^24) neighbouring float32 numbers are 1 apart, and here the lowest bits of 1.5 * 2^23 are zero.
    return (x + 12582912.0).to(tl.int32, bitcast=True)


@triton.jit
def _float8(x):
    """Bits of the nearest float8_e4m3fn number, ties to even, saturated; `reference.fp8_quantized` of one number."""
    return _signed_float8((x + 0.0).to(tl.int32, bitcast=True))


@triton.jit
def _signed_float8(bits):
    """As [`_float8`], from bits, and -0.0 stays what it is."""
    magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)  # 448
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960  # 960: the exponent's bias, 127 - 7
    # Below 2^-6 (0x3C800000) the numbers are multiples of 2^-9, as far apart as float32 numbers from 2^14 (0x46800000) on.
    subnormal = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.where(magnitude < 0x3C800000, subnormal, normal) | ((bits >> 24) & 0x80)


@triton.jit
def _float4(x):
    """Bits of the nearest float4_e2m1 number, ties to even, saturated; a code of `reference.pack_fp4`."""
    x = tl.minimum(tl.maximum(x + 0.0, -6.0), 6.0)
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x1FFFFF + ((magnitude >> 22) & 1)) >> 22) - 252  # 252: the exponent's bias, 127 - 1
    # Below 1 (0x3F800000) the numbers are multiples of 2^-1, as far apart as float32 numbers from 2^22 (0x4A800000) on.
    subnormal = (magnitude.to(tl.float32, bitcast=True) + 4194304.0).to(tl.int32, bitcast=True) - 0x4A800000
    return tl.where(magnitude < 0x3F800000, subnormal, normal) | ((bits >> 28) & 8)


@triton.jit
def _encode(
    words,
    scales,
    zeros,
    out,
    rows,
    columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    CODE_BITS: tl.constexpr,
    FLIP: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    place = row.to(tl.int64)[:, None] * columns + column[None, :]
    word = tl.load(words + place, mask, 0)
    scale = tl.load(scales + row, row < rows, 1.0)[:, None]
    zero = tl.load(zeros + row, row < rows, 0.0)[:, None]
    first, second = _halves(word)
    first = _steps(first, scale, zero, word.dtype == tl.int64, KIND, ASYMMETRIC)
    second = _steps(second, scale, zero, word.dtype == tl.int64, KIND, ASYMMETRIC)
    if KIND == 1:
        first, second = _float8(first), _float8(second)
    elif KIND == 2:
        first, second = _float4(first), _float4(second)
    else:
        first, second = _integer(first, LOW, HIGH), _integer(second, LOW, HIGH)
    last: tl.constexpr = (1 << CODE_BITS) - 1
    pair = ((first ^ FLIP) & last) | (((second ^ FLIP) & last) << CODE_BITS)
    tl.store(out + place, pair.to(out.dtype.element_ty), mask)


@triton.jit
def _float_number(code, BITS: tl.constexpr):
    """The number of a float8_e4m3fn or of a float4_e2m1 code."""
    if BITS == 8:
        magnitude = code & 0x7F
        normal = (magnitude << 20) + 0x3C000000  # the exponent's bias, 127 - 7
        # Below 2^-6 the numbers are multiples of 2^-9.
        subnormal = (magnitude.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)
        bits = tl.where(magnitude < 8, subnormal, tl.where(magnitude == 0x7F, 0x7FC00000, normal))
        bits |= (code & 0x80) << 24
    else:
        magnitude = code & 7
        normal = (magnitude << 22) + 0x3F000000  # 127 - 1
        bits = tl.where(magnitude < 2, magnitude * 0x3F000000, normal) | ((code & 8) << 28)  # 0, 0.5
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _decode(
    words,
    scales,
    zeros,
    pairs,
    rows,
    columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FLOAT: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    CODE_BITS: tl.constexpr,
    FLIP: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    place = row.to(tl.int64)[:, None] * columns + column[None, :]
    pair = tl.load(pairs + place, mask, 0).to(tl.int32)
    scale = tl.load(scales + row, row < rows, 1.0)[:, None]
    last: tl.constexpr = (1 << CODE_BITS) - 1
    first, second = pair & last, (pair >> CODE_BITS) & last
    shift = OFFSET
    if ASYMMETRIC:
        shift = OFFSET + tl.load(zeros + row, row < rows, 0.0)[:, None]
    if FLOAT:
        first, second = _float_number(first, CODE_BITS), _float_number(second, CODE_BITS)
    else:
        first, second = (first ^ FLIP).to(tl.float32) - shift, (second ^ FLIP).to(tl.float32) - shift
    first, second = (first * scale).to(tl.int32, bitcast=True), (second * scale).to(tl.int32, bitcast=True)
    if ROUNDED:  # once: a code has 8 bits and the bfloat16 scale of a weight has 8, so that their product is exact
        first, second = _to_bfloat16(first), _to_bfloat16(second)
    if words.dtype.element_ty == tl.int64:
        word = (first.to(tl.int64) & 0xFFFFFFFF) | (second.to(tl.int64) << 32)
    else:
        word = ((first >> 16) & 0xFFFF) | second
    tl.store(words + place, word, mask)


@triton.jit
def _activation_code(bits, scale, factor, FLOAT8: tl.constexpr, DIVIDED: tl.constexpr):
    x = bits.to(tl.float32, bitcast=True)
    x = tl.div_rn(x, scale) if DIVIDED else x * factor
    if FLOAT8:
        code = tl.where(x == x, _signed_float8(x.to(tl.int32, bitcast=True)), 0x7F)
    else:
        code = _integer(tl.where(x == x, x, 0.0), -128.0, 127.0)
    return code & 0xFF


@triton.jit
def _activation_quantized(
    words,
    scales,
    out,
    rows,
    columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    FLOOR: tl.constexpr,
    DIVIDED: tl.constexpr,
    ONCE: tl.constexpr,
    FLOAT8: tl.constexpr,
):
    """Quantized values of numbers divided by their scale, or times its reciprocal, which with `ONCE` is rounded once."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    greatest = tl.zeros((ROWS, COLUMNS), tl.int32)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        first, second = _halves(tl.load(words + row.to(tl.int64)[:, None] * columns + column[None, :], mask, 0))
        greatest = tl.maximum(greatest, tl.maximum(first & 0x7FFFFFFF, second & 0x7FFFFFFF))
    largest = tl.max(greatest, 1).to(tl.float32, bitcast=True)
    scale = tl.div_rn(tl.where(largest < LEAST, LEAST, largest), tl.full((ROWS,), LARGEST, tl.float32))
    scale = tl.where(scale < FLOOR, FLOOR, scale)  # NaN stays
    tl.store(scales + row, scale, row < rows)
    factor = tl.div_rn(tl.full((ROWS,), LARGEST if ONCE else 1.0, tl.float32), largest if ONCE else scale)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        place = row.to(tl.int64)[:, None] * columns + column[None, :]
        first, second = _halves(tl.load(words + place, mask, 0))
        first = _activation_code(first, scale[:, None], factor[:, None], FLOAT8, DIVIDED)
        second = _activation_code(second, scale[:, None], factor[:, None], FLOAT8, DIVIDED)
        tl.store(out + place, (first | (second << 8)).to(tl.int16), mask)
