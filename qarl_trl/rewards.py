"""
Verifiable rewards for math: is the final answer of a completion equal to the reference?

math-verify does the comparison. It guards itself against endless symbolic work (`9^{9^{9^9}}`) with SIGALRM, which
only a main thread may use, so the comparisons run in a small worker process whose main thread is theirs alone: the
rewards can be called from any thread, and a comparison that the alarm does not stop is killed with its process.

Invariant: a completion, however broken, gets a number and never an exception. `None` ("not scored" to TRL) is kept for
samples whose *reference* cannot be read.
"""

import json
import logging
import os
import select
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any


logger = logging.getLogger(__name__)

# The answer stands at the end; regular expressions over 60 kB of reasoning would cost more than the comparison.
_TAIL_CHARS = 4000
_ALARM_S = 5  # math-verify's own limit, for parsing and again for comparing
_KILL_S = 30  # for what the alarm does not stop: one long call into C code
_START_S = 120  # the worker imports sympy


def math_reward(completions: Sequence[Any], answer: Sequence[Any], **kwargs: Any) -> list[float | None]:
    r"""
    Reward 1.0 for a completion whose final answer equals the reference, else 0.0, judged by math-verify.

    The answer is the last `\boxed{...}`, else the last LaTeX or plain expression announced as the answer ("the answer
    is 42"). A bare number somewhere in the text does not count. Boxes close to each other are one answer of several
    parts, so boxing two guesses does not pay.

    Args:
        completions (`list[str]` or `list[list[dict]]`):
            Completions as TRL passes them, plain or conversational. Of a conversation the last message is read.
        answer (`list`):
            Reference of each completion: a number, text or LaTeX, with or without `$...$` or `\boxed{}`.
        **kwargs:
            The other dataset columns, unused.

    Returns:
        `list[float | None]`: 1.0, 0.0, or `None` where the reference cannot be read, which leaves the sample out of
        the reward. The first such reference is named in a warning.

    Raises:
        ImportError: If math-verify is not installed.

    Example:
    ```python
    >>> math_reward([r"So it is $\boxed{\frac{1}{2}}$.", "no idea"], answer=["0.5", "7"])
    [1.0, 0.0]
    ```
    """
    _require_math_verify()
    rewards = [_WORKER.grade(_text(c)[-_TAIL_CHARS:], _text(a)) for c, a in zip(completions, answer, strict=True)]
    for reward, reference in zip(rewards, answer, strict=True):
        if reward is None:
            _warn_unreadable(_text(reference))
            break
    return rewards


def boxed_format_reward(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    r"""
    Reward 1.0 for a completion that ends in an answer box: a `\boxed{...}` that is not empty and is closed.

    Args:
        completions (`list[str]` or `list[list[dict]]`):
            Completions as TRL passes them, plain or conversational.
        **kwargs:
            The dataset columns, unused.

    Returns:
        `list[float]`: 1.0 or 0.0 per completion.
    """
    return [float(bool(last_boxed(_text(completion)))) for completion in completions]


def last_boxed(text: str) -> str | None:
    r"""
    Content of the last `\boxed{...}` (or `\fbox{...}`) in `text`, braces balanced.

    Args:
        text (`str`):
            Any text.

    Returns:
        `str` or `None`: The content, stripped; `None` without a box, or if the last one is not closed.
    """
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


def _text(value: Any) -> str:
    """The text of a completion or a reference: a string, a number, or (the last of) chat messages."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return _text(value.get("content", value.get("text")))
    if isinstance(value, list | tuple):
        # Parts of one message, {"type": "text", "text": ...}, belong together; of several messages the last counts.
        parts = all(isinstance(part, dict) and "type" in part for part in value)
        return "".join(_text(part) for part in value) if parts else _text(value[-1])
    return "" if value is None else str(value)


_warned = False


def _warn_unreadable(reference: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        logger.warning(
            "math-verify cannot read the reference answer %r. Such samples get no reward (None) and teach nothing; "
            "clean the dataset, or name its answer column. Said once.",
            reference[:200],
        )


def _require_math_verify() -> None:
    try:
        import math_verify  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "math_reward needs the package math-verify, which is not installed. Run `pip install qarl_trl[math]`."
        ) from error


class _Worker:
    """The parent's end: one worker process, started at first use and again after it had to be killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._owner: int | None = None

    def grade(self, completion: str, reference: str) -> float | None:
        with self._lock:
            if self._process is None or self._owner != os.getpid():  # a fork must not share its parent's pipes
                self._start()
            try:
                return self._ask([completion, reference], _KILL_S)
            except (TimeoutError, EOFError, BrokenPipeError):
                self._process.kill()
                self._process.wait()
                self._process = None
                return 0.0

    def _start(self) -> None:
        # -P: the folder of this file holds names like `config` and `data`, which must not shadow other modules.
        command = [sys.executable, "-P", os.path.abspath(__file__)]
        # A session of its own, so that Ctrl-C reaches the trainer only; the closed pipe ends the worker.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._owner = os.getpid()
        try:
            self._ask(["", ""], _START_S)
        except (TimeoutError, EOFError, BrokenPipeError) as error:
            self._process.kill()
            self._process = None
            raise RuntimeError(
                f"The math-verify worker did not answer within {_START_S} s of its start ({' '.join(command)}). "
                "Run that command by hand: its error message says why."
            ) from error

    def _ask(self, request: list[str], limit_s: float) -> float | None:
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], limit_s)[0]:
            raise TimeoutError
        line = self._process.stdout.readline()
        if not line:
            raise EOFError
        return json.loads(line)


_WORKER = _Worker()


def _grade(completion: str, reference: str) -> float | None:
    """The comparison itself, in the worker process."""
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


def _serve() -> None:
    """Answer one JSON request a line until the parent closes the pipe."""
    # Whatever a library prints must not land between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # garbage is normal here
    reported: set[type[Exception]] = set()
    for line in sys.stdin:
        try:
            reward = _grade(*json.loads(line))
        except Exception as error:
            # Garbage is no answer; but a grader that fails on everything must not look like a model that is always wrong.
            reward = 0.0
            if type(error) not in reported:
                reported.add(type(error))
                print(f"math_reward: the grader failed and scored 0: {error!r}", file=sys.stderr, flush=True)
        answers.write(json.dumps(reward) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
