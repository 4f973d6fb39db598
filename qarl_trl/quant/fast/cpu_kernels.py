"""Kernels of `fast.cpu`: for each scale a row of words in, a row of quantized values out, or back, compiled by numba.

A word is two neighbouring numbers, and two quantized values go with it, so that no lane of a vector has to move. What is done
to a word is written as LLVM instructions of 32 bits: numba's own integers are 64 bits wide, at half the speed. Instructions
and kernels share a file because numba compiles anew what it has in its cache when the file of the kernel has changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from ..reference import FP4_MAX, FP8, FP8_MAX


GIVEN = 0.0  # instead of steps: the scales are not found but given

_F32, _I32 = ir.FloatType(), ir.IntType(32)

# Instructions on the bits of one number -----------------------------------------------------------------------------


def _int(value: int) -> ir.Constant:
    return ir.Constant(_I32, value)


def _real(value: float) -> ir.Constant:
    return ir.Constant(_F32, value)


def _instruction(returned: types.Type | None = None) -> Callable[[Callable[..., Any]], Any]:
    """Make `emit(builder, *values)`, which writes LLVM instructions, a function for kernels. Without a type it returns the last's."""

    def decorate(emit: Callable[..., Any]) -> Any:
        @functools.wraps(emit)  # numba reads how many arguments there are
        def typed(typingctx: Any, *args: Any) -> Any:
            return (returned or args[-1])(*args), lambda context, builder, signature, values: emit(builder, *values)

        return intrinsic(typed)

    return decorate


@_instruction(types.int32)
def _wide_vectors(b: ir.IRBuilder) -> Any:
    """Let LLVM use vectors of 512 bits in this kernel where there are any: by itself it takes half of them."""
    b.function.attributes.update(['"prefer-vector-width"="512"'])  # not `add`, which knows no attributes with values
    return _int(0)


def _to_bfloat16(b: ir.IRBuilder, bits: Any) -> Any:
    """Bits of a float32 number to those of the nearest bfloat16 number, ties to even."""
    odd = b.and_(b.lshr(bits, _int(16)), _int(1))
    return b.and_(b.add(b.add(bits, _int(0x7FFF)), odd), _int(0xFFFF0000))


def _rounded(b: ir.IRBuilder, x: Any) -> Any:
    """A float32 number to the nearest bfloat16 number, ties to even."""
    return b.bitcast(_to_bfloat16(b, b.bitcast(x, _I32)), _F32)


def _widened(b: ir.IRBuilder, bits: Any) -> Any:
    """A bfloat16 number of 16 bits to float32."""
    return b.bitcast(b.shl(b.zext(bits, _I32), _int(16)), _F32)


def _halves(b: ir.IRBuilder, word: Any) -> tuple[Any, Any]:
    """Bits, as of float32, of the two bfloat16 or the two float32 numbers in a word."""
    if word.type.width == 64:
        return b.trunc(word, _I32), b.trunc(b.lshr(word, ir.Constant(word.type, 32)), _I32)
    return b.shl(word, _int(16)), b.and_(word, _int(0xFFFF0000))


# A quotient is a product with the reciprocal of the scale, in a fifth of a division's time. Rounded to bfloat16 both are the
# same number: for significands X and S of 8 bits no quotient is halfway between two bfloat16 numbers (that is M / 2^8 with
# an odd M of 9 bits, and X = M S / 2^k would have 9 bits too), and none is nearer to it than 1 / (M S) > 2^-17 of its size,
# while the product is off by 2^-22. Below 2^-126, where bfloat16 numbers have fewer bits, there are ties and the two may
# differ; but both are zero at and below 2^-134, neither is above, and no code tells more of such a quotient. From 2^127 on the
# product may be infinite; every code is saturated long before.
# The reciprocal of a scale may be no float32 number: hence a power of 2, and the reciprocal of what that leaves.


@_instruction(types.float32)
def _power(b: ir.IRBuilder, scale: Any) -> Any:
    """A power of 2 that brings a scale, bfloat16 of 16 bits, near to one, as far as there is such a float32 number."""
    exponent = b.and_(b.zext(scale, _I32), _int(0x7F80))
    power = b.sub(_int(254 << 7), exponent)
    power = b.select(b.icmp_signed(">", power, _int(1 << 7)), power, _int(1 << 7))
    return b.bitcast(b.shl(power, _int(16)), _F32)


@_instruction(types.float32)
def _reciprocal(b: ir.IRBuilder, scale: Any, power: Any) -> Any:
    """Of a scale times its [`_power`]."""
    return b.fdiv(_real(1.0), b.fmul(_widened(b, scale), power))


def _number(b: ir.IRBuilder, word: Any, which: int) -> Any:
    """One number of a word, rounded to bfloat16."""
    bits = _halves(b, word)[which]
    return b.bitcast(_to_bfloat16(b, bits) if word.type.width == 64 else bits, _F32)


@_instruction(types.float32)
def _first(b: ir.IRBuilder, word: Any) -> Any:
    return _number(b, word, 0)


@_instruction(types.float32)
def _second(b: ir.IRBuilder, word: Any) -> Any:
    return _number(b, word, 1)


def _quotient(b: ir.IRBuilder, word: Any, which: int, power: Any, reciprocal: Any) -> Any:
    """`reference.steps` of one number of a word."""
    gemm = b.fmul(b.fmul(_number(b, word, which), power), reciprocal)
    return b.bitcast(b.and_(b.add(b.bitcast(gemm, _I32), _int(0x7FFF)), _int(0xFFFF0000)), _F32)


@_instruction(types.float32)
def _first_steps(b: ir.IRBuilder, word: Any, power: Any, reciprocal: Any) -> Any:
    return _quotient(b, word, 0, power, reciprocal)


@_instruction(types.float32)
def _second_steps(b: ir.IRBuilder, word: Any, power: Any, reciprocal: Any) -> Any:
    return _quotient(b, word, 1, power, reciprocal)


@_instruction(types.float32)
def _plus(b: ir.IRBuilder, x: Any, y: Any) -> Any:
    """The sum, rounded to bfloat16."""
    return _rounded(b, b.fadd(x, y))


@_instruction(types.uint32)
def _nearest(b: ir.IRBuilder, x: Any, low: Any, high: Any) -> Any:
    """The nearest integer between two, ties to even, in two's complement, of NaN 0; only the lowest 16 bits mean anything."""
    # In [2^23, 2^24) neighbouring float32 numbers are 1 apart, and here the lowest bits of 1.5 * 2^23 are zero.
    x = b.select(b.fcmp_ordered(">", x, high), high, x)
    x = b.select(b.fcmp_ordered("<", x, low), low, x)
    return b.bitcast(b.fadd(x, _real(1.5 * 2**23)), _I32)


def _float_code(b: ir.IRBuilder, x: Any, largest: float, exponent: int, mantissa: int) -> Any:
    """
    Magnitude's code of the nearest float of few bits, ties to even, saturated, and the bits of `x` without -0.0.

    `exponent` is the lowest one, below which the quantized values are as far apart as with it: by 2^(exponent - mantissa).
    """
    bits = b.bitcast(b.fadd(x, _real(0.0)), _I32)
    top, bottom = (b.bitcast(_real(limit), _I32) for limit in (largest, 2.0**exponent))
    magnitude = b.and_(bits, _int(0x7FFFFFFF))
    magnitude = b.select(b.icmp_unsigned("<", magnitude, top), magnitude, top)
    power = b.select(b.icmp_unsigned(">", magnitude, bottom), magnitude, bottom)
    power = b.and_(power, _int(0x7F800000))
    # As far apart as quantized values here are float32 numbers at a power of 2 that is higher by this much: adding it rounds.
    anchor = b.add(power, _int((23 - mantissa) << 23))
    steps = b.sub(b.bitcast(b.fadd(b.bitcast(magnitude, _F32), b.bitcast(anchor, _F32)), _I32), anchor)
    return b.add(steps, b.sub(b.lshr(power, _int(23 - mantissa)), _int((127 + exponent) << mantissa))), bits


@_instruction(types.uint32)
def _float8_code(b: ir.IRBuilder, x: Any) -> Any:
    """Bits of the nearest float8_e4m3fn number; `reference.fp8_quantized` of one number."""
    code, bits = _float_code(b, x, FP8_MAX, -6, 3)
    return b.or_(code, b.and_(b.lshr(bits, _int(24)), _int(0x80)))


@_instruction(types.uint32)
def _signed_float8_code(b: ir.IRBuilder, x: Any) -> Any:
    """As [`_float8_code`], and -0.0 stays what it is."""
    return b.or_(_float_code(b, x, FP8_MAX, -6, 3)[0], b.and_(b.lshr(b.bitcast(x, _I32), _int(24)), _int(0x80)))


@_instruction(types.uint32)
def _float4_code(b: ir.IRBuilder, x: Any) -> Any:
    """Bits of the nearest float4_e2m1 number; a code of `reference.pack_fp4`."""
    code, bits = _float_code(b, x, FP4_MAX, 0, 1)
    return b.or_(code, b.and_(b.lshr(bits, _int(28)), _int(8)))


# The largest magnitude, and the extremes of the numbers and zero, of patterns as integers: those of positive numbers are
# ordered like the numbers, those of negative ones like their magnitudes and, unsigned, above all others. NaN is outermost.


@_instruction(types.uint32)
def _larger_magnitude(b: ir.IRBuilder, word: Any, known: Any) -> Any:
    for bits in _halves(b, word):
        magnitude = b.and_(bits, _int(0x7FFFFFFF))
        known = b.select(b.icmp_unsigned(">", magnitude, known), magnitude, known)
    return known


@_instruction(types.uint32)
def _smaller(b: ir.IRBuilder, word: Any, known: Any) -> Any:
    for bits in _halves(b, word):
        known = b.select(b.icmp_unsigned(">", bits, known), bits, known)
    return known


@_instruction(types.int32)
def _larger(b: ir.IRBuilder, word: Any, known: Any) -> Any:
    for bits in _halves(b, word):
        known = b.select(b.icmp_signed(">", bits, known), bits, known)
    return known


@_instruction(types.float32)
def _extreme(b: ir.IRBuilder, bits: Any) -> Any:
    """The number of a pattern, rounded to bfloat16, without the sign of zero."""
    nan = b.icmp_unsigned(">", b.and_(bits, _int(0x7FFFFFFF)), _int(0x7F800000))
    x = b.bitcast(b.select(nan, _int(0x7FC00000), _to_bfloat16(b, bits)), _F32)
    return b.fadd(x, _real(0.0))


@_instruction(types.float32)
def _over(b: ir.IRBuilder, x: Any, y: Any) -> Any:
    """The quotient, rounded to bfloat16."""
    return _rounded(b, b.fdiv(x, y))


@_instruction(types.uint16)
def _bfloat16(b: ir.IRBuilder, x: Any) -> Any:
    """The 16 bits of a number that is rounded already."""
    return b.trunc(b.lshr(b.bitcast(x, _I32), _int(16)), ir.IntType(16))


@_instruction()
def _pair(b: ir.IRBuilder, first: Any, second: Any, flip: Any) -> Any:
    """Two quantized values of as many bits as half of `flip`, the bits of which are turned."""
    bits = flip.type.width // 2
    lower = b.and_(first, _int((1 << bits) - 1))
    return b.xor(b.trunc(b.or_(lower, b.shl(second, _int(bits))), flip.type), flip)


def _gemms(b: ir.IRBuilder, first: Any, second: Any, scale: Any, like: Any, rounded: bool = True) -> Any:
    """Two numbers times a float32 scale, `rounded` to bfloat16, as the two bfloat16 or float32 numbers of a word."""
    first, second = (b.bitcast(b.fmul(x, scale), _I32) for x in (first, second))
    if rounded or like.type.width == 32:
        first, second = _to_bfloat16(b, first), _to_bfloat16(b, second)
    if like.type.width == 32:
        return b.or_(b.lshr(first, _int(16)), second)
    return b.or_(b.zext(first, like.type), b.shl(b.zext(second, like.type), ir.Constant(like.type, 32)))


def _quantized(b: ir.IRBuilder, pair: Any) -> tuple[Any, Any]:
    """Two quantized values of as many bits as half of `pair`."""
    bits, both = pair.type.width // 2, b.zext(pair, _I32)
    return b.and_(both, _int((1 << bits) - 1)), b.lshr(both, _int(bits))


def _of_weight_or_input(b: ir.IRBuilder, numbers: Iterator[Any], scale: Any, like: Any) -> Any:
    """Numbers times the bfloat16 scale of a weight, rounded to bfloat16, or the float32 scale of an input."""
    if scale.type == _F32:
        return _gemms(b, *numbers, scale, like, rounded=False)
    # Numbers and scale have 8 bits each, so that the product is exact and rounded once.
    return _gemms(b, *numbers, _widened(b, scale), like)


@_instruction()
def _int_gemms(b: ir.IRBuilder, pair: Any, flip: Any, shift: Any, scale: Any, like: Any) -> Any:
    """Two integer quantized values, the bits of `flip` turned, minus `shift`, times a scale."""
    numbers = (b.fsub(b.uitofp(code, _F32), shift) for code in _quantized(b, b.xor(pair, flip)))
    return _of_weight_or_input(b, numbers, scale, like)


def _float_numbers(b: ir.IRBuilder, pair: Any, exponent: int, mantissa: int) -> Iterator[Any]:
    """Of two quantized values of floats of few bits; `exponent` is the lowest, as of [`_float_code`]. A code of float8 may be NaN."""
    sign = pair.type.width // 2 - 1
    for code in _quantized(b, pair):
        magnitude = b.and_(code, _int((1 << sign) - 1))
        normal = b.add(b.shl(magnitude, _int(23 - mantissa)), _int((126 + exponent) << 23))
        subnormal = b.bitcast(b.fmul(b.uitofp(magnitude, _F32), _real(2.0 ** (exponent - mantissa))), _I32)
        bits = b.select(b.icmp_unsigned("<", magnitude, _int(1 << mantissa)), subnormal, normal)
        if sign == 7:
            bits = b.select(b.icmp_unsigned("==", magnitude, _int(0x7F)), _int(0x7FC00000), bits)
        yield b.bitcast(b.or_(bits, b.shl(b.lshr(code, _int(sign)), _int(31))), _F32)


@_instruction()
def _float8_gemms(b: ir.IRBuilder, pair: Any, scale: Any, like: Any) -> Any:
    """Two float8_e4m3fn numbers times a scale."""
    return _of_weight_or_input(b, _float_numbers(b, pair, -6, 3), scale, like)


@_instruction()
def _float4_gemms(b: ir.IRBuilder, pair: Any, unit: Any, like: Any) -> Any:
    """Two float4_e2m1 numbers times a float32 scale."""
    return _gemms(b, *_float_numbers(b, pair, 0, 1), unit, like)


# Numbers of activations are not rounded to bfloat16.


@_instruction(types.float32)
def _float32(b: ir.IRBuilder, bits: Any) -> Any:
    return b.bitcast(bits, _F32)


@_instruction(types.float32)
def _exact_first(b: ir.IRBuilder, word: Any) -> Any:
    return b.bitcast(_halves(b, word)[0], _F32)


@_instruction(types.float32)
def _exact_second(b: ir.IRBuilder, word: Any) -> Any:
    return b.bitcast(_halves(b, word)[1], _F32)


@_instruction(types.uint32)
def _from_zero_point(b: ir.IRBuilder, x: Any, zero: Any) -> Any:
    """The nearest integer, halves away from zero, where with `zero` added it is an int8; else the end of that range, minus `zero`."""
    bits = b.bitcast(x, _I32)
    size = b.fptosi(b.fadd(b.bitcast(b.and_(bits, _int(0x7FFFFFFF)), _F32), _real(0.5)), _I32)
    code = b.add(b.select(b.icmp_signed("<", bits, _int(0)), b.neg(size), size), zero)
    code = b.select(b.icmp_signed("<", code, _int(127)), code, _int(127))
    return b.sub(b.select(b.icmp_signed(">", code, _int(-128)), code, _int(-128)), zero)


# Kernels --------------------------------------------------------------------------------------------------------------
# Words are `(rows of scales, rows of each, scales in a row, words of each)`, quantized values likewise; the other arrays are `(rows of
# scales, scales in a row)`. `steps` is what the range between the extremes is divided by for a scale, or `GIVEN`.

# `nogil` for the threads; with "numpy" a division needs no check for zero.
_options = {"nogil": True, "error_model": "numpy"}
_SCALE_OF_ZEROS = np.float32(torch.finfo(torch.bfloat16).eps)
_FLOAT8 = torch.arange(256, dtype=torch.uint8, device="cpu").view(FP8).float().numpy()
_FLOAT8_SCALE_OF_ZEROS = torch.tensor(0.125, device="cpu").to(FP8).view(torch.uint8).item()


def _kernel(function: Callable[..., None]) -> Callable[..., None]:
    try:
        return njit(**_options, cache=True)(function)
    except RuntimeError:  # no folder that can be written: compile in every process, a second each
        return njit(**_options)(function)


@_kernel
def _magnitudes(words, high):
    _wide_vectors()
    high[:] = 0
    for line in range(words.shape[0]):
        for column in range(words.shape[1]):
            part, known = words[line, column], high[column]
            for i in range(part.shape[0]):  # LLVM makes vectors of this, and none of `for word in part`
                known = _larger_magnitude(part[i], known)
            high[column] = known


@_kernel
def _minima_maxima(words, low, high):
    low[:], high[:] = 2**31, 0  # the patterns of -0.0 and 0.0
    for line in range(words.shape[0]):
        for column in range(words.shape[1]):
            part, least, greatest = words[line, column], low[column], high[column]
            for i in range(part.shape[0]):
                least = _smaller(part[i], least)
                greatest = _larger(part[i], greatest)
            low[column], high[column] = least, greatest


@_kernel
def extremes(words, low, high, symmetric):
    least, greatest = np.empty(words.shape[2], np.uint32), np.empty(words.shape[2], np.int32)
    for row in range(words.shape[0]):
        if symmetric:
            _magnitudes(words[row], greatest.view(np.uint32))
        else:
            _minima_maxima(words[row], least, greatest)
        for column in range(words.shape[2]):
            high[row, column] = _bfloat16(_extreme(greatest[column]))
            low[row, column] = high[row, column] ^ 0x8000 if symmetric else _bfloat16(_extreme(least[column]))


@_kernel
def _symmetric_scales(words, steps, scales):
    """`calculate_qparams`."""
    high = np.empty(words.shape[1], np.uint32)
    _magnitudes(words, high)
    for column in range(words.shape[1]):
        scale = _over(_extreme(high[column]), steps)
        scales[column] = _bfloat16(_SCALE_OF_ZEROS if scale == 0 else scale)


@_kernel
def _asymmetric_scales(words, steps, scales, zeros):
    """`calculate_qparams`, whose range includes zero."""
    low, high = np.empty(words.shape[1], np.uint32), np.empty(words.shape[1], np.int32)
    _minima_maxima(words, low, high)
    for column in range(words.shape[1]):
        least, greatest = _extreme(low[column]), _extreme(high[column])
        scale = _over(_plus(greatest, -least), steps)
        zero = _plus(np.float32(-8), -_over(least, scale))
        zeros[column] = 0 if zero != zero else np.int8(_nearest(zero, np.float32(-8), np.float32(7)))
        scales[column] = _bfloat16(_SCALE_OF_ZEROS if scale == 0 else scale)


@_kernel
def words_of_rows(quantized, out):
    """Eight rows of quantized values of 4 bits, each plus 8, to a row of words."""
    out[:] = 0
    for row in range(quantized.shape[0]):
        for column in range(quantized.shape[1]):
            out[row // 8, column] |= np.uint32(quantized[row, column] + 8) << np.uint32(4 * (row % 8))


@_kernel
def encode(words, scales, zeros, out, steps, low, high, flip):
    """Integer quantized values between `low` and `high`, with `zeros` or `None`; float8 ones where `high` is `None`."""
    _wide_vectors()
    for row in range(words.shape[0]):
        if steps != GIVEN:
            if zeros is None:
                _symmetric_scales(words[row], steps, scales[row])
            else:
                _asymmetric_scales(words[row], steps, scales[row], zeros[row])
        for line in range(words.shape[1]):
            for column in range(words.shape[2]):
                part, quantized, power = words[row, line, column], out[row, line, column], _power(scales[row, column])
                factor = _reciprocal(scales[row, column], power)
                zero = np.float32(0) if zeros is None else np.float32(zeros[row, column])
                for i in range(part.shape[0]):
                    first, second = _first_steps(part[i], power, factor), _second_steps(part[i], power, factor)
                    if zeros is not None:
                        first, second = _plus(first, zero), _plus(second, zero)
                    if high is None:
                        quantized[i] = _pair(_float8_code(first), _float8_code(second), flip)
                    else:
                        quantized[i] = _pair(_nearest(first, low, high), _nearest(second, low, high), flip)


@_kernel
def decode(quantized, scales, zeros, out, flip, offset):
    """Numbers of integer quantized values that have `offset` added once `flip` is turned; of float8 ones where `offset` is `None`."""
    _wide_vectors()
    like = out.dtype.type(0)
    for row in range(quantized.shape[0]):
        for line in range(quantized.shape[1]):
            for column in range(quantized.shape[2]):
                part, numbers, scale = quantized[row, line, column], out[row, line, column], scales[row, column]
                zero = np.float32(0) if zeros is None else np.float32(zeros[row, column])
                for i in range(part.shape[0]):
                    if offset is None:
                        numbers[i] = _float8_gemms(part[i], scale, like)
                    else:
                        numbers[i] = _int_gemms(part[i], flip, offset + zero, scale, like)


@_kernel
def _float4_scales(words, steps, global_scale, scales):
    """`calculate_qparams` below a global scale."""
    high = np.empty(words.shape[1], np.uint32)
    _magnitudes(words, high)
    for column in range(words.shape[1]):
        code = _float8_code(global_scale * _over(_extreme(high[column]), steps))
        scales[column] = _FLOAT8_SCALE_OF_ZEROS if code == 0 else code


@_kernel
def float4(words, scales, out, steps, global_scale):
    _wide_vectors()
    units = np.empty(words.shape[2:], np.float32)
    for row in range(words.shape[0]):
        if steps != GIVEN:
            _float4_scales(words[row], steps, global_scale, scales[row])
        for column in range(words.shape[2]):
            units[column] = _FLOAT8[scales[row, column]] / global_scale
        # Groups are too short for a loop over each.
        part, quantized, unit = words[row].reshape(-1), out[row].reshape(-1), units.reshape(-1)
        for i in range(part.shape[0]):
            # In float32, whose quotients may be as near to a tie as they like: no product would do.
            first, second = _float4_code(_first(part[i]) / unit[i]), _float4_code(_second(part[i]) / unit[i])
            quantized[i] = _pair(first, second, np.uint8(0))


@_kernel
def decode_float4(quantized, scales, out, global_scale):
    _wide_vectors()
    units, like = np.empty(quantized.shape[2:], np.float32), out.dtype.type(0)
    for row in range(quantized.shape[0]):
        for column in range(quantized.shape[2]):
            units[column] = _FLOAT8[scales[row, column]] / global_scale
        part, numbers, unit = quantized[row].reshape(-1), out[row].reshape(-1), units.reshape(-1)
        for i in range(part.shape[0]):
            numbers[i] = _float4_gemms(part[i], unit[i], like)


@_kernel
def activations(words, scales, out, largest, least, floor, divided, float8):
    """
    Quantized values of numbers divided by their scale or, with `divided` as `None`, times its reciprocal; integers with `float8` as `None`.

    The scale is the largest magnitude, taken as at least `least`, by `largest`, and at least `floor`.
    """
    _wide_vectors()
    low, high = np.float32(-128), np.float32(127)
    magnitudes, pair = np.empty(words.shape[2], np.uint32), out.dtype.type(0)
    for row in range(words.shape[0]):
        _magnitudes(words[row], magnitudes)
        for column in range(words.shape[2]):
            part, quantized, scale = words[row, 0, column], out[row, 0, column], _float32(magnitudes[column])
            scale = (least if scale < least else scale) / largest  # and NaN stays
            scale = floor if scale < floor else scale
            scales[row, column] = scale
            factor = np.float32(1) / scale
            for i in range(part.shape[0]):
                first, second = _exact_first(part[i]), _exact_second(part[i])
                if divided is None:
                    first, second = first * factor, second * factor
                else:
                    first, second = first / scale, second / scale
                if float8 is not None:
                    quantized[i] = _pair(_signed_float8_code(first), _signed_float8_code(second), pair)
                else:  # zero times the reciprocal of a scale of zero is NaN
                    quantized[i] = _pair(_nearest(first, low, high), _nearest(second, low, high), pair)


@_kernel
def asymmetric_activations(words, scales, out):
    """Integer quantized values minus their zero point; the range includes zero. A scale of NaN marks a row that has to be done otherwise."""
    _wide_vectors()
    low, high = np.empty(1, np.uint32), np.empty(1, np.int32)
    for row in range(words.shape[0]):
        _minima_maxima(words[row], low, high)
        least, greatest = _float32(low[0]), _float32(high[0])
        steps = np.float32(1) if least == greatest else np.float32(255) / (greatest - least)
        scales[row, 0] = np.float32(1) / steps if steps < np.float32(np.inf) else np.float32(np.nan)
        below, above = least * steps, greatest * steps
        zero = np.float32(127) - above
        if (below - np.float32(128)) + (above + np.float32(127)) > 0:
            zero = np.float32(-128) - below
        zero = np.int32(np.int8(_nearest(zero, np.float32(-128), np.float32(127))))
        part, quantized = words[row, 0, 0], out[row, 0, 0]
        for i in range(part.shape[0]):
            first = _from_zero_point(_exact_first(part[i]) * steps, zero)
            second = _from_zero_point(_exact_second(part[i]) * steps, zero)
            quantized[i] = _pair(first, second, np.uint32(0))
