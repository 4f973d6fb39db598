"""Quantizers of a weight, what they pack, and back."""

import torch

from .floats import (
    amax,
    bf16,
    bf16_rows,
    clamped,
    f32,
    float4_code,
    float8_byte,
    float8_byte_saturated,
    float8_value,
    split,
)


BF16_EPS = 2.0**-7  # compressed-tensors' scale for a group of zeros
FLOAT8_EPS = 0x20  # the same below a global scale: 0.125


def quantize_int(weight, bits, group_size=None):
    """
    Symmetric integers (W4A16, W8A16, W8A8, W4A8) of a matrix: quantized values as rows of ints, scales as rows of
    floats.

    Every operation rounds to bfloat16: scale = amax / 7.5 (127.5 of 8 bits), code = round_half_even(clamp(weight /
    scale)).
    """
    half_range = (2**bits - 1) / 2
    quantized = []
    scales = []

    for row in bf16_rows(weight):
        quantized_row = []
        scale_row = []
        for group in split(row, group_size or len(row)):
            # Of 4 bits the largest weight is 7.5 scales, halfway: 7 by the clamp, or -8 if it is negative.
            scale = bf16(amax(group) / half_range) or BF16_EPS
            scale_row.append(scale)
            for x in group:
                quantized_row.append(round(clamped(bf16(x / scale), bits)))
        quantized.append(quantized_row)
        scales.append(scale_row)

    return quantized, scales


def quantize_int4_asymmetric(weight, group_size=None):
    """
    W4A16_ASYM of a matrix: quantized values, scales and zero points, each as rows.

    Zero is always in the range. Every operation rounds to bfloat16: scale = (max - min) / 15,
    zero point = round(clamp(-8 - min / scale)), code = round(clamp(weight / scale + zero point)).
    """
    quantized = []
    scales = []
    zero_points = []

    for row in bf16_rows(weight):
        quantized_row = []
        scale_row = []
        zero_row = []
        for group in split(row, group_size or len(row)):
            low = min(0.0, *group)
            high = max(0.0, *group)
            scale = bf16(bf16(high - low) / 15)

            if scale:
                below = bf16(low / scale)
            elif low:
                # low / 0 is infinitely far below.
                below = -100.0
            else:
                # 0 / 0 counts as a zero point of 0.
                below = -8.0
            zero_point = round(clamped(bf16(-8 - below), 4))

            scale = scale or BF16_EPS
            scale_row.append(scale)
            zero_row.append(zero_point)
            for x in group:
                quantized_row.append(round(clamped(bf16(bf16(x / scale) + zero_point), 4)))
        quantized.append(quantized_row)
        scales.append(scale_row)
        zero_points.append(zero_row)

    return quantized, scales, zero_points


def quantize_float4(weight):
    """
    NVFP4A16 of a matrix: rows of 4-bit quantized values, rows of float8 bytes as scales of 16, and the global scale.

    Scales of groups, amax / 6, are rounded to bfloat16, multiplied by the global scale and rounded to float8.
    Quantized values are of float32 quotients, weight / (scale / global scale).
    """
    rows = bf16_rows(weight)
    largest = max(map(amax, rows))
    # As torch divides a number by a tensor: by a product with its reciprocal.
    global_scale = bf16(448 * 6 * bf16(1 / largest))

    quantized = []
    scales = []
    for row in rows:
        quantized_row = []
        scale_row = []
        for group in split(row, 16):
            scale = f32(global_scale * bf16(amax(group) / 6))
            scale_byte = float8_byte(min(scale, 448.0)) or FLOAT8_EPS
            scale_row.append(scale_byte)

            unit = f32(float8_value(scale_byte) / global_scale)
            for x in group:
                # Adding 0.0 turns -0.0 into 0.0.
                quantized_row.append(float4_code(f32(x / unit) + 0.0))
        quantized.append(quantized_row)
        scales.append(scale_row)

    return quantized, scales, global_scale


def pack_int(quantized, bits):
    """Quantized values to int32, each plus half the range, the first in the lowest bits."""
    per_word = 32 // bits
    half = 2 ** (bits - 1)

    packed = []
    for row in quantized:
        # Up to a whole word, by codes whose bits are 0.
        padded = row + [-half] * (-len(row) % per_word)
        words = []
        for codes in split(padded, per_word):
            word = 0
            for i, code in enumerate(codes):
                word += (code + half) << (bits * i)
            # The highest bit is the sign of an int32.
            if word >= 2**31:
                word -= 2**32
            words.append(word)
        packed.append(words)

    return torch.tensor(packed, dtype=torch.int32)


def pack_int4(quantized):
    """Eight quantized values to an int32, each plus 8, the first in the lowest four bits."""
    return pack_int(quantized, 4)


def pack_zero_points(zero_points):
    """Zero points of eight output channels to an int32: rows `(out, groups)` to `(out / 8, groups)`."""
    # Packed along the output channels, where quantized values are packed along a row.
    by_group = map(list, zip(*zero_points, strict=True))
    return pack_int4(by_group).t().contiguous()


def unpack_int(packed, bits, in_features):
    """The quantized values of `pack_int`, rows of ints."""
    half = 2 ** (bits - 1)
    per_word = 32 // bits

    quantized = []
    for words in packed.tolist():
        row = []
        for word in words:
            for i in range(per_word):
                code = (word >> (bits * i)) & (2**bits - 1)
                row.append(code - half)
        quantized.append(row[:in_features])
    return quantized


def unpack_int4(packed, in_features):
    """The quantized values of `pack_int4`, rows of ints."""
    return unpack_int(packed, 4, in_features)


def quantize_float8(weight):
    """FP8 of a matrix, one bfloat16 scale a row: bytes `(out, in)` and scales `(out, 1)`."""
    quantized = []
    scales = []
    for row in bf16_rows(weight):
        scale = bf16(amax(row) / 448) or BF16_EPS
        scales.append([scale])

        quantized_row = []
        for x in row:
            # Adding the zero point turns -0.0 into 0.0; a negative number that rounds to zero keeps its sign.
            quantized_row.append(float8_byte_saturated(bf16(x / scale) + 0.0))
        quantized.append(quantized_row)

    return torch.tensor(quantized, dtype=torch.uint8), torch.tensor(scales, dtype=torch.bfloat16)


def quantize_float8_blocks(weight, height=128, width=128):
    """FP8 of a matrix, one bfloat16 scale a block: bytes `(out, in)` and scales `(out / height, in / width)`."""
    rows = bf16_rows(weight)

    scales = []
    for top in range(0, len(rows), height):
        scale_row = []
        for left in range(0, len(rows[0]), width):
            largest = 0.0
            # A block at the edge may be smaller.
            for row in rows[top : top + height]:
                largest = max(largest, amax(row[left : left + width]))
            scale_row.append(bf16(largest / 448) or BF16_EPS)
        scales.append(scale_row)

    quantized = []
    for i, row in enumerate(rows):
        quantized_row = []
        for j, x in enumerate(row):
            scale = scales[i // height][j // width]
            quantized_row.append(float8_byte_saturated(bf16(x / scale) + 0.0))
        quantized.append(quantized_row)

    return torch.tensor(quantized, dtype=torch.uint8), torch.tensor(scales, dtype=torch.bfloat16)


def dequantize_rows(quantized, scales, zero_points=None):
    """
    Code (less its zero point) times scale, rounded to bfloat16, `(out, in)`; all three as rows.

    A row has as many scales as groups.
    """
    rows = []
    for i, codes in enumerate(quantized):
        group_size = len(codes) // len(scales[i])
        row = []
        for j, code in enumerate(codes):
            group = j // group_size
            zero_point = 0 if zero_points is None else zero_points[i][group]
            # One rounding: a code less its zero point is exact.
            row.append(bf16((code - zero_point) * scales[i][group]))
        rows.append(row)
    return torch.tensor(rows, dtype=torch.bfloat16)
