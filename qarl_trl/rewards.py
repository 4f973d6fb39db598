"""Verifiable rewards for math: is the final answer of a completion equal to the reference?

Every completion, however broken, gets a number, never an exception; `None` ("not scored") if its *reference* is
unreadable.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import partial, update_wrapper
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from .grading import grade
from .processes import Worker


logger = logging.getLogger(__name__)

Reward = Callable[..., list[float | None]]

# Seconds for a batch. An answer mostly takes milliseconds, but 128 of the worst took 11 to 18 minutes.
REWARD_TIMEOUT_S = 120.0
# The answer is at the end; regular expressions over 60 kB of reasoning would cost more than the comparison.
_TAIL_CHARS = 4000
# Limits for the imports of a new process, and for a long call into C code, which the alarm does not stop.
_START_S = 120
_LIMIT_S = 30

# math-verify stops endless symbolic work (`9^{9^{9^9}}`) with SIGALRM, which only a main thread may use. The worker
# runs in a main thread, whatever thread asks. If the alarm does not stop the work, the worker is killed.
_WORKER = Worker()
# The worker of a fork is its parent's.
os.register_at_fork(after_in_child=_WORKER.forget_process)


def load_rewards(names: Sequence[str], reward_timeout: float = REWARD_TIMEOUT_S) -> list[Reward]:
    """
    Load reward functions, in order.

    Args:
        names: `math_reward`, or import paths such as `my_rewards.my_reward`.
        reward_timeout: Seconds that `math_reward` may take for a batch. The other functions have no limit.

    Raises:
        ValueError: if there is none, a name is not found, or there is no time.
    """
    if not names:
        raise ValueError("reward_funcs must name a function, got none: nothing would be learned.")

    if not reward_timeout > 0:
        raise ValueError(f"reward_timeout must be above 0 seconds, got {reward_timeout}.")

    # TRL names the metrics by the function's name, which a partial lacks.
    limited = update_wrapper(partial(math_reward, reward_timeout=reward_timeout), math_reward)
    return [limited if name == "math_reward" else _load_reward(name) for name in names]


def _load_reward(path: str) -> Reward:
    """The function that an import path names."""
    module, _, attribute = path.rpartition(".")
    if os.getcwd() not in sys.path:
        # Last: a file here must not replace an installed package.
        sys.path.append(os.getcwd())

    try:
        reward = getattr(import_module(module), attribute)
        if not callable(reward):
            raise ImportError("it is not a function")
    except (ImportError, AttributeError, ValueError) as error:
        # A ValueError is a name without a dot.
        raise ValueError(
            f"reward_funcs has {path!r}, which cannot be imported: {error}. Give math_reward, or package.function."
        ) from error
    return reward


def math_reward(
    completions: Sequence[Any], answer: Sequence[Any], reward_timeout: float = REWARD_TIMEOUT_S, **kwargs: Any
) -> list[float | None]:
    r"""
    Reward 1.0 for a completion whose final answer equals the reference, else 0.0, judged by math-verify.

    The answer is the last `\boxed{...}`, else the last line `#### 42`, as GSM8K's solutions have it, else the last
    expression announced as the answer ("the answer is 42"). A bare number somewhere in the text does not count. Boxes
    close to each other count as one answer of several parts, so two guesses do not pay; of "the answer is 42 or 43"
    the first counts. Case does not count: `V` passes for `v`. What stands before `</think>` counts only if no answer
    follows it; a tokenizer with a `response_template` takes such thoughts away before.

    ```python
    >>> math_reward([r"So it is $\boxed{\frac{1}{2}}$.", "no idea"], answer=["0.5", "7"])
    [1.0, 0.0]
    ```

    Args:
        completions: Texts or chat messages.
        answer: The references: numbers, text or LaTeX, with or without `$...$` or `\boxed{}`; a list has the parts of
            one answer.
        reward_timeout: Seconds for the whole batch. What is not graded then counts as wrong; a warning says how many.
        kwargs: The other columns of the data, and what else TRL gives to rewards; not used.

    Returns:
        A reward for each completion. `None`, which leaves the sample out, if its reference is unreadable; a warning
        names the first such reference.

    Raises:
        ImportError: if math-verify is missing.
        RuntimeError: if the grader does not start.
    """
    if find_spec("math_verify") is None:
        raise ImportError("math_reward needs the package math-verify. Run `pip install qarl_trl[math]`.")

    # The imports of the other process are no grading.
    _start_worker()
    end = time.monotonic() + reward_timeout
    rewards: list[float | None] = []
    for completion, reference in zip(completions, answer, strict=True):
        try:
            rewards.append(_judge(text_of(completion)[-_TAIL_CHARS:], _reference_text(reference), end))
        except _BatchTimeoutError:
            break

    ungraded = len(completions) - len(rewards)
    if ungraded > 0:
        rewards += [0.0] * ungraded
        logger.warning(
            f"{ungraded} of {len(completions)} answers were not graded within reward_timeout={reward_timeout:g} s, "
            "and count as wrong."
        )

    if None in rewards:
        unreadable = _reference_text(answer[rewards.index(None)])[:200]
        _warn_once(
            "reference", "math-verify cannot read the reference answer %r. Such samples get no reward.", unreadable
        )
    return rewards


def text_of(value: Any) -> str:
    """
    The text of a completion or a reference.

    Args:
        value: A text, a number, one chat message, or several, of which the assistant's last counts: not what a tool
            returned after it. Of messages without roles it is the last.
    """
    if value is None:
        return ""
    if isinstance(value, dict):
        return text_of(value.get("content", value.get("text")))
    if isinstance(value, list | tuple):
        # Join the parts of one message: {"type": "text", "text": ...}. An empty list is a message without parts.
        if all(isinstance(part, dict) and "type" in part for part in value):
            return "".join(text_of(part) for part in value)
        of_assistant = [part for part in value if isinstance(part, dict) and part.get("role") == "assistant"]
        return text_of((of_assistant or value)[-1])
    if isinstance(value, float) and math.isfinite(value):
        # Python writes 0.00001 as 1e-05, in which math-verify reads Euler's number.
        return format(Decimal(str(value)), "f")
    return str(value)


def _reference_text(reference: Any) -> str:
    """The text of a reference; a list, as OlympiadBench has them, is one answer of several parts."""
    is_list = isinstance(reference, list | tuple)
    if is_list and not any(isinstance(part, dict) for part in reference):
        return ", ".join(text_of(part) for part in reference)
    return text_of(reference)


_said: set[str] = set()


def _warn_once(about: str, message: str, argument: Any) -> None:
    """Log a warning, if there was none about this before."""
    if about not in _said:
        _said.add(about)
        logger.warning(f"{message} Said once.", argument)


def _start_worker() -> None:
    """Start the other process. A failure here would repeat in every call, and must not look like wrong answers."""
    if _WORKER.process is None:
        # A first parse loads grammars, for seconds on a busy machine. No answer should pay for that.
        _WORKER.call("math_reward", grade, r"\boxed{1}", "1", limit_s=_START_S)


class _BatchTimeoutError(Exception):
    """The time for the batch is over."""


def _judge(completion: str, reference: str, end: float) -> float | None:
    """The reward of one completion, 0 if the grader fails. [`_BatchTimeoutError`] when the clock reaches `end`."""
    # It was killed, if it failed at the answer before.
    _start_worker()

    remaining_s = end - time.monotonic()
    if remaining_s <= 0:
        raise _BatchTimeoutError
    try:
        return _WORKER.call("math_reward", grade, completion, reference, limit_s=min(_LIMIT_S, remaining_s))
    except Exception as error:
        if isinstance(error, TimeoutError) and remaining_s < _LIMIT_S:
            raise _BatchTimeoutError from error
        _warn_once(type(error).__name__, "The grader failed on an answer, which scored 0: %r", error)
        return 0.0
