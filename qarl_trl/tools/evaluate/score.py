"""Compute avg@k, pass@k and their standard errors from rewards, and format them as a table. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """
    Chance that at least one of some completions, drawn without replacement, is correct.

    `1 - C(samples - correct, k) / C(samples, k)` (arXiv:2107.03374, eq. 1).

    Args:
        samples: Number of completions of the problem.
        correct: Number of correct ones.
        k: Number of completions to draw, at most `samples`.
    """
    # Exact integers, which the paper's product of floats approximates.
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def summarize(rewards: Mapping[str, Sequence[Sequence[float]]], pass_at: Sequence[int]) -> dict[str, Any]:
    """
    avg@k and pass@k of each suite, and their mean over suites with equal weights (paper, Table 1).

    Args:
        rewards: For each suite the rewards of its completions, 0 or 1, `(P, k)` for `P` problems.
        pass_at: The k of each pass@k.

    Returns:
        `suites`, by name, and `mean`. Both hold `{"value", "stderr"}` by metric, from 0 to 1. The standard error is
        over problems, as in lm-evaluation-harness; for a single problem it is `None`.
    """
    suites = {name: _suite_scores(rows, pass_at) for name, rows in rewards.items()}

    # All suites have the same metrics.
    metrics = next(reversed(suites.values()))
    mean = {}
    for metric in metrics:
        mean[metric] = _mean_score([scores[metric] for scores in suites.values()])
    return {"suites": suites, "mean": mean}


def _suite_scores(rows: Sequence[Sequence[float]], pass_at: Sequence[int]) -> dict[str, dict[str, Any]]:
    """The metrics of a suite with the rewards `(P, k)`."""
    scores = {f"avg@{len(rows[0])}": _score([sum(row) / len(row) for row in rows])}
    for k in pass_at:
        # Rewards are floats, 0.0 or 1.0, and the formula needs a count.
        chances = [pass_at_k(len(row), round(sum(row)), k) for row in rows]
        scores[f"pass@{k}"] = _score(chances)
    return scores


def _score(values: Sequence[float]) -> dict[str, Any]:
    """Mean over problems, with its standard error."""
    # Over problems, not over completions: those of one problem are not independent.
    stderr = None
    if len(values) > 1:
        stderr = statistics.stdev(values) / math.sqrt(len(values))
    return {"value": statistics.fmean(values), "stderr": stderr}


def _mean_score(scores: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean over suites."""
    # Suites are independent, so the squares of their errors add up.
    errors = [score["stderr"] for score in scores]
    stderr = None
    if None not in errors:
        stderr = math.hypot(*errors) / len(errors)
    return {"value": statistics.fmean(score["value"] for score in scores), "stderr": stderr}


def table(summary: Mapping[str, Any]) -> str:
    """
    The summary as text, scores in percent.

    Args:
        summary: From [`summarize`]; each suite has in addition `problems`, `mean_tokens` and `cut_off`.
    """
    metrics = list(summary["mean"])
    rows = [["suite", "problems", *metrics, "tokens", "cut off"]]
    for name, suite in summary["suites"].items():
        scores = [_percent(suite[metric]) for metric in metrics]
        rows.append([name, str(suite["problems"]), *scores, f"{suite['mean_tokens']:.0f}", f"{suite['cut_off']:.1%}"])

    # The mean of a single suite would repeat its row.
    if len(summary["suites"]) > 1:
        scores = [_percent(summary["mean"][metric]) for metric in metrics]
        rows.append(["mean over suites", "", *scores, "", ""])
    return _aligned(rows)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as text, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _percent(score: Mapping[str, Any]) -> str:
    """A score in percent, with its standard error if it has one."""
    text = f"{100 * score['value']:.1f}"
    if score["stderr"] is not None:
        text += f" ± {100 * score['stderr']:.1f}"
    return text
