"""From rewards to avg@k and pass@k with their intervals, and the table of them. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb
from typing import Any

import numpy as np


RESAMPLES = 10_000


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """
    Probability that at least one of `k` completions, drawn from the `samples` without replacement, is correct.

    The unbiased estimator `1 - C(samples - correct, k) / C(samples, k)` of Chen et al. 2021 (arXiv:2107.03374, eq. 1).
    """
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


def bootstrap_means(values: Sequence[float], seed: Sequence[int], resamples: int = RESAMPLES) -> np.ndarray:
    """Means `(resamples,)` of P values, one per problem, drawn P times with replacement."""
    array, rng = np.asarray(values, dtype=np.float64), np.random.default_rng(seed)
    return np.array([array[rng.integers(len(array), size=len(array))].mean() for _ in range(resamples)])


def summarize(rewards: Mapping[str, Sequence[Sequence[float]]], pass_at: Sequence[int]) -> dict[str, Any]:
    """
    avg@k and pass@k of each suite, and their mean over suites, in which each suite counts the same (paper, Table 1).

    From rewards 0 or 1, per suite `(P, k)`, to `suites`, by name, and `mean`: by metric `{"value", "low", "high"}` of 0 to 1,
    with the 95 % percentile bootstrap interval over problems.
    """
    values, draws = {}, {}
    for position, (name, rows) in enumerate(rewards.items()):
        per_problem = {f"avg@{len(rows[0])}": [sum(row) / len(row) for row in rows]}
        per_problem |= {f"pass@{k}": [pass_at_k(len(row), round(sum(row)), k) for row in rows] for k in pass_at}
        values[name] = {metric: np.mean(column) for metric, column in per_problem.items()}
        draws[name] = {metric: bootstrap_means(column, [0, position]) for metric, column in per_problem.items()}
    suites = {name: {m: _score(values[name][m], draws[name][m]) for m in per_problem} for name in values}
    mean = {}
    for m in per_problem:
        mean[m] = _score(np.mean([v[m] for v in values.values()]), np.mean([d[m] for d in draws.values()], axis=0))
    return {"suites": suites, "mean": mean}


def table(summary: Mapping[str, Any]) -> str:
    """The summary, with the other figures of each suite, as text; scores in percent."""
    metrics = list(summary["mean"])
    rows = [["suite", "problems", *metrics, "tokens", "cut off"]]
    for name, suite in summary["suites"].items():
        scores = [_percent(suite[metric]) for metric in metrics]
        rows.append([name, str(suite["problems"]), *scores, f"{suite['mean_tokens']:.0f}", f"{suite['cut_off']:.1%}"])
    if len(summary["suites"]) > 1:
        rows.append(["mean over suites", "", *(_percent(summary["mean"][metric]) for metric in metrics), "", ""])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _score(value: float, draws: np.ndarray) -> dict[str, float]:
    low, high = np.percentile(draws, [2.5, 97.5])
    return {"value": float(value), "low": float(low), "high": float(high)}


def _percent(score: Mapping[str, float]) -> str:
    return f"{100 * score['value']:.1f} [{100 * score['low']:.1f}, {100 * score['high']:.1f}]"
