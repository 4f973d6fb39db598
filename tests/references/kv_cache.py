"""The numbers of an 8-bit float, and a cut to them: the cache of vLLM's CPU engine, from the definition of a float."""

from bisect import bisect_right


# Bits of exponent and mantissa, the bias of the exponent, and the largest number.
FORMATS = {
    "fp8_e4m3": (4, 3, 7, 448.0),
    "fp8_e5m2": (5, 2, 15, 57344.0),
}


def magnitudes(cache_dtype):
    """All numbers of a format from 0 on, in rising order."""
    exponent_bits, mantissa_bits, bias, largest = FORMATS[cache_dtype]
    numbers = []
    for exponent in range(2**exponent_bits):
        for mantissa in range(2**mantissa_bits):
            # The smallest exponent has no leading one: subnormal numbers.
            leading = 2**mantissa_bits if exponent else 0
            number = (leading + mantissa) * 2.0 ** (max(exponent, 1) - bias - mantissa_bits)
            # The codes above stand for NaN and infinity.
            if number <= largest:
                numbers.append(number)
    return numbers


def cut_off(x, numbers):
    """The largest of `numbers` that is not above |x|, with the sign of x."""
    size = numbers[bisect_right(numbers, abs(x)) - 1]
    return -size if x < 0 else size
