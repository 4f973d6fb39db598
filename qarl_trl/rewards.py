"""Verifiable rewards for math: is the final answer of a completion equal to the reference?

Every completion, however broken, gets a number, never an exception; `None` ("not scored") if its *reference* is
unreadable.
"""

from __future__ import annotations

import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import lru_cache, partial, update_wrapper
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from typing import Any

from .boxes import has_box_before, last_box, last_boxes, places_of_parts
from .processes import Worker


logger = logging.getLogger(__name__)

Reward = Callable[..., list[float | None]]

# Seconds for a batch. An answer mostly takes milliseconds, but 128 of the worst took 11 to 18 minutes.
REWARD_TIMEOUT_S = 120.0
# The answer is at the end; regular expressions over 60 kB of reasoning would cost more than the comparison.
_TAIL_CHARS = 4000
# Emphasis of Markdown: **42** or `42`, as a word of its own. Not the signs of 2**3 or (1+2)*(3+4)*(5+6), which touch
# what they multiply; *42* is left as it is, because 2 *3* 4 is a product.
_EMPHASIS = re.compile(r"(?<![^\s(])(\*\*|`)(?=\S)([^*`\n]+?)(?<=\S)\1(?![^\s.,;:!?)])")
# What math-verify reads otherwise than a person does. A text that has any of these is read as it is, and without.
# 4.5e33, which would be Euler's number times 33: Minerva writes a fifth of its answers so.
_E_NOTATION = re.compile(r"(?<![\w.\\])(\d+\.?\d*|\.\d+)[eE]([-+]?\d{1,3})(?!\w|\.\d)")
# \$18, as Markdown has it; in LaTeX the same dollar sign.
_ESCAPED_DOLLAR = re.compile(r"(?<!\\)\\\$\s*(?=[\d.])")
# 58,500 in LaTeX and out of it, unless it is in brackets: (2,100) is a pair.
_SEPARATOR = r"(?:,|\{,\}|\\[,; ])"
_THOUSANDS = re.compile(rf"(?<![\d.,])[1-9]\d{{0,2}}(?:{_SEPARATOR}\d{{3}})+(?!\d|{_SEPARATOR}\d)")
_START_OF_FORMULA = re.compile(r"\n|\\boxed\{|\$|\\[(\[]")
_OPENING = re.compile(r"[(\[]|\\\{|\\langle")
_CLOSING = re.compile(r"[)\]]|\\\}|\\rangle")
# \boxed{18.}, where the sentence ends in the box.
_STOP_IN_BRACES = re.compile(r"(?<=[\w)\]}%$])\s*[.,;]\s*(?=\})")
_FINAL_ANSWER = "final answer is"
_END_OF_THOUGHTS = "</think>"
# The last line of GSM8K's solutions. A heading, such as "#### 2. Add", is none.
_LAST_LINE_OF_GSM8K = re.compile(r"(?:\A|\n)####[ \t]*([-\N{MINUS SIGN}]?\$?[-\N{MINUS SIGN}]?[\d,.]*\d%?)\.?\s*\Z")
# What sets words in a formula, and spaces of LaTeX.
_SET_AS_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\{([^{}]*)\}")
_SPACES = re.compile(r"(?:\s|~|\\[ ,;!])+")
# Numbers and formulas of commands alone are for math-verify to compare.
_LETTER = re.compile(r"(?<![\\a-zA-Z])[^\W\d_]")
_DATE = re.compile(r"(?<!\d)\d{4}-\d\d-\d\d(?!\d)")
# math-verify compares floats to six places, in which numbers below this have no three digits left.
_TINY = 1e-3
_FEWEST_DIGITS = 3
# math-verify's own limit, for parsing and again for comparing.
_ALARM_S = 5
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
    close to each other count as one answer of several parts, so two guesses do not pay. What stands before `</think>`
    counts only if no answer follows it.

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
        value: A text, a number, one chat message, or several, of which the last counts.
    """
    if value is None:
        return ""
    if isinstance(value, dict):
        return text_of(value.get("content", value.get("text")))
    if isinstance(value, list | tuple):
        # Join the parts of one message: {"type": "text", "text": ...}. An empty list is a message without parts.
        if all(isinstance(part, dict) and "type" in part for part in value):
            return "".join(text_of(part) for part in value)
        return text_of(value[-1])
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
        _WORKER.call("math_reward", _grade, "", "", limit_s=_START_S)


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
        return _WORKER.call("math_reward", _grade, completion, reference, limit_s=min(_LIMIT_S, remaining_s))
    except Exception as error:
        if isinstance(error, TimeoutError) and remaining_s < _LIMIT_S:
            raise _BatchTimeoutError from error
        _warn_once(type(error).__name__, "The grader failed on an answer, which scored 0: %r", error)
        return 0.0


def _grade(completion: str, reference: str) -> float | None:
    """The comparison itself, in the other process."""
    # Garbage is normal here.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    from math_verify import verify

    _, has_thoughts, rest = completion.rpartition(_END_OF_THOUGHTS)

    # math-verify subtracts: 2024-01-05 would be 2018.
    if _DATE.fullmatch(reference.strip()):
        return float((_last_date(rest) or _last_date(completion)) == reference.strip())

    gold = _parse_reference(reference)
    if not gold:
        return None

    rest = _with_last_line_in_box(rest)
    if not has_thoughts or last_box(rest) or _announced_in(rest):
        completion = rest
    # math-verify tells words in a formula from the same words out of it: \text{not enough} from "not enough".
    words = _boxed_words(completion)
    if words and words == (_boxed_words(reference) if last_box(reference) else _plain(reference)):
        return 1.0

    for expected, answer in product(gold, _announced_in(completion)):
        is_equal = verify(expected, answer, timeout_seconds=_ALARM_S)
        if is_equal and not _are_different_tiny_numbers(expected, answer):
            return 1.0
    return 0.0


def _announced_in(completion: str) -> list:
    """The expressions that a completion has in a box or announces as its answer, of all its readings."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    announced = [
        LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False),
        ExprExtractionConfig(try_extract_without_anchor=False),
    ]
    # math-verify finds no number in "The answer is **42**.", the way in which chat models write.
    plain = _EMPHASIS.sub(r"\2", completion)
    expressions = []
    for text in _readings(_with_parts_in_one_box(plain)):
        expressions += parse(text, extraction_config=announced, parsing_timeout=_ALARM_S)
    return expressions


def _with_last_line_in_box(completion: str) -> str:
    """The number of a last line `#### 42` in a box, if the completion has none; else the completion as it is."""
    line = _LAST_LINE_OF_GSM8K.search(_EMPHASIS.sub(r"\2", completion))
    if line is None or last_box(completion):
        return completion
    return rf"\boxed{{{line[1].replace('$', '')}}}"


def _last_date(completion: str) -> str | None:
    """What the last box holds, or without a box the last date of the text; `None` without both."""
    place = last_box(completion)
    if place is not None:
        _, start, end = place
        return _plain(completion[start:end]).rstrip(".")
    dates = _DATE.findall(completion)
    return dates[-1] if dates else None


def _readings(text: str) -> list[str]:
    """A text, and the same as a person reads it, if math-verify reads that otherwise."""
    read = text.replace("\N{MINUS SIGN}", "-")
    read = _ESCAPED_DOLLAR.sub("", read)
    read = _THOUSANDS.sub(_without_separators, read)
    read = _STOP_IN_BRACES.sub("", read)
    read = _E_NOTATION.sub(lambda number: format(Decimal(number[0]), "f"), read)
    return [text] if read == text else [text, read]


def _with_parts_in_one_box(text: str) -> str:
    r"""
    The parts of an answer in one box, and nothing else; a text without several as it is.

    Of "$\boxed{2}$, and $\boxed{4}$" math-verify reads the last one alone. Both readings would be two guesses.
    """
    text_without_stops = _STOP_IN_BRACES.sub("", text)
    places = places_of_parts(text_without_stops)
    # What joins the others to one before them is unknown here, and math-verify may know.
    if len(places) < 2 or has_box_before(text_without_stops, places[0][0]):
        return text
    return rf"\boxed{{{', '.join(last_boxes(text_without_stops))}}}"


def _boxed_words(text: str) -> str | None:
    """The last box as plain words, to be compared letter by letter; `None` if another answer stands near it."""
    place = last_box(text)
    if place is None:
        return None
    begin, start, end = place
    # The two would be parts of one answer, or two guesses.
    if has_box_before(text, begin):
        return None
    # math-verify takes what comes after these words, and not the box.
    if _FINAL_ANSWER in text[end:].casefold():
        return None
    words = _plain(text[start:end])
    return words if _LETTER.search(words) else None


def _plain(answer: str) -> str:
    """An answer as plain words: without LaTeX's commands for text, and with single spaces."""
    words = _SET_AS_TEXT.sub(r"\1", answer.replace("$", " "))
    return _SPACES.sub(" ", words).strip().casefold()


def _without_separators(number: re.Match) -> str:
    """A number with thousands separators without them; in brackets as it is."""
    before = _START_OF_FORMULA.split(number.string[: number.start()])[-1]
    if len(_OPENING.findall(before)) > len(_CLOSING.findall(before)):
        return number[0]
    return re.sub(_SEPARATOR, "", number[0])


def _are_different_tiny_numbers(expected: Any, answer: Any) -> bool:
    """Whether two expressions are numbers, the first near 0, and differ in the digits that both have."""
    reference = _value_of(expected)
    value = _value_of(answer)
    if reference is None or value is None or not 0 < abs(reference) < _TINY:
        return False
    # 1/3000 is 0.000333.
    decimals = max(_FEWEST_DIGITS, min(_digits_of(reference), _digits_of(value))) - 1
    return f"{reference:.{decimals}e}" != f"{value:.{decimals}e}"


def _digits_of(value: float) -> int:
    """How many significant digits a number has, of the first twelve, which arithmetic leaves exact."""
    mantissa, _, _ = f"{abs(value):.11e}".partition("e")
    return len(mantissa.rstrip("0").replace(".", ""))


def _value_of(expression: Any) -> float | None:
    """The value of an expression of math-verify, or of the right side of an equation; `None` if it is no number."""
    expression = getattr(expression, "rhs", expression)
    if not getattr(expression, "is_number", False):
        return None
    try:
        return float(expression.evalf())
    except (TypeError, ValueError, OverflowError):  # a complex number
        return None


# The completions of a group share their reference.
@lru_cache(maxsize=1024)
def _parse_reference(reference: str) -> list:
    """The expressions in a reference, of all its readings."""
    from math_verify import parse

    reference = reference.strip()
    if not reference:
        return []

    # math-verify reads LaTeX only where it is marked.
    is_marked = r"\boxed" in reference or reference.count("$") > 1
    if not is_marked:
        reference = rf"\boxed{{{reference}}}"

    # As a product, too: math-verify does not take 870000000 for 8.7 times 10^8, which is no whole number for it.
    as_product = _E_NOTATION.sub(r"\1 \\times 10^{\2}", reference)
    expressions = []
    for text in dict.fromkeys([*_readings(reference), as_product]):
        expressions += parse(text, parsing_timeout=_ALARM_S)
    return expressions
