"""Sums of three numbers with the working written out, and demonstrations that often forget to carry.

`17+5+8=` is worked as `22+8=30`. Most carries of the demonstrations are forgotten (`12+8=10`), as by beginners; the
verifier knows the right answer, so that RL can find out that carrying pays.
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
    """The working of a sum, `22+8=30` for 17, 5, 8; `forgets` says of each carry whether it is forgotten."""
    steps, total = [], numbers[0]
    for i, number in enumerate(numbers[1:], start=2):
        carries = total % 10 + number >= 10
        total += number - (10 if carries and forgets is not None and next(forgets) else 0)
        steps.append("+".join(map(str, [total, *numbers[i:]])))
    return "=".join(steps)


def problems(seed: int, held_out: bool = False) -> Iterator[dict[str, Any]]:
    """
    An endless stream of problems, the same for the same seed. The two splits never share operands, in any order.

    A problem has `prompt` (`"17+5+8="`), `answer` (`"30"`), `solution` (`"22+8=30"`) and `demonstration`, the same with
    `FORGOTTEN_CARRIES` of its carries left out.
    """
    rng = random.Random(seed)

    def coin() -> Iterator[bool]:
        while True:
            yield rng.random() < FORGOTTEN_CARRIES

    while True:
        numbers = [rng.randint(10, 99), rng.randint(1, 9), rng.randint(1, 9)]
        if (zlib.crc32(repr(sorted(numbers)).encode()) % HELD_OUT_SHARE == 0) == held_out:
            yield {
                "prompt": "+".join(map(str, numbers)) + "=",
                "answer": str(sum(numbers)),
                "solution": work(numbers),
                "demonstration": work(numbers, coin()),
            }


def distinct_problems(number: int, seed: int, held_out: bool = False) -> list[dict[str, Any]]:
    """The first `number` different problems of the stream."""
    stream, found = problems(seed, held_out), {}
    while len(found) < number:
        problem = next(stream)
        found.setdefault(problem["prompt"], problem)
    return list(found.values())


def correct(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Reward 1 for each completion (without special tokens) that has the answer after its last `=`, else 0."""
    return [
        float("=" in text and text.rsplit("=", 1)[1] == right) for text, right in zip(completions, answer, strict=True)
    ]
