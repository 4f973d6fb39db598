"""Does a reward tell right answers from wrong ones? Test it with each row's answer and with that of another row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ..evaluate.grade import call_reward
from . import FAIL, OK, SKIPPED, WARN, CheckResult


ROWS = 32
# A reward that tells fewer of the answers apart gets a warning.
SHARE_TOLD_APART = 0.9


def check_rewards(rewards: Sequence[Callable[..., Any]], dataset: Sequence[dict[str, Any]]) -> Iterator[CheckResult]:
    """Yield the result of [`check_reward`] for each reward function."""
    for reward in rewards:
        yield check_reward(reward, dataset)


def check_reward(reward: Callable[..., Any], dataset: Sequence[dict[str, Any]]) -> CheckResult:
    r"""
    Compare the rewards of right and wrong `\boxed{}` answers to the first rows of a dataset.

    A reward that pays more for wrong answers fails, one that often does not tell them apart gets a warning.

    Args:
        reward: A reward function as TRL takes it, also an async one.
        dataset: Rows with the columns `prompt` and `answer`.
    """
    name = getattr(reward, "__name__", str(reward))
    first_rows = list(islice(dataset, ROWS))

    # The answer of the next row is wrong, and looks like the right one.
    next_rows = [*first_rows[1:], first_rows[0]]
    rows = []
    right_answers = []
    wrong_answers = []
    for row, next_row in zip(first_rows, next_rows, strict=True):
        if row["answer"] != next_row["answer"]:
            rows.append(row)
            right_answers.append(row["answer"])
            wrong_answers.append(next_row["answer"])
    if not rows:
        return CheckResult(SKIPPED, name, "not checked: all answers are the same")

    try:
        right = _score(reward, rows, right_answers)
        wrong = _score(reward, rows, wrong_answers)
    except Exception as error:  # any error of a user's function
        return CheckResult(FAIL, name, f"raised {type(error).__name__}: {error}")

    told_apart = int((right > wrong).sum())
    inverted = int((right < wrong).sum())
    text = (
        f"right answers {right.nanmean():.2f}, wrong ones {wrong.nanmean():.2f}; "
        f"told apart in {told_apart} of {len(rows)} rows, first answer {right_answers[0][:60]!r}"
    )

    if inverted > told_apart:
        return CheckResult(FAIL, name, f"{text}: in {inverted} the wrong answer pays more")
    if told_apart < SHARE_TOLD_APART * len(rows):
        return CheckResult(WARN, name, rf"{text}. It judges something else (a format?), or cannot read \boxed{{...}}")
    return CheckResult(OK, name, text)


def _score(reward: Callable[..., Any], rows: Sequence[dict[str, Any]], answers: Sequence[str]) -> Tensor:
    """The rewards `(rows,)` for completions with these answers, NaN for `None`."""
    texts = [rf"The answer is $\boxed{{{answer}}}$." for answer in answers]

    # TRL gives a reward all columns of the dataset.
    columns = {}
    for key in rows[0]:
        if key != "prompt":
            columns[key] = [row[key] for row in rows]

    scores = call_reward(
        reward,
        prompts=[row["prompt"] for row in rows],
        answers=texts,
        # The bytes stand for token ids: the model's tokenizer may not be on this machine.
        completion_ids=[list(text.encode()) for text in texts],
        **columns,
        trainer_state=None,
        log_extra=lambda *_: None,
        log_metric=lambda *_: None,
    )

    # NaN is neither above nor below another reward, so a row that was not scored counts as not told apart.
    return torch.tensor([math.nan if score is None else score for score in scores])
