"""The math suites of the paper (Sec. 4), from the Hub or from files, as the token ids that the engine gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ...data import BUILDERS, load_math_dataset, local_path
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


def find_suites(names: Sequence[str], data: Sequence[str]) -> list[Suite]:
    """
    The suites to run: `names` of `SUITES` (`"math"`: the six of the paper), and `data`. The Hub is not asked.

    Data is `FILE` (a suite named by its stem), `NAME=FILE`, or a folder that holds the suites in `names` as `<name>.jsonl`,
    `.json` or `.parquet`. `FileNotFoundError` for what is missing; `ValueError` for a name that is unknown or given twice, a
    folder that is not used, or when nothing is asked for.
    """
    files: dict[str, Suite] = {}
    folder = None
    for entry in data:
        name, given, path = entry.partition("=")
        if not given or "/" in name:
            name, path = "", entry
        found = local_path(str(Path(path).expanduser().absolute()))
        name = name or found.stem
        if found.is_dir():
            if folder is not None or (given and name != found.stem) or not names:
                raise ValueError(f"--data {entry}: one folder without a name, for the suites that --suite names.")
            folder = found
        elif name in files:
            raise ValueError(f"--data {entry}: there is a suite {name!r} already. Name it: --data OTHER={path}.")
        else:
            files[name] = Suite(name, str(found))
    wanted = list(dict.fromkeys(part for name in names for part in (MATH if name == "math" else (name,))))
    if not wanted and not files:
        raise ValueError("nothing to evaluate on: give --suite (math, or names of suites), --data FILE, or both.")
    suites = [files[name] if name in files else _find(name, folder) for name in wanted]
    return suites + [suite for name, suite in files.items() if name not in wanted]


def load_problems(
    suite: Suite, tokenizer: Any, template_kwargs: dict[str, Any], **settings: Any
) -> tuple[list[Problem], int]:
    """
    The problems of a suite, prompted as in training, and how many were left out because their reference cannot be read.

    The tokenizer's chat template, if any, is applied with `template_kwargs`; `settings` are those of [`load_math_dataset`].
    `ConnectionError` if the Hub cannot be reached, `ValueError` if there is no row or no answer that math-verify can read.
    """
    chat = tokenizer.chat_template is not None
    try:
        rows = load_math_dataset(
            suite.source, suite.split, config_name=suite.config_name, conversational=chat, **settings
        )
    except ConnectionError as error:
        raise ConnectionError(
            f"{error}. Use local copies: --data FOLDER, which holds {suite.name}.jsonl, or --data {suite.name}=FILE."
        ) from error
    prompts, answers = rows["prompt"][:], rows["answer"][:]
    # The completion does not matter here: None says that the reference cannot be read.
    readable = [reward is not None for reward in math_reward([""] * len(answers), answers)]
    if not any(readable):
        raise ValueError(f"math-verify can read none of the {len(answers)} answers of {suite.source}.")
    form = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    tokenize = partial(tokenizer.apply_chat_template, **form, **template_kwargs) if chat else tokenizer
    problems = []
    for prompt, answer, usable in zip(prompts, answers, readable, strict=True):
        if usable:  # tokenized as TRL's trainer does for its engine
            ids = tokenize(prompt)["input_ids"]
            problems.append(Problem(tuple(ids), tokenizer.decode(ids), answer))
    return problems, len(answers) - len(problems)


def _find(name: str, folder: Path | None) -> Suite:
    if name not in SUITES:
        raise ValueError(f"--suite {name!r} must be math, or of {', '.join(SUITES)}. Other problems: --data FILE.")
    if folder is None:
        return SUITES[name]
    for kind in BUILDERS:
        if (path := folder / f"{name}{kind}").is_file():
            return Suite(name, str(local_path(str(path))))
    raise FileNotFoundError(
        f"{folder} has no {name}.jsonl, .json or .parquet. Name with --suite the suites that are there, or add "
        f"--data {name}=FILE."
    )
