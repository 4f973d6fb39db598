"""Compute avg@k, pass@k and their standard errors from rewards, and format them as a table. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


# How the metric of a reward function begins that gives other numbers than 0 and 1.
MEAN = "mean@"


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


def summarize(
    rewards: Mapping[str, Mapping[str, Sequence[Sequence[float | None]]]], samples: int, pass_at: Sequence[int]
) -> dict[str, Any]:
    """
    avg@k and pass@k of each suite, and their mean over suites with equal weights (paper, Table 1).

    A reward function that gives other numbers than 0 and 1 has mean@k instead.

    Args:
        rewards: For each suite, and in it for each reward function, the rewards of its completions, `(P, k)` for `P`
            problems. `None` is not counted.
        samples: k.
        pass_at: The k of each pass@k.

    Returns:
        `suites`, by name, and `mean`. Both hold `{"value", "stderr"}` by metric; of several functions the name of a
        metric begins with the function's. The standard error is over problems, as in lm-evaluation-harness; for a
        single problem it is `None`, and so is a value where no completion counts.
    """
    functions = list(next(iter(rewards.values())))
    suites: dict[str, dict[str, Any]] = {name: {} for name in rewards}
    for function in functions:
        prefix = f"{function} " if len(functions) > 1 else ""
        rows_of = {name: _counted(of_suite[function]) for name, of_suite in rewards.items()}
        right_or_wrong = _all_right_or_wrong(rows_of.values())
        for name, rows in rows_of.items():
            scores = _suite_scores(rows, samples, pass_at) if right_or_wrong else _suite_means(rows, samples)
            for metric, score in scores.items():
                suites[name][prefix + metric] = score

    # All suites have the same metrics.
    metrics = next(reversed(suites.values()))
    mean = {}
    for metric in metrics:
        mean[metric] = _mean_score([scores[metric] for scores in suites.values()])
    return {"suites": suites, "mean": mean}


def _counted(rows: Sequence[Sequence[float | None]]) -> list[list[float]]:
    """The rewards of each problem without those that are `None`, and without problems that then have none."""
    counted = [[reward for reward in row if reward is not None] for row in rows]
    return [row for row in counted if row]


def _all_right_or_wrong(suites: Iterable[list[list[float]]]) -> bool:
    """Whether all rewards of all suites are 0 or 1."""
    return all(reward in (0.0, 1.0) for rows in suites for row in rows for reward in row)


def _suite_scores(rows: list[list[float]], samples: int, pass_at: Sequence[int]) -> dict[str, dict[str, Any]]:
    """The metrics of a suite with the rewards `(P, k)`."""
    scores = {f"avg@{samples}": _score([sum(row) / len(row) for row in rows])}
    for k in pass_at:
        # Rewards are floats, 0.0 or 1.0, and the formula needs a count.
        chances = [pass_at_k(len(row), round(sum(row)), k) for row in rows if len(row) >= k]
        scores[f"pass@{k}"] = _score(chances)
    return scores


def _suite_means(rows: list[list[float]], samples: int) -> dict[str, dict[str, Any]]:
    """The metric of a suite with rewards `(P, k)` that are not only 0 and 1."""
    return {f"{MEAN}{samples}": _score([sum(row) / len(row) for row in rows])}


def _score(values: Sequence[float]) -> dict[str, Any]:
    """Mean over problems, with its standard error."""
    if not values:
        return {"value": None, "stderr": None}
    # Over problems, not over completions: those of one problem are not independent.
    stderr = None
    if len(values) > 1:
        stderr = statistics.stdev(values) / math.sqrt(len(values))
    return {"value": statistics.fmean(values), "stderr": stderr}


def _mean_score(scores: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean over suites."""
    if any(score["value"] is None for score in scores):
        return {"value": None, "stderr": None}
    # Suites are independent, so the squares of their errors add up.
    errors = [score["stderr"] for score in scores]
    stderr = None
    if None not in errors:
        stderr = math.hypot(*errors) / len(errors)
    return {"value": statistics.fmean(score["value"] for score in scores), "stderr": stderr}


def table(summary: Mapping[str, Any]) -> str:
    """
    The summary as text, shares in percent.

    Args:
        summary: From [`summarize`]; each suite has in addition `problems`, `mean_tokens` and `cut_off`.
    """
    metrics = list(summary["mean"])
    rows = [["suite", "problems", *metrics, "tokens", "cut off"]]
    for name, suite in summary["suites"].items():
        scores = [_cell(metric, suite[metric]) for metric in metrics]
        rows.append([name, str(suite["problems"]), *scores, f"{suite['mean_tokens']:.0f}", f"{suite['cut_off']:.1%}"])

    # The mean of a single suite would repeat its row.
    if len(summary["suites"]) > 1:
        scores = [_cell(metric, summary["mean"][metric]) for metric in metrics]
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


def _cell(metric: str, score: Mapping[str, Any]) -> str:
    """A score with its standard error if it has one, shares in percent; "-" where nothing was scored."""
    if score["value"] is None:
        return "-"
    # A mean of any rewards is no share.
    factor, digits = (1, 3) if MEAN in metric else (100, 1)
    text = f"{factor * score['value']:.{digits}f}"
    if score["stderr"] is not None:
        text += f" ± {factor * score['stderr']:.{digits}f}"
    return text
