"""The math suites of the paper (Sec. 4), from the Hub or from files, as the token ids that the engine gets."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...data import load_math_dataset, local_path
from ...rewards import math_reward


@dataclass(frozen=True)
class Suite:
    """Where a suite is: Hub id, split and configuration, or the path of a file in place of the id."""

    name: str
    source: str
    split: str = "test"
    config_name: str | None = None


@dataclass(frozen=True)
class Problem:
    """What the engine is asked, as token ids and as text, and the reference answer."""

    prompt_ids: tuple[int, ...]
    prompt: str
    answer: str


SUITES = {
    suite.name: suite
    for suite in (
        Suite("math500", "HuggingFaceH4/MATH-500"),
        Suite("aime24", "HuggingFaceH4/aime_2024", "train"),
        Suite("aime25", "math-ai/aime25"),
        Suite("amc23", "math-ai/amc23"),
        Suite("minerva_math", "math-ai/minervamath"),
        Suite("olympiadbench", "math-ai/olympiadbench"),
        Suite("gsm8k", "openai/gsm8k", config_name="main"),
    )
}
MATH = tuple(name for name in SUITES if name != "gsm8k")  # the six of the paper's average


def find_suites(entries: Sequence[str]) -> list[Suite]:
    """
    The suites to run, of names of `SUITES`, `"math"` (the six of the paper), `FILE` (named by its stem) and `NAME=FILE`.

    The Hub is not asked. `ValueError` for an unknown name or one given twice, `FileNotFoundError` for a missing file.
    """
    suites = []
    for entry in itertools.chain.from_iterable(MATH if entry == "math" else (entry,) for entry in entries):
        name, _, source = entry.rpartition("=")
        if entry in SUITES:
            suites.append(SUITES[entry])
        elif path := local_path(source):
            suites.append(Suite(name or path.stem, str(path)))
        else:
            raise ValueError(f"--suite {entry!r} must be math, one of {', '.join(SUITES)}, FILE or NAME=FILE.")
    names = [suite.name for suite in suites]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"--suite has {twice[0]!r} twice. Name one of them: OTHER=FILE.")
    return suites


def load_problems(suite: Suite, tokenizer: Any, template_kwargs: dict[str, Any], **settings: Any) -> list[Problem]:
    """
    The problems of a suite, prompted as in training. Those whose reference cannot be read are left out, and it says so.

    The tokenizer's chat template, if any, is applied with `template_kwargs`; `settings` are those of [`load_math_dataset`].
    `ConnectionError` if the Hub cannot be reached, `ValueError` if there is no row or no answer that math-verify can read.
    """
    chat = tokenizer.chat_template is not None
    try:
        rows = load_math_dataset(
            suite.source, suite.split, config_name=suite.config_name, conversational=chat, **settings
        )
    except ConnectionError as error:
        raise ConnectionError(f"{error}. Use a local copy: --suite {suite.name}=FILE.") from error
    prompts, answers = rows["prompt"][:], rows["answer"][:]
    # The completion does not matter here: None says that the reference cannot be read.
    readable = [reward is not None for reward in math_reward([""] * len(answers), answers)]
    if not any(readable):
        raise ValueError(f"math-verify can read none of the {len(answers)} answers of {suite.source}.")
    if not all(readable):
        print(
            f"{suite.name}: {readable.count(False)} problems left out, because math-verify cannot read their answers"
        )
    form = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    tokenize = partial(tokenizer.apply_chat_template, **form, **template_kwargs) if chat else tokenizer
    problems = []
    for prompt, answer, usable in zip(prompts, answers, readable, strict=True):
        if usable:  # tokenized as TRL's trainer does for its engine
            ids = tokenize(prompt)["input_ids"]
            problems.append(Problem(tuple(ids), tokenizer.decode(ids), answer))
    return problems
