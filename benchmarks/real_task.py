"""Word problems of one step with any numbers, for real_arms.py: `python benchmarks/real_task.py FOLDER` writes them.

SVAMP was tried first (dev/log.md): its problems are too hard for 135 million weights to gain much in minutes.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path


NAMES = ("Anna", "Tom", "Lucy", "Ben", "Mary", "Sam", "Nora", "Paul")
THINGS = ("apples", "marbles", "stamps", "books", "cards", "coins", "shells", "pencils")
# Text, and the sign of the second number.
TEMPLATES = (
    ("{n} has {a} {t}. {m} gives {n} {b} more. How many {t} does {n} have now?", "+"),
    ("A shop had {a} {t} and sold {b}. How many {t} are left?", "-"),
    ("{n} found {a} {t} on Monday and {b} on Friday. How many {t} did {n} find?", "+"),
    ("There are {a} {t} in a box. {n} takes {b} of them. How many {t} are left?", "-"),
    ("{n} has {a} {t} and {m} has {b}. How many {t} do they have together?", "+"),
    ("{n} had {a} {t} and gave {b} to {m}. How many {t} does {n} have?", "-"),
)


def problems(seed: int) -> Iterator[dict[str, str]]:
    r"""Rows of problem, answer and solution: `47 + 38 = 85. \boxed{85}`."""
    rng = random.Random(seed)
    while True:
        text, sign = rng.choice(TEMPLATES)
        n, m = rng.sample(NAMES, 2)
        a, b = sorted((rng.randint(11, 99), rng.randint(11, 99)), reverse=True)
        answer = a + b if sign == "+" else a - b
        yield {
            "problem": text.format(n=n, m=m, t=rng.choice(THINGS), a=a, b=b),
            "answer": str(answer),
            "solution": rf"{a} {sign} {b} = {answer}. \boxed{{{answer}}}",
        }


def main(folder: Path) -> None:
    """Write `train.jsonl` and `test.jsonl`."""
    for name, seed, number in (("train", 0, 4000), ("test", 1, 300)):
        rows = [json.dumps(row) + "\n" for row, _ in zip(problems(seed), range(number), strict=False)]
        (folder / f"{name}.jsonl").write_text("".join(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
