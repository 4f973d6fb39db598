"""Slow and obvious versions of the package's arithmetic: Python numbers, one completion or one weight at a time.

Only tests import this file. Nothing here calls the package, compressed-tensors or a tensor operation that rounds.
"""

import itertools
import math
import struct

import torch


# TBPO ---------------------------------------------------------------------------------------------------------------


def mismatch_weight(old, sampling, mask, cap):
    """`w` of one completion: lists of T numbers; a NaN of the engine counts as agreement."""
    tokens = [t for t, counts in enumerate(mask) if counts]
    logp_diffs = [0.0 if math.isnan(sampling[t]) else old[t] - sampling[t] for t in tokens]
    log_weight = sum(logp_diffs) / max(len(tokens), 1)
    return math.exp(min(max(log_weight, -math.log(cap)), math.log(cap)))


def tbpo(logps, old, sampling, advantages, mask, *, epsilon_high, delta_low, delta_high, cap, tie=2e-7):
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
    count = len(rows)
    loss = -sum(weight * clipped * advantage for _, _, _, weight, clipped, _, advantage in rows) / count
    gradient = [[0.0] * len(mask[i]) for i in range(len(rows))]
    for i, (tokens, length, ratio, weight, _, inside, advantage) in enumerate(rows):
        for t in tokens if inside else ():
            gradient[i][t] = -weight * ratio * advantage / length / count
    return loss, gradient


def positive_advantages(advantages):
    """What positive-only GRPO learns from: a list of numbers."""
    return [advantage if advantage > 0 else 0.0 for advantage in advantages]


# Muon ---------------------------------------------------------------------------------------------------------------


def muon(weight, grads, *, lr, momentum, weight_decay, adjust_lr_fn, nesterov=True, ns_steps=5):
    """Muon as its author writes it, one matrix, float64: momentum, Newton-Schulz, decoupled decay, scaled step."""
    weight, average = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
    rows, cols = weight.shape
    for grad in grads:
        average = momentum * average + (1 - momentum) * grad.double()
        x = momentum * average + (1 - momentum) * grad.double() if nesterov else average
        x = x / x.norm()
        for _ in range(ns_steps):
            x = 3.4445 * x - 4.7750 * (x @ x.T) @ x + 2.0315 * (x @ x.T) @ (x @ x.T) @ x
        scale = 0.2 * max(rows, cols) ** 0.5 if adjust_lr_fn == "match_rms_adamw" else max(1, rows / cols) ** 0.5
        weight = weight * (1 - lr * weight_decay) - lr * scale * x
    return weight


# Floats -------------------------------------------------------------------------------------------------------------


def f32(x):
    """The nearest float32; what is too large becomes infinite."""
    try:
        return struct.unpack("<f", struct.pack("<f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


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


def float4_code(x):
    """The 4 bits of the nearest float4_e2m1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign), ties to even, saturated."""
    sign = 8 if math.copysign(1, x) < 0 else 0
    x = min(abs(x), 6.0)
    exponent = max(math.frexp(x)[1] - 1, 0) if x else 0
    return sign | (round(x / 2.0 ** (exponent - 1)) + 2 * exponent)


# Quantizers ---------------------------------------------------------------------------------------------------------

BF16_EPS = 2.0**-7  # compressed-tensors' scale for a group of zeros
FLOAT8_EPS = 0x20  # the same below a global scale: 0.125


def clamped(x, bits):
    """Within the integers of `bits` bits."""
    return min(max(x, -(2 ** (bits - 1))), 2 ** (bits - 1) - 1)


def quantize_int(weight, bits, group_size=None):
    """
    Symmetric integers (W4A16, W8A16, W8A8, W4A8) of a matrix: quantized values as rows of ints, and scales as rows of floats.

    Every operation rounds to bfloat16: scale = amax / 7.5 (127.5 of 8 bits), code = round_half_even(clamp(weight / scale)).
    """
    quantized, scales = [], []
    for row in weight.tolist():
        row = [bf16(x) for x in row]
        size = group_size or len(row)
        groups = [row[i : i + size] for i in range(0, len(row), size)]
        half = (2**bits - 1) / 2
        scales.append([bf16(max(abs(x) for x in group) / half) or BF16_EPS for group in groups])
        quantized.append(
            [
                round(clamped(bf16(x / scale), bits))
                for group, scale in zip(groups, scales[-1], strict=True)
                for x in group
            ]
        )
    return quantized, scales


def quantize_int4_asymmetric(weight, group_size=None):
    """
    W4A16_ASYM of a matrix: quantized values, scales and zero points, each as rows.

    Zero is always in the range. Every operation rounds to bfloat16: scale = (max - min) / 15,
    zero point = round(clamp(-8 - min / scale)), code = round(clamp(weight / scale + zero point)).
    """
    quantized, scales, zero_points = [], [], []
    for row in weight.tolist():
        row = [bf16(x) for x in row]
        size = group_size or len(row)
        quantized.append([])
        scales.append([])
        zero_points.append([])
        for group in (row[i : i + size] for i in range(0, len(row), size)):
            low, high = min(0.0, *group), max(0.0, *group)
            scale = bf16(bf16(high - low) / 15)
            # Without a scale, low / 0 is infinitely far below, and 0 / 0 counts as a zero point of 0.
            below = bf16(low / scale) if scale else -100.0 if low else -8.0
            zero_point = round(clamped(bf16(-8 - below), 4))
            scale = scale or BF16_EPS
            scales[-1].append(scale)
            zero_points[-1].append(zero_point)
            quantized[-1] += [round(clamped(bf16(bf16(x / scale) + zero_point), 4)) for x in group]
    return quantized, scales, zero_points


def quantize_float4(weight):
    """
    NVFP4A16 of a matrix: rows of 4-bit quantized values, rows of float8 bytes as scales of 16, and the global scale.

    Scales of groups, amax / 6, are rounded to bfloat16, multiplied by the global scale and rounded to float8. Quantized values are of
    float32 quotients, weight / (scale / global scale).
    """
    rows = [[bf16(x) for x in row] for row in weight.tolist()]
    # As torch divides a number by a tensor: by a product with its reciprocal.
    global_scale = bf16(448 * 6 * bf16(1 / max(abs(x) for row in rows for x in row)))
    quantized, scales = [], []
    for row in rows:
        quantized.append([])
        scales.append([])
        for group in (row[i : i + 16] for i in range(0, len(row), 16)):
            scale = f32(global_scale * bf16(max(abs(x) for x in group) / 6))
            scales[-1].append(float8_byte(min(scale, 448.0)) or FLOAT8_EPS)
            unit = f32(float8_value(scales[-1][-1]) / global_scale)
            quantized[-1] += [float4_code(f32(x / unit) + 0.0) for x in group]
    return quantized, scales, global_scale


def pack_int(quantized, bits):
    """Quantized values to int32, each plus half the range, the first in the lowest bits."""
    per_word, half = 32 // bits, 2 ** (bits - 1)
    words = []
    for row in quantized:
        row = row + [-half] * (-len(row) % per_word)
        words.append(
            [
                sum((code + half) << (bits * i) for i, code in enumerate(row[j : j + per_word]))
                for j in range(0, len(row), per_word)
            ]
        )
    return torch.tensor(
        [[word - 2**32 if word >= 2**31 else word for word in row] for row in words], dtype=torch.int32
    )


def pack_int4(quantized):
    """Eight quantized values to an int32, each plus 8, the first in the lowest four bits."""
    return pack_int(quantized, 4)


def pack_zero_points(zero_points):
    """Zero points of eight output channels to an int32: rows `(out, groups)` to `(out / 8, groups)`."""
    return pack_int4([list(group) for group in zip(*zero_points, strict=True)]).t().contiguous()


def unpack_int(packed, bits, in_features):
    """The quantized values of `pack_int`, rows of ints."""
    half = 2 ** (bits - 1)
    return [
        [((word >> (bits * i)) & (2**bits - 1)) - half for word in row for i in range(32 // bits)][:in_features]
        for row in packed.tolist()
    ]


def unpack_int4(packed, in_features):
    """The quantized values of `pack_int4`, rows of ints."""
    return unpack_int(packed, 4, in_features)


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


def quantize_float8_blocks(weight, height=128, width=128):
    """FP8 of a matrix, one bfloat16 scale a block: bytes `(out, in)` and scales `(out / height, in / width)`."""
    rows = [[bf16(x) for x in row] for row in weight.tolist()]
    scales = [
        [
            bf16(max(abs(x) for row in rows[i : i + height] for x in row[j : j + width]) / 448) or BF16_EPS
            for j in range(0, len(rows[0]), width)
        ]
        for i in range(0, len(rows), height)
    ]
    values = [
        [float8_byte(min(max(bf16(x / scales[i // height][j // width]) + 0.0, -448), 448)) for j, x in enumerate(row)]
        for i, row in enumerate(rows)
    ]
    return torch.tensor(values, dtype=torch.uint8), torch.tensor(scales, dtype=torch.bfloat16)


def dequantize_rows(quantized, scales, zero_points=None):
    """
    Code (less its zero point) times scale, rounded to bfloat16, `(out, in)`; all three as rows.

    A row has as many scales as groups.
    """
    rows = []
    for i, row in enumerate(quantized):
        size = len(row) // len(scales[i])
        zeros = [0] * len(scales[i]) if zero_points is None else zero_points[i]
        rows.append([bf16((code - zeros[j // size]) * scales[i][j // size]) for j, code in enumerate(row)])
    return torch.tensor(rows, dtype=torch.bfloat16)


def quantize_tokens_float8(x):
    """FP8 of activations, one float32 scale a token, by multiplication with its reciprocal."""
    rows, scales = [], []
    for row in x.tolist():
        scale = max(f32(max(abs(v) for v in row) / 448), f32(1 / (448 * 512)))
        inverse = f32(1 / scale)
        scales.append([scale])
        rows.append([float8_byte(min(max(f32(v * inverse), -448), 448)) for v in row])
    return torch.tensor(rows, dtype=torch.uint8), torch.tensor(scales, dtype=torch.float32)


def int4_float8_table(quantized, scales):
    """
    The weight that vLLM's Hopper kernel multiplies by in W4AFP8, from rows of quantized values and of bfloat16 scales.

    A channel's scales are float8 numbers times one float32 number, chosen as a token's is; an eighth goes over to the latter
    so that eight scales are a float8 number too. Float8 values `(out, in)` and float32 channel scales `(out, 1)`.
    """
    scale_bytes, channel_scales = quantize_tokens_float8(torch.tensor(scales))
    rows = []
    for row, group_bytes in zip(quantized, scale_bytes.tolist(), strict=True):
        size = len(row) // len(group_bytes)
        eighths = [float8_value(float8_byte(float8_value(byte) / 8)) for byte in group_bytes]
        rows.append([float8_value(float8_byte(code * eighths[j // size])) for j, code in enumerate(row)])
    return torch.tensor(rows), channel_scales * 8


def quantize_groups_float8(x, group_size=128):
    """FP8 of activations, one float32 scale for each token and group, by division."""
    rows, scales = [], []
    for row in x.tolist():
        groups = [row[i : i + group_size] for i in range(0, len(row), group_size)]
        scales.append([f32(max(f32(1e-10), *map(abs, group)) / 448) for group in groups])
        rows.append(
            [
                float8_byte(min(max(f32(v / scale), -448), 448))
                for group, scale in zip(groups, scales[-1], strict=True)
                for v in group
            ]
        )
    return torch.tensor(rows, dtype=torch.uint8), torch.tensor(scales, dtype=torch.float32)


def quantize_tokens_int8(x):
    """INT8 of activations, one float32 scale a token, by multiplication with its reciprocal; zeros have scale 0."""
    rows, scales = [], []
    for row in x.tolist():
        scale = f32(max(map(abs, row)) / 127)
        inverse = f32(1 / scale) if scale else math.inf
        scales.append([scale])
        rows.append([round(clamped(f32(v * inverse), 8)) if v else 0 for v in row])
    return torch.tensor(rows, dtype=torch.int8), torch.tensor(scales, dtype=torch.float32)


def quantize_tokens_int8_asymmetric(x):
    """Asymmetric INT8 of activations: code minus zero point, rows of ints, and one float32 scale a token."""
    rows, scales = [], []
    for row in x.tolist():
        low, high = min(0.0, *row), max(0.0, *row)
        steps = 1.0 if low == high else f32(255 / f32(high - low))
        low, high = f32(low * steps), f32(high * steps)
        zero_point = f32(-128 - low) if f32(f32(low - 128) + f32(high + 127)) > 0 else f32(127 - high)
        zero_point = round(clamped(zero_point, 8))
        scaled = [f32(v * steps) for v in row]
        nearest = [int(math.copysign(math.floor(f32(abs(v) + 0.5)), v)) for v in scaled]  # halves away from zero
        rows.append([clamped(n + zero_point, 8) - zero_point for n in nearest])
        scales.append([f32(1 / steps)])
    return rows, torch.tensor(scales, dtype=torch.float32)


# Matrix products ----------------------------------------------------------------------------------------------------


def cut_off_bf16(x):
    """A float32 without the lower half of its bits."""
    return struct.unpack("<f", struct.pack("<I", struct.unpack("<I", struct.pack("<f", x))[0] & 0xFFFF0000))[0]


def int4_int8_gemm(x, quantized, scales, truncate=None):
    """
    W4A8 as torch's scalar kernel computes it: `(tokens, out)` bfloat16; quantized values and scales as rows.

    With several groups their products are added up in float32 and the result is rounded, with one it is cut off.
    """
    groups = len(scales[0])
    truncate = groups == 1 if truncate is None else truncate
    inputs, steps = quantize_tokens_int8_asymmetric(x)
    rows = []
    for token, (step,) in zip(inputs, steps.tolist(), strict=True):
        size = len(token) // groups
        rows.append([])
        for code, scale in zip(quantized, scales, strict=True):
            total = 0.0
            for g in range(groups):
                gemm = sum(a * w for a, w in zip(token[g * size :][:size], code[g * size :][:size], strict=True))
                total = f32(total + f32(gemm * scale[g]))
            rows[-1].append((cut_off_bf16 if truncate else bf16)(f32(total * step)))
    return torch.tensor(rows, dtype=torch.bfloat16)


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


# Mixture of experts -------------------------------------------------------------------------------------------------


def experts(x, gate, up, down, chosen, routing, grad, quantize_input=lambda row: row):
    """
    Output and straight-through gradients of a layer of experts, one token and one choice at a time, in float64.

    `y[t] = sum_k routing[t, k] * down[e] @ (silu(gate[e] @ q(x[t])) * (up[e] @ q(x[t])))` with `e = chosen[t, k]`; the
    gradients are those of `sum(grad * y)`, with every low-bit matrix differentiated as if it were its master.

    Args: x `(tokens, hidden)`; low-bit gate and up `(experts, intermediate, hidden)`, down `(experts, hidden,
    intermediate)`; chosen and routing `(tokens, top_k)`; grad like x; quantize_input: what the layer does to an input
    row. Returns: y and the gradients by x, gate, up, down and routing.
    """
    x, gate, up, down, routing, grad = (t.double() for t in (x, gate, up, down, routing, grad))
    y, grads = torch.zeros_like(x), [torch.zeros_like(t) for t in (x, gate, up, down, routing)]
    grad_x, grad_gate, grad_up, grad_down, grad_routing = grads
    for t in range(len(x)):
        for k in range(chosen.shape[1]):
            e = int(chosen[t, k])
            row = quantize_input(x[t])
            g, u = gate[e] @ row, up[e] @ row
            sigmoid = 1 / (1 + torch.exp(-g))
            hidden = quantize_input(g * sigmoid * u)
            out = down[e] @ hidden
            y[t] += routing[t, k] * out
            grad_routing[t, k] = grad[t] @ out
            grad_out = routing[t, k] * grad[t]
            grad_down[e] += torch.outer(grad_out, hidden)
            grad_hidden = down[e].t() @ grad_out
            grad_g = grad_hidden * u * sigmoid * (1 + g * (1 - sigmoid))
            grad_u = grad_hidden * g * sigmoid
            grad_gate[e] += torch.outer(grad_g, row)
            grad_up[e] += torch.outer(grad_u, row)
            grad_x[t] += gate[e].t() @ grad_g + up[e].t() @ grad_u
    return y, *grads


@torch.no_grad()
def logps_of_each_alone(model, input_ids, attention_mask, logits_to_keep):
    """Log-probs `(B, logits_to_keep)`: each sequence through the model by itself, zero where padded."""
    out = torch.zeros(len(input_ids), logits_to_keep)
    first = input_ids.shape[1] - logits_to_keep
    for row in range(len(input_ids)):
        columns = [c for c in range(input_ids.shape[1]) if attention_mask[row, c]]
        tokens = input_ids[row, columns]
        logits = model(input_ids=tokens[None]).logits[0].float()
        for i in range(1, len(columns)):
            if columns[i] >= first:
                out[row, columns[i] - first] = logits[i - 1].log_softmax(-1)[tokens[i]]
    return out


# Evaluation ---------------------------------------------------------------------------------------------------------


def pass_at_k(rewards, k):
    """Share of all ways to draw `k` of the completions in which at least one is correct."""
    draws = list(itertools.combinations(rewards, k))
    return sum(any(draw) for draw in draws) / len(draws)


# Error tokens -------------------------------------------------------------------------------------------------------


def error_tokens(ids, *, ngram, copies, window, density):
    """Which tokens of one completion are error tokens: list of T booleans, by looking back from each token."""
    length = len(ids)
    grams = [tuple(ids[t - ngram + 1 : t + 1]) if t >= ngram - 1 else None for t in range(length)]
    copied = [gram is not None and grams[:t].count(gram) >= copies for t, gram in enumerate(grams)]
    found = [False] * length
    for start in range(length - window + 1):
        if sum(copied[start : start + window]) >= density * window:
            for t in range(start, start + window):
                found[t] = copied[t]
    return found


# Ratios -------------------------------------------------------------------------------------------------------------


def quantile(values, q):
    """Linear between the two nearest of the sorted values."""
    values = sorted(values)
    place = q * (len(values) - 1)
    low = math.floor(place)
    return values[low] + (place - low) * (values[min(low + 1, len(values) - 1)] - values[low])


def ratio_metrics(rows, band, prefix):
    """`ratio/*` and `error_tokens/*` of completions `(logps, old, mask, advantage, errors)`; `band` is `(pos_high, neg_low, neg_high)`."""
    edges = ("pos_high", "neg_low", "neg_high")

    def beyond(edge, bound, ratio, advantage):
        if edge == "pos_high":
            return advantage > 0 and ratio > bound
        return advantage < 0 and (ratio < bound if edge == "neg_low" else ratio > bound)

    found, ratios, tokens, errors, k3 = {}, [], 0, 0, 0.0
    for logps, old, mask, _, error in rows:
        steps = [logps[t] - old[t] for t, counts in enumerate(mask) if counts]
        ratios.append(math.exp(sum(steps) / max(len(steps), 1)))
        k3 += sum(math.expm1(step) - step for step in steps)
        tokens += len(steps)
        errors += sum(error[t] for t, counts in enumerate(mask) if counts)
    advantages = [row[3] for row in rows]
    found["ratio/min"], found["ratio/max"] = min(ratios), max(ratios)
    for edge, bound in zip(edges, band, strict=True):
        hits = [beyond(edge, bound, r, a) for r, a in zip(ratios, advantages, strict=True)]
        found[f"ratio/{prefix}{edge}_frac"] = sum(hits) / len(rows)
    for sign, here in (("pos", [a > 0 for a in advantages]), ("neg", [a < 0 for a in advantages])):
        values = [r for r, is_here in zip(ratios, here, strict=True) if is_here]
        if values:
            found[f"ratio/{sign}_q50"], found[f"ratio/{sign}_q99"] = quantile(values, 0.5), quantile(values, 0.99)
    if tokens:
        found["ratio/kl_k3"] = k3 / tokens
        found["error_tokens/frac"] = errors / tokens
    return found
