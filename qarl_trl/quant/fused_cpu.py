"""Quantization on a CPU in two passes over the weight, by kernels that numba compiles: one for extremes, one for codes.

Invariant: the bytes of `codes`, whose functions these are in another form; `fused` compares them before it hands this module
out (paper Sec. 3.1, `W_low-bit = Quant(theta)`).

The kernels read two numbers at a time, as a word, and write two codes at a time, so that no lane of a vector has to move.
What they do to a word is written as instructions of 32 bits: numba's own integers are 64 bits wide, at half the speed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from compressed_tensors.quantization import QuantizationScheme, QuantizationType
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from torch import Tensor

from .codes import FP8, FP8_MAX, rows_of_scales, width_of_scales


DTYPES = (torch.bfloat16, torch.float32)

# A millisecond of work, several times what starting a thread costs.
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
    low, high = (torch.empty(weight.shape[0], words.shape[0] // weight.shape[0]) for _ in range(2))
    if scheme.weights.symmetric:
        _over_rows(_magnitudes, words, _flat(high, np.uint32))
    else:
        _over_rows(_minima_maxima, words, _flat(low, np.int32), _flat(high, np.int32))
    # Rounding keeps the order, so the extreme of the rounded numbers is the rounded extreme.
    high = high.to(torch.bfloat16)
    if scheme.weights.block_structure is not None:
        high = high.unflatten(0, (-1, scheme.weights.block_structure[0])).amax(1)
    return (-high if scheme.weights.symmetric else low.to(torch.bfloat16)), high


def encode(weight: Tensor, scale: Tensor, zero_point: Tensor | None, scheme: QuantizationScheme) -> Tensor:
    """As [`codes.encode`]; of a float32 weight without a bfloat16 copy of it."""
    words, scales = _words(weight, scheme), _flat(rows_of_scales(scale, scheme).float().contiguous(), np.float32)
    bits, packed = scheme.weights.num_bits, scheme.format == "pack-quantized"
    if scheme.weights.type == QuantizationType.FLOAT:
        out = torch.empty(weight.shape, dtype=FP8)
        _over_rows(_float8, words, scales, _flat(out, np.uint16).reshape(words.shape))
    elif packed and bits == 4:
        out = torch.empty(weight.shape[0], weight.shape[1] // 8, dtype=torch.int32)
        codes = _flat(out, np.uint8).reshape(words.shape)
        if zero_point is None:
            _over_rows(_packed_int4, words, scales, codes)
        else:
            _over_rows(
                _packed_int4_asymmetric, words, scales, _flat(zero_point.float().contiguous(), np.float32), codes
            )
    else:
        out = torch.empty(weight.shape, dtype=torch.int8)
        # In a packed word a code has 128 added, which is its two's complement with the highest bit turned.
        half, flip = np.float32(1 << (bits - 1)), np.uint32(0x8080 if packed else 0)
        _over_rows(_int8, words, scales, _flat(out, np.uint16).reshape(words.shape), -half, half - 1, flip)
        out = out.view(torch.int32) if packed else out
    return out


def _words(weight: Tensor, scheme: QuantizationScheme) -> np.ndarray:
    """Two numbers a word, one row for each scale (of a block: for each of its rows)."""
    words = _flat(weight, np.uint32 if weight.dtype == torch.bfloat16 else np.uint64)
    return words.reshape(-1, width_of_scales(weight, scheme) // 2)


def _flat(tensor: Tensor, dtype: type[np.generic]) -> np.ndarray:
    """The memory of a contiguous tensor as numbers of `dtype`."""
    # Not `tensor.numpy()`: that fixes the size of the storage for good, and FSDP frees a gathered weight by resizing it.
    count = tensor.numel() * tensor.element_size() // np.dtype(dtype).itemsize
    memory = (np.ctypeslib.as_ctypes_type(dtype) * count).from_address(tensor.data_ptr())
    memory.tensor = tensor  # which lives as long as the array
    return np.ctypeslib.as_array(memory)


def _over_rows(kernel: Callable[..., None], *args: Any) -> None:
    """Call a kernel on parts of the rows, each in a thread; what is no array goes to every part."""
    rows = len(args[0])
    # Started for this call only: threads that wait for work do not survive a fork.
    count = max(1, min(torch.get_num_threads(), rows, 2 * args[0].size // _WEIGHTS_PER_THREAD))
    bounds = [rows * i // count for i in range(count + 1)]
    first, *others = (
        [a[start:end] if isinstance(a, np.ndarray) else a for a in args] for start, end in itertools.pairwise(bounds)
    )
    with ThreadPoolExecutor(count) as pool:
        running = [pool.submit(kernel, *part) for part in others]
        kernel(*first)
    for part in running:
        part.result()


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


def _between(b: ir.IRBuilder, x: Any, low: Any, high: Any) -> Any:
    x = b.select(b.fcmp_ordered("<", x, high), x, high)
    return b.select(b.fcmp_ordered(">", x, low), x, low)


def _halves(b: ir.IRBuilder, word: Any) -> tuple[Any, Any]:
    """Bits, as of float32, of the two bfloat16 or the two float32 numbers in a word."""
    if word.type.width == 64:
        return b.trunc(word, _I32), b.trunc(b.lshr(word, ir.Constant(word.type, 32)), _I32)
    return b.shl(word, _int(16)), b.and_(word, _int(0xFFFF0000))


def _quotient(b: ir.IRBuilder, word: Any, which: int, scale: Any) -> Any:
    bits = _halves(b, word)[which]
    bits = _to_bfloat16(b, bits) if word.type.width == 64 else bits
    return b.bitcast(_to_bfloat16(b, b.bitcast(b.fdiv(b.bitcast(bits, _F32), scale), _I32)), _F32)


@_instruction(types.float32)
def _first_steps(b: ir.IRBuilder, word: Any, scale: Any) -> Any:
    """`codes.steps` of the first number of a word: the number and the quotient are rounded to bfloat16."""
    return _quotient(b, word, 0, scale)


@_instruction(types.float32)
def _second_steps(b: ir.IRBuilder, word: Any, scale: Any) -> Any:
    return _quotient(b, word, 1, scale)


@_instruction(types.float32)
def _plus(b: ir.IRBuilder, x: Any, y: Any) -> Any:
    """The sum, rounded to bfloat16."""
    return b.bitcast(_to_bfloat16(b, b.bitcast(b.fadd(x, y), _I32)), _F32)


@_instruction(types.uint32)
def _nearest(b: ir.IRBuilder, x: Any, low: Any, high: Any) -> Any:
    """The nearest integer between two, ties to even, in two's complement; only the lowest 16 bits mean anything."""
    # In [2^23, 2^24) neighbouring float32 numbers are 1 apart, and here the lowest bits of 1.5 * 2^23 are zero.
    return b.bitcast(b.fadd(_between(b, x, low, high), _real(1.5 * 2**23)), _I32)


@_instruction(types.uint32)
def _float8_code(b: ir.IRBuilder, x: Any) -> Any:
    """Bits of the nearest float8_e4m3fn number, ties to even, saturated; `codes.fp8_codes` of one number."""
    x = _between(b, b.fadd(x, _real(0.0)), _real(-FP8_MAX), _real(FP8_MAX))
    bits = b.bitcast(x, _I32)
    magnitude = b.and_(bits, _int(0x7FFFFFFF))
    odd = b.and_(b.lshr(magnitude, _int(20)), _int(1))
    rounded = b.lshr(b.add(b.add(magnitude, _int(0x7FFFF)), odd), _int(20))
    normal = b.sub(rounded, _int((127 - 7) << 3))  # the exponent's bias
    # Below 2^-6 the numbers are multiples of 2^-9, which is how far apart float32 numbers are from 2^14 on.
    shifted = b.bitcast(b.fadd(b.bitcast(magnitude, _F32), _real(2.0**14)), _I32)
    subnormal = b.sub(shifted, b.bitcast(_real(2.0**14), _I32))
    small = b.fcmp_ordered("<", b.bitcast(magnitude, _F32), _real(2.0**-6))
    return b.or_(b.select(small, subnormal, normal), b.and_(b.lshr(bits, _int(24)), _int(0x80)))


def _ordered_bits(b: ir.IRBuilder, bits: Any) -> Any:
    """An integer in the order of the numbers, NaN at both ends; its own inverse."""
    return b.xor(bits, b.and_(b.ashr(bits, _int(31)), _int(0x7FFFFFFF)))


@_instruction(types.uint32)
def _larger_magnitude(b: ir.IRBuilder, word: Any, known: Any) -> Any:
    """Without the sign bit, patterns are ordered like integers, NaN and infinity above all."""
    for bits in _halves(b, word):
        magnitude = b.and_(bits, _int(0x7FFFFFFF))
        known = b.select(b.icmp_unsigned(">", magnitude, known), magnitude, known)
    return known


@_instruction(types.int32)
def _smaller(b: ir.IRBuilder, word: Any, known: Any) -> Any:
    for bits in map(functools.partial(_ordered_bits, b), _halves(b, word)):
        known = b.select(b.icmp_signed("<", bits, known), bits, known)
    return known


@_instruction(types.int32)
def _larger(b: ir.IRBuilder, word: Any, known: Any) -> Any:
    for bits in map(functools.partial(_ordered_bits, b), _halves(b, word)):
        known = b.select(b.icmp_signed(">", bits, known), bits, known)
    return known


@_instruction(types.int32)
def _ordered(b: ir.IRBuilder, bits: Any) -> Any:
    return _ordered_bits(b, bits)


@_instruction(types.uint8)
def _two_in_a_byte(b: ir.IRBuilder, first: Any, second: Any) -> Any:
    """Two codes of 4 bits, each plus 8, which turns the highest bit."""
    lower = b.and_(first, _int(15))
    return b.trunc(b.xor(b.or_(lower, b.shl(second, _int(4))), _int(0x88)), ir.IntType(8))


@_instruction(types.uint16)
def _two_bytes(b: ir.IRBuilder, first: Any, second: Any, flip: Any) -> Any:
    lower = b.and_(first, _int(255))
    return b.trunc(b.xor(b.or_(lower, b.shl(second, _int(8))), flip), ir.IntType(16))


# Kernels: for each scale a row of words in, a row of codes out ----------------------------------------------------------

# `nogil` for the threads; with "numpy" a division needs no check for zero.
_options = {"nogil": True, "error_model": "numpy"}


def _kernel(function: Callable[..., None]) -> Callable[..., None]:
    try:
        return njit(**_options, cache=True)(function)
    except RuntimeError:  # no folder that can be written: compile in every process, a second each
        return njit(**_options)(function)


@_kernel
def _magnitudes(words, out):
    for row in range(words.shape[0]):
        part, known = words[row], np.uint32(0)
        for i in range(part.shape[0]):  # LLVM makes vectors of this, and none of `for word in part`
            known = _larger_magnitude(part[i], known)
        out[row] = known


@_kernel
def _minima_maxima(words, low, high):
    for row in range(words.shape[0]):
        part, least, greatest = words[row], np.int32(2**31 - 1), np.int32(-(2**31))
        for i in range(part.shape[0]):
            least = _smaller(part[i], least)
            greatest = _larger(part[i], greatest)
        low[row], high[row] = _ordered(least), _ordered(greatest)


@_kernel
def _packed_int4(words, scales, out):
    low, high = np.float32(-8), np.float32(7)
    for row in range(words.shape[0]):
        part, codes, scale = words[row], out[row], scales[row]
        for i in range(part.shape[0]):
            first = _nearest(_first_steps(part[i], scale), low, high)
            second = _nearest(_second_steps(part[i], scale), low, high)
            codes[i] = _two_in_a_byte(first, second)


@_kernel
def _packed_int4_asymmetric(words, scales, zeros, out):
    low, high = np.float32(-8), np.float32(7)
    for row in range(words.shape[0]):
        part, codes, scale, zero = words[row], out[row], scales[row], zeros[row]
        for i in range(part.shape[0]):
            first = _nearest(_plus(_first_steps(part[i], scale), zero), low, high)
            second = _nearest(_plus(_second_steps(part[i], scale), zero), low, high)
            codes[i] = _two_in_a_byte(first, second)


@_kernel
def _int8(words, scales, out, low, high, flip):
    for row in range(words.shape[0]):
        part, codes, scale = words[row], out[row], scales[row]
        for i in range(part.shape[0]):
            first = _nearest(_first_steps(part[i], scale), low, high)
            second = _nearest(_second_steps(part[i], scale), low, high)
            codes[i] = _two_bytes(first, second, flip)


@_kernel
def _float8(words, scales, out):
    for row in range(words.shape[0]):
        part, codes, scale = words[row], out[row], scales[row]
        for i in range(part.shape[0]):
            first = _float8_code(_first_steps(part[i], scale))
            codes[i] = _two_bytes(first, _float8_code(_second_steps(part[i], scale)), np.uint32(0))
