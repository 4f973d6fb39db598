"""Quantization on a CPU in one pass over the weight, by kernels that numba compiles: extremes, scales and codes row by row.

Invariant: the bytes of `codes`, whose functions these are in another form; `fused` compares them before it hands this module
out (paper Sec. 3.1, `W_low-bit = Quant(theta)`).

The kernels read two numbers at a time, as a word, and write two codes at a time, so that no lane of a vector has to move.
What they do to a word is written as instructions of 32 bits: numba's own integers are 64 bits wide, at half the speed.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from compressed_tensors.quantization import QuantizationScheme, QuantizationType
from compressed_tensors.quantization.utils import calculate_range
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from torch import Tensor

from .codes import FP4_MAX, FP8, FP8_MAX, width_of_scales


DTYPES = (torch.bfloat16, torch.float32)

# Half a millisecond of work, a few times what starting a thread costs.
_WEIGHTS_PER_THREAD = 1 << 20

_F32, _I32 = ir.FloatType(), ir.IntType(32)


def takes(weight: Tensor, scheme: QuantizationScheme) -> bool:
    """Whether the kernels know this dtype and whether rows and groups are whole words of weights and of codes."""
    multiple = 32 // scheme.weights.num_bits if scheme.format == "pack-quantized" else 2
    width = width_of_scales(weight, scheme)
    return weight.dtype in DTYPES and weight.numel() > 0 and width % 2 == 0 and weight.shape[1] % multiple == 0


def extremes(weight: Tensor, scheme: QuantizationScheme) -> tuple[Tensor, Tensor]:
    """As [`codes.extremes`]; of a float32 weight without a bfloat16 copy of it."""
    words = _words(weight, scheme)
    low, high = (torch.empty(words.shape[0], words.shape[2], dtype=torch.bfloat16) for _ in range(2))
    _over_rows(_extremes, words, _memory(low, np.uint16), _memory(high, np.uint16), scheme.weights.symmetric)
    return low, high


def quantize(
    weight: Tensor, scheme: QuantizationScheme, global_scale: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As [`codes.quantize`]; of a float32 weight without a bfloat16 copy of it."""
    words, args = _words(weight, scheme), scheme.weights
    scale = torch.empty(words.shape[0], words.shape[2], dtype=args.scale_dtype or torch.bfloat16)
    zero_point = None if args.symmetric else torch.empty(scale.shape, dtype=torch.int8)
    low, high = (limit.item() for limit in calculate_range(args, weight.device))
    steps = (high - low) / (2 if args.symmetric else 1)
    return _encode(weight, words, scale, zero_point, scheme, global_scale, steps), scale, zero_point


def encode(
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    scheme: QuantizationScheme,
    global_scale: Tensor | None = None,
) -> Tensor:
    """As [`codes.encode`]; of a float32 weight without a bfloat16 copy of it."""
    zero_point = None if zero_point is None else zero_point.contiguous()
    return _encode(weight, _words(weight, scheme), scale.contiguous(), zero_point, scheme, global_scale, _GIVEN)


def _encode(
    weight: Tensor,
    words: np.ndarray,
    scale: Tensor,
    zero_point: Tensor | None,
    scheme: QuantizationScheme,
    global_scale: Tensor | None,
    steps: float,
) -> Tensor:
    """
    Codes of a weight, given as [`_words`] too.

    `steps` is what the range between extremes is divided by for `scale` and `zero_point`, which are overwritten, unless it is
    `_GIVEN`.
    """
    bits, packed, steps = scheme.weights.num_bits, scheme.format == "pack-quantized", np.float32(steps)
    scales = _memory(scale, np.uint16 if global_scale is None else np.uint8)
    if global_scale is not None:
        out = torch.empty(weight.shape[0], weight.shape[1] // 2, dtype=torch.uint8)
        _over_rows(_float4, words, scales, _memory(out, np.uint8, words.shape), steps, np.float32(global_scale.item()))
    elif scheme.weights.type == QuantizationType.FLOAT:
        out = torch.empty(weight.shape, dtype=FP8)
        _over_rows(_float8, words, scales, _memory(out, np.uint16, words.shape), steps)
    elif packed and bits == 4:
        out = torch.empty(weight.shape[0], weight.shape[1] // 8, dtype=torch.int32)
        codes = _memory(out, np.uint8, words.shape)
        if zero_point is None:
            _over_rows(_packed_int4, words, scales, codes, steps)
        else:
            _over_rows(_packed_int4_asymmetric, words, scales, _memory(zero_point, np.int8), codes, steps)
    else:
        out = torch.empty(weight.shape, dtype=torch.int8)
        # In a packed word a code has 128 added, which is its two's complement with the highest bit turned.
        half, flip = np.float32(1 << (bits - 1)), np.uint32(0x8080 if packed else 0)
        _over_rows(_int8, words, scales, _memory(out, np.uint16, words.shape), steps, -half, half - 1, flip)
        out = out.view(torch.int32) if packed else out
    return out


def _words(weight: Tensor, scheme: QuantizationScheme) -> np.ndarray:
    """Two numbers a word: `(rows of scales, rows of each, scales in a row, words of each)`."""
    width, blocks = width_of_scales(weight, scheme), scheme.weights.block_structure
    shape = -1, 1 if blocks is None else blocks[0], weight.shape[1] // width, width // 2
    return _memory(weight, np.uint32 if weight.dtype == torch.bfloat16 else np.uint64, shape)


def _memory(tensor: Tensor, dtype: type[np.generic], shape: tuple[int, ...] | None = None) -> np.ndarray:
    """The memory of a contiguous tensor as numbers of `dtype`."""
    # Not `tensor.numpy()`: that fixes the size of the storage for good, and FSDP frees a gathered weight by resizing it.
    count = tensor.numel() * tensor.element_size() // np.dtype(dtype).itemsize
    memory = (np.ctypeslib.as_ctypes_type(dtype) * count).from_address(tensor.data_ptr())
    memory.tensor = tensor  # which lives as long as the array
    return np.ctypeslib.as_array(memory).reshape(tensor.shape if shape is None else shape)


def _over_rows(kernel: Callable[..., None], *args: Any) -> None:
    """Call a kernel on parts of the rows, each in a thread; what is no array goes to every part."""
    rows = len(args[0])
    # Started for this call only: threads that wait for work do not survive a fork.
    count = max(1, min(torch.get_num_threads(), rows, 2 * args[0].size // _WEIGHTS_PER_THREAD))
    bounds = [rows * i // count for i in range(count + 1)]
    first, *others = (
        [a[start:end] if isinstance(a, np.ndarray) else a for a in args] for start, end in itertools.pairwise(bounds)
    )
    threads = [threading.Thread(target=kernel, args=part) for part in others]
    for thread in threads:
        thread.start()
    kernel(*first)
    for thread in threads:
        thread.join()


# Instructions on the bits of one number -----------------------------------------------------------------------------


def _int(value: int) -> ir.Constant:
    return ir.Constant(_I32, value)


def _real(value: float) -> ir.Constant:
    return ir.Constant(_F32, value)


def _instruction(returned: types.Type) -> Callable[[Callable[..., Any]], Any]:
    """Make `emit(builder, *values)`, which writes LLVM instructions, a function that kernels can call."""

    def decorate(emit: Callable[..., Any]) -> Any:
        @functools.wraps(emit)  # numba reads how many arguments there are
        def typed(typingctx: Any, *args: Any) -> Any:
            return returned(*args), lambda context, builder, signature, values: emit(builder, *values)

        return intrinsic(typed)

    return decorate


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


def _narrowed(b: ir.IRBuilder, x: Any) -> Any:
    """The upper 16 bits of a number."""
    return b.trunc(b.lshr(b.bitcast(x, _I32), _int(16)), ir.IntType(16))


def _between(b: ir.IRBuilder, x: Any, low: Any, high: Any) -> Any:
    x = b.select(b.fcmp_ordered("<", x, high), x, high)
    return b.select(b.fcmp_ordered(">", x, low), x, low)


def _halves(b: ir.IRBuilder, word: Any) -> tuple[Any, Any]:
    """Bits, as of float32, of the two bfloat16 or the two float32 numbers in a word."""
    if word.type.width == 64:
        return b.trunc(word, _I32), b.trunc(b.lshr(word, ir.Constant(word.type, 32)), _I32)
    return b.shl(word, _int(16)), b.and_(word, _int(0xFFFF0000))


# A quotient is a product with the reciprocal of the scale, in a fifth of a division's time, and rounded to bfloat16 it is the
# same number: two significands X and S below 2^8 have no quotient halfway between two bfloat16 numbers (M / 2^8 with an odd M
# above 2^8: then X = M S / 2^k has more than 8 bits), and none nearer to it than 1 / (M S) > 2^-17 of its size, while the
# product is off by 2^-22. Below 2^-126, where bfloat16 has fewer bits, the two may differ: all such quotients have one code.
# Not the reciprocal itself, which may be no float32 number, but a power of 2 and the reciprocal of what is left.


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
    bits = _halves(b, word)[which]
    return b.bitcast(_to_bfloat16(b, bits) if word.type.width == 64 else bits, _F32)


def _quotient(b: ir.IRBuilder, word: Any, which: int, power: Any, reciprocal: Any) -> Any:
    product = b.fmul(b.fmul(_number(b, word, which), power), reciprocal)
    return b.bitcast(
        b.and_(b.add(b.bitcast(product, _I32), _int(0x7FFF)), _int(0xFFFF0000)), _F32
    )  # there are no ties


@_instruction(types.float32)
def _first_steps(b: ir.IRBuilder, word: Any, power: Any, reciprocal: Any) -> Any:
    """`codes.steps` of the first number of a word: the number and the quotient are rounded to bfloat16."""
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
    """The nearest integer between two, ties to even, in two's complement; only the lowest 16 bits mean anything."""
    # In [2^23, 2^24) neighbouring float32 numbers are 1 apart, and here the lowest bits of 1.5 * 2^23 are zero.
    return b.bitcast(b.fadd(_between(b, x, low, high), _real(1.5 * 2**23)), _I32)


def _float_code(b: ir.IRBuilder, x: Any, largest: float, exponent: int, mantissa: int) -> Any:
    """
    Magnitude's code of the nearest float of few bits, ties to even, saturated, and the bits of `x` without -0.0.

    `exponent` is the lowest one, below which the codes are as far apart as with it: by 2^(exponent - mantissa).
    """
    bits = b.bitcast(b.fadd(x, _real(0.0)), _I32)
    top, bottom = (b.bitcast(_real(limit), _I32) for limit in (largest, 2.0**exponent))
    magnitude = b.and_(bits, _int(0x7FFFFFFF))
    magnitude = b.select(b.icmp_unsigned("<", magnitude, top), magnitude, top)
    power = b.select(b.icmp_unsigned(">", magnitude, bottom), magnitude, bottom)
    power = b.and_(power, _int(0x7F800000))
    # As far apart as codes here are float32 numbers at a power of 2 that is higher by this much: adding it rounds.
    anchor = b.add(power, _int((23 - mantissa) << 23))
    steps = b.sub(b.bitcast(b.fadd(b.bitcast(magnitude, _F32), b.bitcast(anchor, _F32)), _I32), anchor)
    return b.add(steps, b.sub(b.lshr(power, _int(23 - mantissa)), _int((127 + exponent) << mantissa))), bits


@_instruction(types.uint32)
def _float8_code(b: ir.IRBuilder, x: Any) -> Any:
    """Bits of the nearest float8_e4m3fn number; `codes.fp8_codes` of one number."""
    code, bits = _float_code(b, x, FP8_MAX, -6, 3)
    return b.or_(code, b.and_(b.lshr(bits, _int(24)), _int(0x80)))


@_instruction(types.uint32)
def _float4_code(b: ir.IRBuilder, x: Any) -> Any:
    """Bits of the nearest float4_e2m1 number; a code of `codes.pack_fp4`."""
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
def _first(b: ir.IRBuilder, word: Any) -> Any:
    """The first number of a word, rounded to bfloat16."""
    return _number(b, word, 0)


@_instruction(types.float32)
def _second(b: ir.IRBuilder, word: Any) -> Any:
    return _number(b, word, 1)


@_instruction(types.float32)
def _over(b: ir.IRBuilder, x: Any, y: Any) -> Any:
    """The quotient, rounded to bfloat16."""
    return _rounded(b, b.fdiv(x, y))


@_instruction(types.uint16)
def _bfloat16(b: ir.IRBuilder, x: Any) -> Any:
    """The 16 bits of a number that is rounded already."""
    return _narrowed(b, x)


@_instruction(types.float32)
def _float32(b: ir.IRBuilder, bits: Any) -> Any:
    return _widened(b, bits)


@_instruction(types.uint8)
def _two_in_a_byte(b: ir.IRBuilder, first: Any, second: Any, flip: Any) -> Any:
    lower = b.and_(first, _int(15))
    return b.trunc(b.xor(b.or_(lower, b.shl(second, _int(4))), flip), ir.IntType(8))


@_instruction(types.uint16)
def _two_bytes(b: ir.IRBuilder, first: Any, second: Any, flip: Any) -> Any:
    lower = b.and_(first, _int(255))
    return b.trunc(b.xor(b.or_(lower, b.shl(second, _int(8))), flip), ir.IntType(16))


# Kernels: for each scale a row of words in, a row of codes out ----------------------------------------------------------

# `nogil` for the threads; with "numpy" a division needs no check for zero.
_options = {"nogil": True, "error_model": "numpy"}
_GIVEN = 0.0
_SCALE_OF_ZEROS = np.float32(torch.finfo(torch.bfloat16).eps)
_FLOAT8 = torch.arange(256, dtype=torch.uint8).view(FP8).float().numpy()
_FLOAT8_SCALE_OF_ZEROS = torch.tensor(0.125).to(FP8).view(torch.uint8).item()


def _kernel(function: Callable[..., None]) -> Callable[..., None]:
    try:
        return njit(**_options, cache=True)(function)
    except RuntimeError:  # no folder that can be written: compile in every process, a second each
        return njit(**_options)(function)


@_kernel
def _magnitudes(words, high):
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
def _extremes(words, low, high, symmetric):
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
def _packed_int4(words, scales, out, steps):
    # A code has 8 added, which is its two's complement with the highest bit turned.
    low, high, flip = np.float32(-8), np.float32(7), np.uint32(0x88)
    for row in range(words.shape[0]):
        if steps != _GIVEN:
            _symmetric_scales(words[row], steps, scales[row])
        for line in range(words.shape[1]):
            for column in range(words.shape[2]):
                part, codes, power = words[row, line, column], out[row, line, column], _power(scales[row, column])
                factor = _reciprocal(scales[row, column], power)
                for i in range(part.shape[0]):
                    first = _nearest(_first_steps(part[i], power, factor), low, high)
                    second = _nearest(_second_steps(part[i], power, factor), low, high)
                    codes[i] = _two_in_a_byte(first, second, flip)


@_kernel
def _packed_int4_asymmetric(words, scales, zeros, out, steps):
    # A code has 8 added, which is its two's complement with the highest bit turned.
    low, high, flip = np.float32(-8), np.float32(7), np.uint32(0x88)
    for row in range(words.shape[0]):
        if steps != _GIVEN:
            _asymmetric_scales(words[row], steps, scales[row], zeros[row])
        for line in range(words.shape[1]):
            for column in range(words.shape[2]):
                part, codes, power = words[row, line, column], out[row, line, column], _power(scales[row, column])
                factor, zero = _reciprocal(scales[row, column], power), np.float32(zeros[row, column])
                for i in range(part.shape[0]):
                    first = _nearest(_plus(_first_steps(part[i], power, factor), zero), low, high)
                    second = _nearest(_plus(_second_steps(part[i], power, factor), zero), low, high)
                    codes[i] = _two_in_a_byte(first, second, flip)


@_kernel
def _int8(words, scales, out, steps, low, high, flip):
    for row in range(words.shape[0]):
        if steps != _GIVEN:
            _symmetric_scales(words[row], steps, scales[row])
        for line in range(words.shape[1]):
            for column in range(words.shape[2]):
                part, codes, power = words[row, line, column], out[row, line, column], _power(scales[row, column])
                factor = _reciprocal(scales[row, column], power)
                for i in range(part.shape[0]):
                    first = _nearest(_first_steps(part[i], power, factor), low, high)
                    second = _nearest(_second_steps(part[i], power, factor), low, high)
                    codes[i] = _two_bytes(first, second, flip)


@_kernel
def _float8(words, scales, out, steps):
    for row in range(words.shape[0]):
        if steps != _GIVEN:
            _symmetric_scales(words[row], steps, scales[row])
        for line in range(words.shape[1]):
            for column in range(words.shape[2]):
                part, codes, power = words[row, line, column], out[row, line, column], _power(scales[row, column])
                factor = _reciprocal(scales[row, column], power)
                for i in range(part.shape[0]):
                    first = _float8_code(_first_steps(part[i], power, factor))
                    codes[i] = _two_bytes(first, _float8_code(_second_steps(part[i], power, factor)), np.uint32(0))


@_kernel
def _float4_scales(words, steps, global_scale, scales):
    """`calculate_qparams` below a global scale."""
    high = np.empty(words.shape[1], np.uint32)
    _magnitudes(words, high)
    for column in range(words.shape[1]):
        code = _float8_code(global_scale * _over(_extreme(high[column]), steps))
        scales[column] = _FLOAT8_SCALE_OF_ZEROS if code == 0 else code


@_kernel
def _float4(words, scales, out, steps, global_scale):
    for row in range(words.shape[0]):
        if steps != _GIVEN:
            _float4_scales(words[row], steps, global_scale, scales[row])
        for column in range(words.shape[2]):
            part, codes, unit = words[row, 0, column], out[row, 0, column], _FLOAT8[scales[row, column]] / global_scale
            for i in range(part.shape[0]):
                # In float32, whose quotients may lie as near to a tie as they like: no product can do.
                first, second = _float4_code(_first(part[i]) / unit), _float4_code(_second(part[i]) / unit)
                codes[i] = _two_in_a_byte(first, second, np.uint32(0))
