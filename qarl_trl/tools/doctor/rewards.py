"""Does a reward tell right answers from wrong ones? Asked with the data's own answers, and with those of other rows."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from . import FAIL, OK, SKIPPED, WARN, Finding


# How an answer may be written in a completion; the first that a reward tells apart counts.
FORMS = {"boxed": r"The answer is $\boxed{{{}}}$.", "bare": "{}"}


def rotated(answers: Sequence[str]) -> list[str]:
    """For each answer the next one that differs: the wrong answers look like the right ones. Of equal ones, themselves."""
    n = len(answers)
    return [
        next((answers[(i + k) % n] for k in range(1, n) if answers[(i + k) % n] != a), a)
        for i, a in enumerate(answers)
    ]


def check_reward(name: str, reward: Callable[..., Any], rows: Sequence[dict[str, Any]]) -> Finding:
    """Mean reward of right and of wrong answers to `rows`, with the columns `prompt` and `answer`."""
    answers = [row["answer"] for row in rows]
    wrong = rotated(answers)
    if wrong == answers:
        return Finding(SKIPPED, name, "not checked: all answers are the same")
    seen = []
    for form, template in FORMS.items():
        try:
            right, other = (_score(reward, rows, [template.format(t) for t in texts]) for texts in (answers, wrong))
        except Exception as error:  # whatever a user's function raises
            return Finding(FAIL, name, f"raised {type(error).__name__}: {error}")
        told = sum(a > b for a, b in zip(right, other, strict=True))
        inverted = sum(a < b for a, b in zip(right, other, strict=True))
        means = (fmean([x for x in scores if not math.isnan(x)] or [math.nan]) for scores in (right, other))
        seen.append((told, inverted, form, *means))
    told, inverted, form, mean_right, mean_other = max(seen, key=lambda row: row[0] + row[1])
    text = f"right answers {mean_right:.2f}, wrong ones {mean_other:.2f}; told apart in {told} of {len(rows)} rows ({form})"
    if inverted > told:
        return Finding(FAIL, name, f"{text}: in {inverted} the wrong answer pays more")
    if told < 0.9 * sum(a != b for a, b in zip(answers, wrong, strict=True)):
        return Finding(WARN, name, f"{text}. It judges something else (a format?), or cannot read the other answers")
    return Finding(OK, name, text)


def _score(reward: Callable[..., Any], rows: Sequence[dict[str, Any]], texts: Sequence[str]) -> list[float]:
    """Called as TRL calls it; NaN, which is neither more nor less than another, for no reward (`None`)."""
    conversational = not isinstance(rows[0]["prompt"], str)
    completions = [[{"role": "assistant", "content": text}] if conversational else text for text in texts]
    columns = {key: [row[key] for row in rows] for key in rows[0] if key != "prompt"}
    prompts = [row["prompt"] for row in rows]
    hooks = {"trainer_state": None, "log_extra": lambda *_: None, "log_metric": lambda *_: None}
    ids = [list(text.encode()) for text in texts]
    scores = reward(prompts=prompts, completions=completions, completion_ids=ids, **columns, **hooks)
    if inspect.iscoroutine(scores):
        scores = asyncio.run(scores)
    return [math.nan if score is None else float(score) for score in scores]
