"""What is computed of completions: TBPO, ratios, error tokens, pass@k."""

import itertools
import math


def counted_tokens(mask):
    """Positions of the tokens of a completion that count."""
    return [token for token, counts in enumerate(mask) if counts]


def mismatch_weight(old, sampling, mask, cap):
    """`w` of one completion: lists of T numbers; a NaN of the engine counts as agreement."""
    tokens = counted_tokens(mask)

    total = 0.0
    for t in tokens:
        if not math.isnan(sampling[t]):
            total += old[t] - sampling[t]
    log_weight = total / max(len(tokens), 1)

    log_cap = math.log(cap)
    return math.exp(min(max(log_weight, -log_cap), log_cap))


def tbpo(logps, old, sampling, advantages, mask, *, epsilon_high, delta_low, delta_high, cap, tie=2e-7):
    """
    Loss and its gradient by `logps`, both in Python floats.

    A ratio closer to a bound than `tie` counts as on the bound, hence inside: float32 cannot tell them apart.
    """
    count = len(advantages)
    total = 0.0
    gradient = []

    for i, advantage in enumerate(advantages):
        tokens = counted_tokens(mask[i])
        length = max(len(tokens), 1)
        ratio = math.exp(sum(logps[i][t] - old[i][t] for t in tokens) / length)

        weight = 1.0
        if sampling is not None:
            weight = mismatch_weight(old[i], sampling[i], mask[i], cap)

        clipped = ratio
        if advantage > 0:
            clipped = min(ratio, 1 + epsilon_high)
        if advantage < 0:
            clipped = min(max(ratio, 1 - delta_low), 1 + delta_high)
        total += weight * clipped * advantage

        # The derivative of the ratio by one log-prob is ratio / length. Beyond a bound the loss is constant.
        row = [0.0] * len(mask[i])
        inside = abs(clipped - ratio) <= tie
        if inside:
            for t in tokens:
                row[t] = -weight * ratio * advantage / length / count
        gradient.append(row)

    return -total / count, gradient


def positive_advantages(advantages):
    """What positive-only GRPO learns from: a list of numbers."""
    return [advantage if advantage > 0 else 0.0 for advantage in advantages]


def quantile(values, q):
    """Linear between the two nearest of the sorted values."""
    values = sorted(values)
    place = q * (len(values) - 1)
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (place - low) * (values[high] - values[low])


def ratio_metrics(rows, band, prefix):
    """
    `ratio/*` and `error_tokens/*` of completions.

    Args: rows of `(logps, old, mask, advantage, errors)`; band `(pos_high, neg_low, neg_high)`; prefix of the names of
    the shares beyond these bounds.
    """
    pos_high, neg_low, neg_high = band
    ratios = []
    tokens = 0
    errors = 0
    k3 = 0.0
    beyond = {"pos_high": 0, "neg_low": 0, "neg_high": 0}
    positive = []
    negative = []

    for logps, old, mask, advantage, error in rows:
        counted = counted_tokens(mask)
        steps = [logps[t] - old[t] for t in counted]
        ratio = math.exp(sum(steps) / max(len(steps), 1))
        ratios.append(ratio)

        k3 += sum(math.expm1(step) - step for step in steps)
        tokens += len(counted)
        errors += sum(error[t] for t in counted)

        if advantage > 0:
            positive.append(ratio)
            beyond["pos_high"] += ratio > pos_high
        if advantage < 0:
            negative.append(ratio)
            beyond["neg_low"] += ratio < neg_low
            beyond["neg_high"] += ratio > neg_high

    metrics = {"ratio/min": min(ratios), "ratio/max": max(ratios)}
    for bound, number in beyond.items():
        metrics[f"ratio/{prefix}{bound}_frac"] = number / len(rows)
    for sign, values in (("pos", positive), ("neg", negative)):
        if values:
            metrics[f"ratio/{sign}_q50"] = quantile(values, 0.5)
            metrics[f"ratio/{sign}_q99"] = quantile(values, 0.99)
    if tokens:
        metrics["ratio/kl_k3"] = k3 / tokens
        metrics["error_tokens/frac"] = errors / tokens
    return metrics


def error_tokens(ids, *, ngram, copies, window, density):
    """Which tokens of one completion are error tokens: list of T booleans, by looking back from each token."""
    length = len(ids)

    # The n-gram that ends in each token.
    ngrams = []
    for t in range(length):
        first = t - ngram + 1
        ngrams.append(tuple(ids[first : t + 1]) if first >= 0 else None)

    is_copy = []
    for t in range(length):
        is_copy.append(ngrams[t] is not None and ngrams[:t].count(ngrams[t]) >= copies)

    is_error = [False] * length
    for start in range(length - window + 1):
        tokens = range(start, start + window)
        if sum(is_copy[t] for t in tokens) >= density * window:
            for t in tokens:
                is_error[t] = is_copy[t]
    return is_error


def pass_at_k(rewards, k):
    """Share of all ways to draw `k` of the completions in which at least one is correct."""
    draws = list(itertools.combinations(rewards, k))
    return sum(any(draw) for draw in draws) / len(draws)
