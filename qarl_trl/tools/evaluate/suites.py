"""Load math suites (paper Sec. 4, or files) as token ids for the engine."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

from ...data import load_math_dataset, local_path
from ...rewards import math_reward


# Hub id, split and configuration. The first six are those of the paper's average.
SUITES = {
    "math500": ("HuggingFaceH4/MATH-500", "test", None),
    "aime24": ("HuggingFaceH4/aime_2024", "train", None),
    "aime25": ("math-ai/aime25", "test", None),
    "amc23": ("math-ai/amc23", "test", None),
    "minerva_math": ("math-ai/minervamath", "test", None),
    "olympiadbench": ("math-ai/olympiadbench", "test", None),
    "gsm8k": ("openai/gsm8k", "test", "main"),
}
MATH = tuple(SUITES)[:6]


def find_suites(entries: Sequence[str]) -> dict[str, tuple[str, str, str | None]]:
    """Sources by suite name, for names in `SUITES`, `"math"` (the paper's six) and files (by stem); `ValueError` or `FileNotFoundError`."""
    suites = {}
    for entry in itertools.chain.from_iterable(MATH if entry == "math" else (entry,) for entry in entries):
        path = None if entry in SUITES else local_path(entry)
        if path is None and entry not in SUITES:
            raise ValueError(f"--suite {entry!r} must be math, one of {', '.join(SUITES)}, or a file.")
        name = path.stem if path else entry
        if name in suites:
            raise ValueError(f"--suite has {name!r} twice.")
        suites[name] = (str(path), "test", None) if path else SUITES[entry]
    return suites


def load_problems(
    source: str, split: str, config_name: str | None, tokenizer: Any, template_kwargs: dict[str, Any], **settings: Any
) -> list[dict[str, Any]]:
    """
    The problems of a suite, prompted as in training: `prompt_ids`, the `prompt` as text, and the reference `answer`.

    Leaves out problems whose reference math-verify cannot read.
    The tokenizer's chat template, if any, is applied with `template_kwargs`; `settings` are those of [`load_math_dataset`].
    `ConnectionError` if the Hub cannot be reached, `ValueError` if there is no row or no readable answer.
    """
    chat = tokenizer.chat_template is not None
    rows = load_math_dataset(source, split, config_name=config_name, conversational=chat, **settings)
    prompts, answers = rows["prompt"][:], rows["answer"][:]
    form = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    tokenize = partial(tokenizer.apply_chat_template, **form, **template_kwargs) if chat else tokenizer
    problems = []
    # The completion does not matter here: None says that the reference cannot be read.
    for prompt, answer, reward in zip(prompts, answers, math_reward([""] * len(answers), answers), strict=True):
        if reward is not None:  # tokenized as TRL's trainer does for its engine
            ids = tokenize(prompt)["input_ids"]
            problems.append({"prompt_ids": ids, "prompt": tokenizer.decode(ids), "answer": answer})
    if not problems:
        raise ValueError(f"math-verify can read none of the {len(answers)} answers of {source}.")
    return problems
