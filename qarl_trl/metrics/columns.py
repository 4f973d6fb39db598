"""
What the metrics of completions share: names, extremes, one collective for all, and the terms of their KL estimate.
"""

from __future__ import annotations

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


def keep_extremes(metrics: Mapping[str, list[float]]) -> None:
    """
    Leave one value of each minimum and each maximum, so that a mean over micro-batches is still one.

    Args:
        metrics: The values of the micro-batches by name, changed in place. Of TRL's own metrics none is changed.
    """
    for name, values in metrics.items():
        if not name.startswith(("ratio/", "mismatch/")):
            continue
        if name.endswith("min"):
            values[:] = [min(values)]
        elif name.endswith("max"):
            values[:] = [max(values)]


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
