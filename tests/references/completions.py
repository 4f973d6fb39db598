"""What is computed of completions: TBPO, ratios, error tokens, pass@k."""

import itertools
import math


def counted_tokens(mask):
    """Positions of the tokens of a completion that count."""
    tokens = []
    for token, counts in enumerate(mask):
        if counts:
            tokens.append(token)
    return tokens


def mismatch_weight(old, sampling, mask, cap):
    """`w` of one completion: lists of T numbers; a NaN of the engine counts as agreement."""
    tokens = counted_tokens(mask)

    total = 0.0
    # The mean below is also over those that the engine could not score.
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
        # Of an empty completion the ratio is 1: it counts among the completions, and has no gradient.
        length = max(len(tokens), 1)
        log_ratio = 0.0
        for t in tokens:
            log_ratio += logps[i][t] - old[i][t]
        ratio = math.exp(log_ratio / length)

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
    return [max(advantage, 0.0) for advantage in advantages]


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
    clipped = 0

    for logps, old, mask, advantage, error in rows:
        counted = counted_tokens(mask)
        # Left out of the loss: its ratio says nothing, and lies beyond no bound.
        if not counted:
            continue
        log_ratio = 0.0
        for t in counted:
            step = logps[t] - old[t]
            log_ratio += step
            # `expm1` keeps the digits that exp(step) - 1 loses next to 1.
            k3 += math.expm1(step) - step
            errors += error[t]
        ratio = math.exp(log_ratio / len(counted))
        ratios.append(ratio)
        tokens += len(counted)

        if advantage > 0:
            positive.append(ratio)
            beyond["pos_high"] += ratio > pos_high
            clipped += ratio > pos_high
        if advantage < 0:
            negative.append(ratio)
            beyond["neg_low"] += ratio < neg_low
            beyond["neg_high"] += ratio > neg_high
            clipped += ratio < neg_low or ratio > neg_high

    # Shares of all completions, not of those with the sign.
    metrics = {}
    for bound, number in beyond.items():
        metrics[f"ratio/{prefix}{bound}_frac"] = number / len(rows)
    for sign, values in (("pos", positive), ("neg", negative)):
        if values:
            metrics[f"ratio/{sign}_q50"] = quantile(values, 0.5)
            metrics[f"ratio/{sign}_q99"] = quantile(values, 0.99)
    # Of those that have a bound.
    if positive or negative:
        metrics[f"ratio/{prefix}clipped_frac"] = clipped / (len(positive) + len(negative))
    if tokens:
        metrics["ratio/min"] = min(ratios)
        metrics["ratio/max"] = max(ratios)
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

    # Backwards alone: the first occurrences of a loop are no copies.
    is_copy = []
    for t in range(length):
        is_copy.append(ngrams[t] is not None and ngrams[:t].count(ngrams[t]) >= copies)

    is_error = [False] * length
    for start in range(length - window + 1):
        end = start + window
        # An error in one window stays one: those that overlap it may be less dense.
        if sum(is_copy[start:end]) >= density * window:
            is_error[start:end] = is_copy[start:end]
    return is_error


def pass_at_k(rewards, k):
    """Share of all ways to draw `k` of the completions in which at least one is correct."""
    draws = list(itertools.combinations(rewards, k))
    return sum(map(any, draws)) / len(draws)
