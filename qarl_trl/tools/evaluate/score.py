"""Compute avg@k, pass@k and their standard errors from rewards, and format them as a table. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Chance that one of `k` completions drawn from `samples` is correct: `1 - C(samples - correct, k) / C(samples, k)` (arXiv:2107.03374, eq. 1)."""
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def summarize(rewards: Mapping[str, Sequence[Sequence[float]]], pass_at: Sequence[int]) -> dict[str, Any]:
    """
    avg@k and pass@k of each suite, and their mean over suites with equal weights (paper, Table 1).

    `rewards` are 0 or 1, `(P, k)` per suite. Returns `suites`, by name, and `mean`; both hold `{"value", "stderr"}` by metric, from 0
    to 1. The standard error is over problems, as in lm-evaluation-harness; for a single problem it is `None`.
    """
    suites = {}
    for name, rows in rewards.items():
        per_problem = {f"avg@{len(rows[0])}": [sum(row) / len(row) for row in rows]}
        per_problem |= {f"pass@{k}": [pass_at_k(len(row), round(sum(row)), k) for row in rows] for k in pass_at}
        suites[name] = {metric: _score(values) for metric, values in per_problem.items()}
    mean = {}
    for metric in per_problem:
        scores = [suite[metric] for suite in suites.values()]
        errors = [score["stderr"] for score in scores]
        stderr = None if None in errors else math.hypot(*errors) / len(errors)  # the suites are independent
        mean[metric] = {"value": statistics.fmean(score["value"] for score in scores), "stderr": stderr}
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


def _score(values: Sequence[float]) -> dict[str, Any]:
    stderr = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return {"value": statistics.fmean(values), "stderr": stderr}


def _percent(score: Mapping[str, Any]) -> str:
    return f"{100 * score['value']:.1f}" + ("" if score["stderr"] is None else f" ± {100 * score['stderr']:.1f}")
