"""Does a reward tell right answers from wrong ones? Test it with each row's own answer and with that of another row."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import FAIL, OK, SKIPPED, WARN, Finding


ROWS = 32


def check_reward(reward: Callable[..., Any], dataset: Sequence[dict[str, Any]]) -> Finding:
    """Compare the rewards of right and wrong boxed answers to the first rows, which have the columns `prompt` and `answer`."""
    name = getattr(reward, "__name__", str(reward))
    first = [dataset[i] for i in range(min(ROWS, len(dataset)))]
    # The answer of the next row is wrong, and looks like the right one.
    pairs = [(a, b) for a, b in zip(first, [*first[1:], first[0]], strict=True) if a["answer"] != b["answer"]]
    if not pairs:
        return Finding(SKIPPED, name, "not checked: all answers are the same")
    rows = [row for row, _ in pairs]
    try:
        right, wrong = (_score(reward, rows, [pair[i]["answer"] for pair in pairs]) for i in (0, 1))
    except Exception as error:  # any error of a user's function
        return Finding(FAIL, name, f"raised {type(error).__name__}: {error}")
    told, inverted = int((right > wrong).sum()), int((right < wrong).sum())
    means = f"right answers {right.nanmean():.2f}, wrong ones {wrong.nanmean():.2f}"
    text = f"{means}; told apart in {told} of {len(rows)} rows, first answer {rows[0]['answer'][:60]!r}"
    if inverted > told:
        return Finding(FAIL, name, f"{text}: in {inverted} the wrong answer pays more")
    if told < 0.9 * len(rows):
        return Finding(WARN, name, rf"{text}. It judges something else (a format?), or cannot read \boxed{{...}}")
    return Finding(OK, name, text)


def _score(reward: Callable[..., Any], rows: Sequence[dict[str, Any]], answers: Sequence[str]) -> Tensor:
    """Call the reward as TRL does: `(rows,)`, with NaN for `None`, because NaN is neither above nor below another reward."""
    texts = [rf"The answer is $\boxed{{{answer}}}$." for answer in answers]
    conversational = not isinstance(rows[0]["prompt"], str)
    completions = [[{"role": "assistant", "content": text}] if conversational else text for text in texts]
    columns = {key: [row[key] for row in rows] for key in rows[0] if key != "prompt"}
    prompts = [row["prompt"] for row in rows]
    hooks = {"trainer_state": None, "log_extra": lambda *_: None, "log_metric": lambda *_: None}
    ids = [list(text.encode()) for text in texts]
    scores = reward(prompts=prompts, completions=completions, completion_ids=ids, **columns, **hooks)
    if inspect.iscoroutine(scores):
        scores = asyncio.run(scores)
    return torch.tensor([math.nan if score is None else score for score in scores])
