"""Quantizers of activations, and the matrix products that take them."""

import math

import torch

from .floats import amax, bf16, clamped, cut_off_bf16, f32, float8_byte, float8_byte_saturated, float8_value, split


def quantize_tokens_float8(x):
    """FP8 of activations, one float32 scale a token, by multiplication with its reciprocal."""
    quantized = []
    scales = []
    for row in x.tolist():
        # vLLM's smallest scale, so that a row of zeros is not divided by 0.
        scale = max(f32(amax(row) / 448), f32(1 / (448 * 512)))
        inverse = f32(1 / scale)
        scales.append([scale])

        quantized_row = []
        for v in row:
            quantized_row.append(float8_byte_saturated(f32(v * inverse)))
        quantized.append(quantized_row)

    return torch.tensor(quantized, dtype=torch.uint8), torch.tensor(scales, dtype=torch.float32)


def int4_float8_table(quantized, scales):
    """
    The weight that vLLM's Hopper kernel multiplies by in W4AFP8, from rows of quantized values and of bfloat16 scales.

    A channel's scales are float8 numbers times one float32 number, chosen as a token's is; an eighth goes over to the
    latter so that eight scales are a float8 number too. Float8 values `(out, in)`, float32 channel scales `(out, 1)`.
    """
    scale_bytes, channel_scales = quantize_tokens_float8(torch.tensor(scales))

    rows = []
    for codes, group_bytes in zip(quantized, scale_bytes.tolist(), strict=True):
        row = []
        for group, byte in zip(split(codes, len(codes) // len(group_bytes)), group_bytes, strict=True):
            # Rounded twice: the eighth of a scale, and each product with it.
            eighth = float8_value(float8_byte(float8_value(byte) / 8))
            for code in group:
                row.append(float8_value(float8_byte(code * eighth)))
        rows.append(row)

    return torch.tensor(rows), channel_scales * 8


def quantize_groups_float8(x, group_size=128):
    """FP8 of activations, one float32 scale for each token and group, by division."""
    quantized = []
    scales = []
    for row in x.tolist():
        quantized_row = []
        scale_row = []
        for group in split(row, group_size):
            # vLLM's `eps`, which a group of zeros has as its largest number.
            scale = f32(max(f32(1e-10), amax(group)) / 448)
            scale_row.append(scale)
            for v in group:
                quantized_row.append(float8_byte_saturated(f32(v / scale)))
        quantized.append(quantized_row)
        scales.append(scale_row)

    return torch.tensor(quantized, dtype=torch.uint8), torch.tensor(scales, dtype=torch.float32)


def quantize_tokens_int8(x):
    """INT8 of activations, one float32 scale a token, by multiplication with its reciprocal; zeros have scale 0."""
    quantized = []
    scales = []
    for row in x.tolist():
        scale = f32(amax(row) / 127)
        scales.append([scale])

        inverse = f32(1 / scale) if scale else math.inf
        quantized_row = []
        for v in row:
            # 0 is 0 also where the reciprocal is infinite.
            code = 0
            if v:
                code = round(clamped(f32(v * inverse), 8))
            quantized_row.append(code)
        quantized.append(quantized_row)

    return torch.tensor(quantized, dtype=torch.int8), torch.tensor(scales, dtype=torch.float32)


def quantize_tokens_int8_asymmetric(x):
    """Asymmetric INT8 of activations: code minus zero point, rows of ints, and one float32 scale a token."""
    quantized = []
    scales = []
    for row in x.tolist():
        # Zero is always in the range, so that it is exact.
        low = min(0.0, *row)
        high = max(0.0, *row)
        steps = 1.0 if low == high else f32(255 / f32(high - low))
        scales.append([f32(1 / steps)])

        # The zero point comes from the end of the range that leaves the smaller error.
        low_step = f32(low * steps)
        high_step = f32(high * steps)
        if f32(f32(low_step - 128) + f32(high_step + 127)) > 0:
            zero_point = f32(-128 - low_step)
        else:
            zero_point = f32(127 - high_step)
        zero_point = round(clamped(zero_point, 8))

        quantized_row = []
        for v in row:
            scaled = f32(v * steps)
            # Halves are rounded away from zero.
            nearest = int(math.copysign(math.floor(f32(abs(scaled) + 0.5)), scaled))
            quantized_row.append(clamped(nearest + zero_point, 8) - zero_point)
        quantized.append(quantized_row)

    return quantized, torch.tensor(scales, dtype=torch.float32)


def int4_int8_gemm(x, quantized, scales, truncate=None):
    """
    W4A8 as torch's scalar kernel computes it: `(tokens, out)` bfloat16; quantized values and scales as rows.

    With several groups their products are added up in float32 and the result is rounded, with one it is cut off.
    """
    groups = len(scales[0])
    if truncate is None:
        truncate = groups == 1
    to_bf16 = cut_off_bf16 if truncate else bf16

    inputs, token_scales = quantize_tokens_int8_asymmetric(x)

    rows = []
    for token, (token_scale,) in zip(inputs, token_scales.tolist(), strict=True):
        group_size = len(token) // groups
        token_groups = split(token, group_size)

        row = []
        for codes, channel_scales in zip(quantized, scales, strict=True):
            total = 0.0
            for a, w, scale in zip(token_groups, split(codes, group_size), channel_scales, strict=True):
                # Integers, whose sum is exact in any order.
                product = sum(a_i * w_i for a_i, w_i in zip(a, w, strict=True))
                # float32 after each operation, in the order of the kernel.
                total = f32(total + f32(product * scale))
            row.append(to_bf16(f32(total * token_scale)))
        rows.append(row)

    return torch.tensor(rows, dtype=torch.bfloat16)
