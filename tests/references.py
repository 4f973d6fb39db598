"""Slow and obvious versions of the package's arithmetic: Python numbers, one completion or one weight at a time.

Only tests import this file. Nothing here calls the package, compressed-tensors or a tensor operation that rounds.
"""

import math
import struct

import torch


# TBPO ---------------------------------------------------------------------------------------------------------------


def mismatch_weight(old, sampling, mask, cap):
    """`w` of one completion: lists of T numbers; a NaN of the engine counts as agreement."""
    tokens = [t for t, counts in enumerate(mask) if counts]
    gaps = [0.0 if math.isnan(sampling[t]) else old[t] - sampling[t] for t in tokens]
    log_weight = sum(gaps) / max(len(tokens), 1)
    return math.exp(min(max(log_weight, -math.log(cap)), math.log(cap)))


def tbpo(
    logps, old, sampling, advantages, mask, *, epsilon_high, delta_low, delta_high, cap, out_of_band="clip", tie=2e-7
):
    """
    Loss and its gradient by `logps`, both in Python floats.

    A ratio closer to a bound than `tie` counts as on the bound, hence inside: float32 cannot tell them apart.
    """
    rows = []
    for i, advantage in enumerate(advantages):
        tokens = [t for t, counts in enumerate(mask[i]) if counts]
        length = max(len(tokens), 1)
        ratio = math.exp(sum(logps[i][t] - old[i][t] for t in tokens) / length)
        weight = 1.0 if sampling is None else mismatch_weight(old[i], sampling[i], mask[i], cap)
        if advantage > 0:
            clipped = min(ratio, 1 + epsilon_high)
        elif advantage < 0:
            clipped = min(max(ratio, 1 - delta_low), 1 + delta_high)
        else:
            clipped = ratio
        inside = abs(clipped - ratio) <= tie
        rows.append((tokens, length, ratio, weight, clipped, inside, advantage))
    kept = [row for row in rows if row[5]] if out_of_band == "drop" else rows
    count = max(len(kept), 1)
    loss = -sum(weight * clipped * advantage for _, _, _, weight, clipped, _, advantage in kept) / count
    gradient = [[0.0] * len(mask[i]) for i in range(len(rows))]
    for i, (tokens, length, ratio, weight, _, inside, advantage) in enumerate(rows):
        for t in tokens if inside else ():
            gradient[i][t] = -weight * ratio * advantage / length / count
    return loss, gradient


# Floats -------------------------------------------------------------------------------------------------------------


def f32(x):
    """The nearest float32."""
    return struct.unpack("<f", struct.pack("<f", x))[0]


def bf16(x):
    """The nearest bfloat16, ties to even: the upper half of a float32's bits."""
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    low = bits & 0xFFFF
    bits >>= 16
    if low > 0x8000 or (low == 0x8000 and bits & 1):
        bits += 1
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def float8_byte(x):
    """The byte of the nearest float8_e4m3fn, ties to even, for |x| <= 448."""
    sign = 0x80 if math.copysign(1, x) < 0 else 0
    x = abs(x)
    exponent = max(math.frexp(x)[1] - 1, -6) if x else -6
    steps = round(x / 2.0 ** (exponent - 3))  # Python rounds ties to even; 8 steps to a power of two
    return sign | (steps + 8 * (exponent + 6))  # a carry out of the mantissa is the next exponent


def float8_value(byte):
    """The number that a float8_e4m3fn byte stands for."""
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -size if byte & 0x80 else size


# Quantizers ---------------------------------------------------------------------------------------------------------

BF16_EPS = 2.0**-7  # compressed-tensors' scale for a group of zeros


def quantize_int4(weight, group_size=None):
    """
    W4A16 of a matrix: codes in [-8, 7] as rows of ints, and scales as rows of floats.

    Every operation rounds to bfloat16: scale = amax / 7.5, code = round_half_even(clamp(weight / scale, -8, 7)).
    """
    codes, scales = [], []
    for row in weight.tolist():
        row = [bf16(x) for x in row]
        size = group_size or len(row)
        groups = [row[i : i + size] for i in range(0, len(row), size)]
        scales.append([bf16(max(abs(x) for x in group) / 7.5) or BF16_EPS for group in groups])
        codes.append(
            [
                round(min(max(bf16(x / scale), -8), 7))
                for group, scale in zip(groups, scales[-1], strict=True)
                for x in group
            ]
        )
    return codes, scales


def pack_int4(codes):
    """Eight codes to an int32, each plus 8, the first in the lowest four bits."""
    words = []
    for row in codes:
        row = row + [-8] * (-len(row) % 8)
        words.append(
            [sum((code + 8) << (4 * i) for i, code in enumerate(row[j : j + 8])) for j in range(0, len(row), 8)]
        )
    return torch.tensor(
        [[word - 2**32 if word >= 2**31 else word for word in row] for row in words], dtype=torch.int32
    )


def unpack_int4(packed, in_features):
    """The codes of `pack_int4`, rows of ints."""
    return [[((word >> (4 * i)) & 15) - 8 for word in row for i in range(8)][:in_features] for row in packed.tolist()]


def dequantize_int4(packed, scale, in_features):
    """Code times scale, rounded to bfloat16, `(out, in)`."""
    rows = []
    for codes, scales in zip(unpack_int4(packed, in_features), scale.tolist(), strict=True):
        size = in_features // len(scales)
        rows.append([bf16(code * scales[i // size]) for i, code in enumerate(codes)])
    return torch.tensor(rows, dtype=torch.bfloat16)


def quantize_float8(weight):
    """FP8 of a matrix, one bfloat16 scale a row: bytes `(out, in)` and scales `(out, 1)`."""
    rows, scales = [], []
    for row in weight.tolist():
        row = [bf16(x) for x in row]
        scale = bf16(max(abs(x) for x in row) / 448) or BF16_EPS
        scales.append([scale])
        # Adding the zero point turns -0.0 into 0.0; a negative number that rounds to zero keeps its sign.
        rows.append([float8_byte(min(max(bf16(x / scale) + 0.0, -448), 448)) for x in row])
    return torch.tensor(rows, dtype=torch.uint8), torch.tensor(scales, dtype=torch.bfloat16)


def quantize_tokens_float8(x):
    """FP8 of activations, one float32 scale a token, by multiplication with its reciprocal."""
    rows, scales = [], []
    for row in x.tolist():
        scale = max(f32(max(abs(v) for v in row) / 448), f32(1 / (448 * 512)))
        inverse = f32(1 / scale)
        scales.append([scale])
        rows.append([float8_byte(min(max(f32(v * inverse), -448), 448)) for v in row])
    return torch.tensor(rows, dtype=torch.uint8), torch.tensor(scales, dtype=torch.float32)


# Straight-through estimator -----------------------------------------------------------------------------------------


def straight_through(x, low_bit_weight, grad):
    """
    Gradients of `sum(grad * (x @ Q^T))` by `x` and, as if Q were the master, by the master; in float64.

    Args: x `(tokens, in)`, low_bit_weight Q `(out, in)`, grad `(tokens, out)`.
    """
    x, low_bit_weight, grad = x.double(), low_bit_weight.double(), grad.double()
    grad_x, grad_master = torch.zeros_like(x), torch.zeros_like(low_bit_weight)
    for token in range(len(x)):
        for out in range(len(low_bit_weight)):
            grad_x[token] += grad[token, out] * low_bit_weight[out]
            grad_master[out] += grad[token, out] * x[token]
    return grad_x, grad_master
