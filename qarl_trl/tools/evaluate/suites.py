"""Load math suites (paper Sec. 4, or files) as token ids for the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...data import load_math_dataset, local_path
from ...rewards import math_reward
from ...validate.prompts import renders_messages


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
    """
    Find the sources of suites.

    Args:
        entries: Names in `SUITES`, `"math"` (the paper's six), and files.

    Returns:
        Source, split and configuration of each suite, by its name; a file has the name of its stem.

    Raises:
        ValueError: for an unknown name, or for two suites of one name.
        FileNotFoundError: for a missing file.
    """
    expanded: list[str] = []
    for entry in entries:
        expanded += MATH if entry == "math" else (entry,)

    suites: dict[str, tuple[str, str, str | None]] = {}
    for entry in expanded:
        name, source = _find_suite(entry)
        if name in suites:
            raise ValueError(f"--suite has {name!r} twice.")
        suites[name] = source
    return suites


def _find_suite(entry: str) -> tuple[str, tuple[str, str, str | None]]:
    """The name and the source of one suite."""
    # A name of the table comes first, even if a file has the same name.
    if entry in SUITES:
        return entry, SUITES[entry]

    path = local_path(entry)
    if path is None:
        raise ValueError(f"--suite {entry!r} must be math, one of {', '.join(SUITES)}, or a file.")
    return path.stem, (str(path), "test", None)


def load_problems(
    source: str,
    split: str,
    config_name: str | None,
    tokenizer: Any,
    template_kwargs: dict[str, Any],
    *,
    conversational: bool | None = None,
    needs_math: bool = True,
    **settings: Any,
) -> list[dict[str, Any]]:
    """
    Load the problems of a suite, prompted as in training, without those whose reference math-verify cannot read.

    Args:
        source: Hub id or file.
        split: Split of the data set.
        config_name: Its configuration on the Hub.
        tokenizer: Its chat template is applied to chat messages.
        template_kwargs: Arguments of the chat template.
        conversational: Whether prompts are chat messages, or text; `None`: messages if there is a chat template.
        needs_math: Whether math-verify must read the references; `False` for rewards that read them differently.
        settings: Other arguments of [`~qarl_trl.data.load_math_dataset`].

    Returns:
        For each problem the `messages` (or the text) of the prompt, its `prompt_ids`, the `prompt` as the engine gets
        it, and the reference `answer`.

    Raises:
        ConnectionError: if the Hub cannot be reached.
        ValueError: if there is no row or no readable answer, or for chat messages without a chat template or with one
            that fails.
    """
    if conversational is None:
        conversational = renders_messages(tokenizer)
    if conversational and not renders_messages(tokenizer):
        raise ValueError("--conversational true needs a chat template, and the tokenizer of the model has none.")

    rows = load_math_dataset(source, split, config_name=config_name, conversational=conversational, **settings)
    prompts = rows["prompt"][:]
    answers = rows["answer"][:]
    readable = [True] * len(answers)
    if needs_math:
        # A problem whose reference cannot be read would count as wrong, whatever the answer. The completion does not
        # matter here: None says that the reference cannot be read.
        readable = [reward is not None for reward in math_reward([""] * len(answers), answers)]

    problems = []
    for prompt, answer, counts in zip(prompts, answers, readable, strict=True):
        if counts:
            ids = _tokenize(tokenizer, prompt, template_kwargs)
            problems.append({"prompt_ids": ids, "prompt": tokenizer.decode(ids), "messages": prompt, "answer": answer})

    if not problems:
        raise ValueError(f"math-verify can read none of the {len(answers)} answers of {source}.")
    return problems


def _tokenize(tokenizer: Any, prompt: Any, template_kwargs: dict[str, Any]) -> list[int]:
    """The token ids of a prompt, as TRL's trainer makes them for its engine."""
    # As for a base model: the problem is completed as plain text.
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]

    try:
        tokenized = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=True, return_dict=True, **template_kwargs
        )
    except Exception as error:  # any error of a template
        reason = " ".join(str(error).split())
        raise ValueError(
            f"The chat template cannot render the prompt {prompt}: {type(error).__name__}: {reason} (For prompts as "
            "text give --conversational false.)"
        ) from error
    return tokenized["input_ids"]
