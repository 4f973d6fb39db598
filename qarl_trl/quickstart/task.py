"""Chains of additions and multiplications, with or without the working written out.

A prompt `3*8+5*9+4*7:` is worked from left to right, of every result only the last digit is kept, and the last of them is
the answer. It may be given at once, `=1`, or with the results before it first, `4,9,1,5=5`. A small model is seldom right at
once and nearly always right step by step, so reinforcement learning has something to find. Invariant: training and held-out
problems never share their operands, in any order.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from typing import Any


CHARACTERS = "0123456789+*=,:"
TERMS = 6
HELD_OUT_SHARE = 5  # one problem in so many


def results(digits: list[int], operators: str) -> list[int]:
    """The last digit after each operation, from left to right: 3*8+5 gives [4, 9]."""
    found, current = [], digits[0]
    for operator, digit in zip(operators, digits[1:], strict=True):
        current = (current + digit if operator == "+" else current * digit) % 10
        found.append(current)
    return found


def is_held_out(digits: list[int]) -> bool:
    """Whether a problem belongs to the held-out split; the order of its operands does not matter."""
    return zlib.crc32(repr(sorted(digits)).encode()) % HELD_OUT_SHARE == 0


def problems(seed: int, held_out: bool = False) -> Iterator[dict[str, Any]]:
    """
    An endless stream of problems.

    Args:
        seed (`int`): Same seed, same stream.
        held_out (`bool`, *optional*, defaults to `False`): Which split.

    Yields:
        `dict`: `prompt` (`"3*8+5*9+4*7:"`), `answer` (`"1"`), `working` and `direct`, two right completions.
    """
    rng = random.Random(seed)
    while True:
        digits = [rng.randint(1, 9) for _ in range(TERMS)]
        operators = "".join(rng.choice("+*") for _ in digits[1:])
        if is_held_out(digits) == held_out:
            *steps, answer = map(str, results(digits, operators))
            prompt = str(digits[0]) + "".join(f"{o}{d}" for o, d in zip(operators, digits[1:], strict=True)) + ":"
            yield {
                "prompt": prompt,
                "answer": answer,
                "working": ",".join(steps) + "=" + answer,
                "direct": "=" + answer,
            }


def distinct_problems(number: int, seed: int, held_out: bool = False) -> list[dict[str, Any]]:
    """The first `number` different problems of the stream."""
    found: dict[str, dict[str, Any]] = {}
    for problem in problems(seed, held_out):
        found.setdefault(problem["prompt"], problem)
        if len(found) == number:
            return list(found.values())
    raise AssertionError("the stream has no end")


def correct(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """
    Reward: 1 when what follows the last `=` is the answer, otherwise 0.

    Args:
        completions (`list[str]`): Completions without special tokens.
        answer (`list[str]`): One answer each.
    """
    return [
        float("=" in text and text.rsplit("=", 1)[1] == right) for text, right in zip(completions, answer, strict=True)
    ]
