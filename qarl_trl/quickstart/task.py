"""Sums of three numbers with the working written out, and demonstrations that often forget to carry.

A prompt `17+5+8=` is worked as `22+8=30`: the first two numbers become their sum, and so on. In the demonstrations of the
supervised phase most carries are forgotten (`12+8=10`), as beginners do; the verifier knows the right answer, so
reinforcement learning can find out that carrying pays. Invariant: training and held-out problems never share their operands,
in any order.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from typing import Any


CHARACTERS = "0123456789+="
FORGOTTEN_CARRIES = 0.6
HELD_OUT_SHARE = 5  # one problem in so many


def work(numbers: list[int], forgets: Iterator[bool] | None = None) -> str:
    """
    The working of a sum, `22+8=30` for 17, 5, 8.

    Args:
        numbers (`list[int]`): A two-digit number, then digits.
        forgets (`Iterator[bool]`, *optional*): For each addition that carries: whether the carry is forgotten.
    """
    steps, total = [], numbers[0]
    for i, number in enumerate(numbers[1:], start=2):
        carries = total % 10 + number >= 10
        total += number - (10 if carries and forgets is not None and next(forgets) else 0)
        steps.append("+".join(map(str, [total, *numbers[i:]])))
    return "=".join(steps)


def is_held_out(numbers: list[int]) -> bool:
    """Whether a problem belongs to the held-out split; the order of its operands does not matter."""
    return zlib.crc32(repr(sorted(numbers)).encode()) % HELD_OUT_SHARE == 0


def problems(seed: int, held_out: bool = False) -> Iterator[dict[str, Any]]:
    """
    An endless stream of problems.

    Args:
        seed (`int`): Same seed, same stream.
        held_out (`bool`, *optional*, defaults to `False`): Which split.

    Yields:
        `dict`: `prompt` (`"17+5+8="`), `answer` (`"30"`), `solution` (`"22+8=30"`) and `demonstration`, the same with
        `FORGOTTEN_CARRIES` of its carries left out.
    """
    rng = random.Random(seed)

    def coin() -> Iterator[bool]:
        while True:
            yield rng.random() < FORGOTTEN_CARRIES

    while True:
        numbers = [rng.randint(10, 99), rng.randint(1, 9), rng.randint(1, 9)]
        if is_held_out(numbers) == held_out:
            yield {
                "prompt": "+".join(map(str, numbers)) + "=",
                "answer": str(sum(numbers)),
                "solution": work(numbers),
                "demonstration": work(numbers, coin()),
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
