"""
What the metrics of completions share: names, extremes, one collective for all, and the terms of their KL estimate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor


def gather_columns(columns: dict[str, Tensor], gather: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """
    Put together what each process knows of its completions, in one collective.

    Args:
        columns: By name, a number of each completion of this process, `(B,)`. All processes have equally many.
        gather: Puts the rows of all processes one after the other.

    Returns:
        By the same names, float32 `(processes * B,)` on the CPU.
    """
    rows = torch.stack([column.float() for column in columns.values()], 1)

    # One wait for the device here, not one for each of the many small operations that follow.
    gathered = gather(rows).cpu()
    return dict(zip(columns, gathered.unbind(1), strict=True))


def kl_terms(difference: Tensor) -> Tensor:
    """
    The terms `exp(d) - 1 - d`, whose mean estimates a KL divergence (k3 of Schulman, 2020). None of them is negative.

    Args:
        difference: For tokens that q sampled: log p - log q, any shape. The estimate is that of KL(q || p).
    """
    # For a difference of 1e-3 the term is 5e-7, of which exp(d) - 1 keeps one digit in float32.
    return difference.expm1() - difference


class Mean(float):
    """
    A mean over some of the tokens or completions of an update, which knows over how many.

    Args:
        value: The mean.
        weight: How many tokens or completions it is over.
    """

    weight: float

    def __new__(cls, value: float, weight: float) -> Mean:
        mean = super().__new__(cls, value)
        mean.weight = weight
        return mean

    def __getnewargs__(self) -> tuple[float, float]:
        # For copies: a callback may take one of all metrics.
        return float(self), self.weight


def merge_micro_batches(metrics: Mapping[str, list[float]]) -> None:
    """
    Prepare metrics for TRL's mean over micro-batches, which counts each of them once.

    Of a minimum or a maximum of ours one value is left, and of each [`Mean`] the mean over the tokens or completions
    of all micro-batches: answers in loops are the longest, so few micro-batches may hold most of their tokens.

    Args:
        metrics: The values of the micro-batches by name, changed in place. Of TRL's own metrics none is changed.
    """
    for name, values in metrics.items():
        is_ours = name.startswith(("ratio/", "mismatch/"))
        if is_ours and name.endswith("min"):
            values[:] = [min(values)]
        elif is_ours and name.endswith("max"):
            values[:] = [max(values)]
        else:
            values[:] = _merged_means(values)


def _merged_means(values: Sequence[float]) -> list[float]:
    """One mean in place of means with weights; all other values as they are."""
    # TRL leaves out what is no number.
    means = [value for value in values if isinstance(value, Mean) and not math.isnan(value)]
    others = [value for value in values if not isinstance(value, Mean)]
    if not means or others:
        return list(values)

    weight = sum(mean.weight for mean in means)
    return [Mean(sum(mean * mean.weight for mean in means) / weight, weight)]


def distinct_names(names: Sequence[str]) -> list[str]:
    """
    The names, with a number at the second and further ones of those that are there several times.

    Args:
        names: Of reward functions, say, whose columns would be one.
    """
    numbered: list[str] = []
    for name in names:
        number = 1
        candidate = name
        while candidate in numbered:
            number += 1
            candidate = f"{name}_{number}"
        numbered.append(candidate)
    return numbered
