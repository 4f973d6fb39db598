"""The nearest float32, bfloat16, float8 and float4 of a Python float, and lists of such numbers."""

import math
import struct


def float32_bits(x):
    """The 32 bits of a float32, as an integer."""
    return struct.unpack("<I", struct.pack("<f", x))[0]


def float32_of_bits(bits):
    """The float32 of 32 bits."""
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def f32(x):
    """The nearest float32; what is too large becomes infinite."""
    # C's conversion, with ties to even; Python refuses what C would make infinite.
    try:
        return struct.unpack("<f", struct.pack("<f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


def bf16(x):
    """The nearest bfloat16, ties to even: the upper half of a float32's bits."""
    bits = float32_bits(x)
    upper = bits >> 16
    lower = bits & 0xFFFF

    above_half = lower > 0x8000
    half_and_odd = lower == 0x8000 and upper & 1
    if above_half or half_and_odd:
        upper += 1
    return float32_of_bits(upper << 16)


def cut_off_bf16(x):
    """A float32 without the lower half of its bits."""
    return float32_of_bits(float32_bits(x) & 0xFFFF0000)


def float8_byte(x):
    """The byte of the nearest float8_e4m3fn, ties to even, for |x| <= 448."""
    sign = 0x80 if math.copysign(1, x) < 0 else 0
    size = abs(x)

    # -6 is the smallest one, which subnormal numbers share.
    exponent = -6
    if size > 0:
        exponent = max(math.frexp(size)[1] - 1, -6)

    # 8 steps to a power of two. Python rounds ties to even. A carry out of the mantissa is the next exponent.
    steps = round(size / 2.0 ** (exponent - 3))
    return sign | (steps + 8 * (exponent + 6))


def float8_value(byte):
    """The number that a float8_e4m3fn byte stands for."""
    exponent = (byte >> 3) & 15
    mantissa = byte & 7

    # The bias is 7, and three bits of mantissa are behind the point.
    size = (8 + mantissa) * 2.0 ** (exponent - 10)
    if exponent == 0:
        size = mantissa * 2.0**-9  # subnormal
    return -size if byte & 0x80 else size


def float8_byte_saturated(x):
    """The byte of the nearest float8_e4m3fn; what is beyond the largest becomes the largest."""
    return float8_byte(min(max(x, -448), 448))


def float4_code(x):
    """The 4 bits of the nearest float4_e2m1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign), ties to even, saturated."""
    sign = 8 if math.copysign(1, x) < 0 else 0
    size = min(abs(x), 6.0)

    # 2 steps to a power of two, and 0.5 below 1 as the only subnormal number.
    exponent = 0
    if size > 0:
        exponent = max(math.frexp(size)[1] - 1, 0)
    return sign | (round(size / 2.0 ** (exponent - 1)) + 2 * exponent)


# Lists of numbers ---------------------------------------------------------------------------------------------------


def bf16_rows(weight):
    """The rows of a matrix as lists of bfloat16 numbers."""
    return [list(map(bf16, row)) for row in weight.tolist()]


def split(row, size):
    """A list cut into lists of `size`."""
    return [row[start : start + size] for start in range(0, len(row), size)]


def amax(numbers):
    """The largest absolute value."""
    return max(map(abs, numbers))


def clamped(x, bits):
    """Within the integers of `bits` bits."""
    return min(max(x, -(2 ** (bits - 1))), 2 ** (bits - 1) - 1)
