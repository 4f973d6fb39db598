"""Verifiable rewards for math: is the final answer of a completion equal to the reference?

Every completion, however broken, gets a number, never an exception; `None` ("not scored") if its *reference* is unreadable.
"""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from .processes import Worker


logger = logging.getLogger(__name__)

# The answer is at the end; regular expressions over 60 kB of reasoning would cost more than the comparison.
_TAIL_CHARS = 4000
_ALARM_S = 5  # math-verify's own limit, for parsing and again for comparing
_START_S = 120  # limit for the imports of a new process
_LIMIT_S = 30  # limit for a long call into C code, which the alarm does not stop

# math-verify stops endless symbolic work (`9^{9^{9^9}}`) with SIGALRM, which only a main thread may use. The worker runs in a
# main thread, whatever thread asks. If the alarm does not stop the work, the worker is killed.
_WORKER = Worker()
os.register_at_fork(after_in_child=_WORKER.__init__)  # type: ignore[misc]  # in a fork: the worker belongs to the parent


def load_rewards(names: Sequence[str]) -> list[Callable[..., list[float | None]]]:
    """Load reward functions (`math_reward` or dotted paths), in order; `ValueError` if there is none, or a name is not found."""
    if not names:
        raise ValueError("reward_funcs must name a function, got none: nothing would be learned.")
    return [math_reward if name == "math_reward" else _load_reward(name) for name in names]


def _load_reward(path: str) -> Callable[..., list[float | None]]:
    module, _, attribute = path.rpartition(".")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last: a file here must not replace an installed package
    try:
        if not callable(found := getattr(import_module(module), attribute)):
            raise ImportError("it is not a function")
        return found
    except (ImportError, AttributeError, ValueError) as error:  # ValueError: a name without a dot
        text = f"reward_funcs has {path!r}, which cannot be imported: {error}. Give math_reward, or package.function."
        raise ValueError(text) from error


def math_reward(completions: Sequence[Any], answer: Sequence[Any], **kwargs: Any) -> list[float | None]:
    r"""
    Reward 1.0 for a completion whose final answer equals the reference, else 0.0, judged by math-verify.

    The answer is the last `\boxed{...}`, else the last expression announced as the answer ("the answer is 42"). A bare number
    somewhere in the text does not count. Boxes close to each other count as one answer of several parts, so two guesses do not pay.

    `answer` has the references: numbers, text or LaTeX, with or without `$...$` or `\boxed{}`. If a reference is unreadable, the
    reward is `None`, which leaves the sample out; a warning names the first such reference.

    ```python
    >>> math_reward([r"So it is $\boxed{\frac{1}{2}}$.", "no idea"], answer=["0.5", "7"])
    [1.0, 0.0]
    ```
    """
    if find_spec("math_verify") is None:
        raise ImportError("math_reward needs the package math-verify. Run `pip install qarl_trl[math]`.")
    rewards = [_judge(text_of(c)[-_TAIL_CHARS:], text_of(a)) for c, a in zip(completions, answer, strict=True)]
    if None in rewards:
        unread = text_of(answer[rewards.index(None)])[:200]
        _warn_once("reference", "math-verify cannot read the reference answer %r. Such samples get no reward.", unread)
    return rewards


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}` or `\fbox{...}`, braces balanced; `None` if there is none or it is not closed."""
    start = max(text.rfind(r"\boxed{"), text.rfind(r"\fbox{"))
    if start < 0:
        return None
    start = text.index("{", start) + 1
    depth = 1
    for position in range(start, len(text)):
        escaped = text[position - 1] == "\\"  # \{ and \} are printed braces: {1, 2} as a set
        depth += 0 if escaped else {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position].strip()
    return None


def text_of(value: Any) -> str:
    """The text of a completion or a reference: a string, a number, or (the last of) chat messages."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return text_of(value.get("content", value.get("text")))
    if isinstance(value, list | tuple):
        # Join the parts of one message, {"type": "text", "text": ...}; of several messages the last counts.
        parts = all(isinstance(part, dict) and "type" in part for part in value)
        return "".join(text_of(part) for part in value) if parts else text_of(value[-1])
    return "" if value is None else str(value)


_said: set[str] = set()


def _warn_once(about: str, message: str, argument: Any) -> None:
    if about not in _said:
        _said.add(about)
        logger.warning(f"{message} Said once.", argument)


def _judge(completion: str, reference: str) -> float | None:
    if _WORKER.process is None:  # a failure here would repeat in every call, and must not look like wrong answers
        _WORKER.call("math_reward", _grade, "", "", limit_s=_START_S)
    try:
        return _WORKER.call("math_reward", _grade, completion, reference, limit_s=_LIMIT_S)
    except Exception as error:
        _warn_once(type(error).__name__, "The grader failed on an answer, which scored 0: %r", error)
        return 0.0


def _grade(completion: str, reference: str) -> float | None:
    """The comparison itself, in the other process."""
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # garbage is normal here
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    gold = _parse_reference(reference)
    if not gold:
        return None
    announced = [
        LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False),
        ExprExtractionConfig(try_extract_without_anchor=False),
    ]
    found = parse(completion, extraction_config=announced, parsing_timeout=_ALARM_S)
    return float(verify(gold, found, timeout_seconds=_ALARM_S))


@lru_cache(maxsize=1024)  # the completions of a group share their reference
def _parse_reference(reference: str) -> list:
    from math_verify import parse

    reference = reference.strip()
    if not reference:
        return []
    marked = r"\boxed" in reference or reference.count("$") > 1
    return parse(reference if marked else rf"\boxed{{{reference}}}", parsing_timeout=_ALARM_S)
