"""What a rollout batch is, in numbers, and how long its answers are."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from statistics import NormalDist


# Standard deviation of the natural logarithm of lengths; assumed, as of answers to mathematical problems.
SPREAD = 0.8
# Halvings of an interval that has the scale: 2 ** -60 of it is below the precision of a float.
BISECTIONS = 60


@dataclass(frozen=True)
class Batch:
    """
    A rollout batch and its updates.

    Attributes:
        answers: Answers of all GPUs.
        prompts: Different prompts among them.
        prompt_tokens: Mean tokens of a prompt.
        answer_tokens: Mean tokens of an answer.
        longest: Most tokens of an answer.
        micro_batches: Micro-batches of each GPU in which the answers are trained once.
        iterations: How often they are trained.
        updates: Optimizer steps.
        has_old: Whether a forward of its own computes the log-probs before the updates.
        has_reference: Whether there is a KL penalty, for which a reference model computes log-probs too.
    """

    answers: int
    prompts: int
    prompt_tokens: float
    answer_tokens: float
    longest: int
    micro_batches: int
    iterations: int = 1
    updates: int = 1
    has_old: bool = True
    has_reference: bool = False


def answer_lengths(count: int, mean: float, longest: int) -> list[int]:
    """
    Lengths of answers, in the order in which an engine takes them: log-normal, cut off at the longest.

    Args:
        count: Number of answers.
        mean: Their mean length in tokens. At least `longest`: all have that length.
        longest: Most tokens of an answer.
    """
    if mean >= longest:
        return [longest] * count

    # The quantiles of a distribution instead of draws: a plan is the same each time.
    normal = NormalDist()
    spreads = [math.exp(SPREAD * normal.inv_cdf((place + 0.5) / count)) for place in range(count)]

    # The scale that has the mean, by bisection: what is cut off makes it larger than the mean of the quantiles says.
    low = 0.0
    # With this scale the shortest answer would have the largest length, so the mean is reached below it.
    high = longest / spreads[0]
    for _ in range(BISECTIONS):
        scale = (low + high) / 2
        if sum(min(longest, scale * spread) for spread in spreads) < mean * count:
            low = scale
        else:
            high = scale

    lengths = [max(1, round(min(longest, high * spread))) for spread in spreads]
    # An engine does not get its answers sorted by length.
    random.Random(0).shuffle(lengths)
    return lengths
