"""Load math datasets with the columns that training reads: `prompt`, `answer` and `completion`."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .files import load_rows, say_if_times
from .rows import SLOT, as_written, completion_of, final_answer, prompt_of, with_digits_of


if TYPE_CHECKING:
    from datasets import ClassLabel, Dataset, Features

logger = logging.getLogger(__name__)

# The first match wins. A dot names a nested column: verl's files have the reference in `reward_model.ground_truth`,
# and a whole solution in `target`.
PROBLEM_COLUMNS = ("problem", "question", "prompt")
ANSWER_COLUMNS = ("answer", "final_answer", "reward_model.ground_truth", "solution", "target")
# A line break as programs write it. What LaTeX writes with these two characters, such as \neq and \nabla, is left.
_WRITTEN_BREAK = re.compile(
    r"\\n(?!(?:abla|eq?|eg|ot|otin|u|mid|less|leq|gtr|geq|sim|cong|exists|parallel)(?![a-z]))"
    r"(?!(?:su[bcp]|prec|[ensw]*arrow|left|right|oindent|ewline|ormal|atural|otag|onumber|roman)[a-z]*)"
)
# An explanation: two sentences, or words in two lines. Choices ("A. Paris"), times ("5 p.m. Monday") and matrices are
# none.
_WORD = r"(?<![\\{A-Za-z])[A-Za-z][a-z]+"
_PROSE = re.compile(rf"[a-z\d)$}}]\.\s+[A-Z][a-z]*,?\s+\S|{_WORD}[^\n]*\n[^\n]*{_WORD}")
# Columns that belong to a question.
_BESIDE_A_QUESTION = ("choices", "options", "image", "images", "video", "audio", "tools")
# Above it not every whole number is a float.
_LARGEST_WHOLE = 2.0**53
_LARGEST_WHOLE_OF = {"float16": 2.0**11, "float32": 2.0**24}


def load_math_dataset(
    name_or_path: str,
    split: str = "train",
    prompt_template: str | None = None,
    *,
    config_name: str | None = None,
    problem_column: str | None = None,
    answer_column: str | None = None,
    system_prompt: str | None = None,
    conversational: bool = True,
    max_samples: int | None = None,
) -> Dataset:
    r"""
    Load problems with their reference answers, in row order.

    The columns are `prompt`, messages or text, and `answer`, a text by [`final_answer`]. Rows without a prompt or an
    answer are left out, and a warning says how many. All rows are in memory, in each process.

    Args:
        name_or_path: A Hub id, a folder, or a `.jsonl`, `.json` or `.parquet` file.
        split: The split; slices work (`"train[:100]"`). A file has one split, which is any that is asked for.
        prompt_template: A text with `{problem}`. It applies to the last message of the user, if the problem is a list
            of chat messages.
        config_name: The configuration of a dataset on the Hub.
        problem_column: The column of the problems, by default the first of `PROBLEM_COLUMNS` that exists.
        answer_column: The column of the answers, by default the first of `ANSWER_COLUMNS` that exists.
        system_prompt: The system message; it replaces one in the data.
        conversational: Whether prompts are chat messages, or text.
        max_samples: Read at most so many rows; `None`: all.

    Raises:
        FileNotFoundError: if the file is missing.
        ValueError: if a column is missing, the template has no `{problem}`, `max_samples` is below 1, or no row has a
            prompt and an answer.
    """
    _check_prompt_settings(prompt_template, system_prompt, conversational)
    if max_samples is not None and max_samples < 1:
        raise ValueError(f"max_samples must be at least 1, or None for all rows, got {max_samples}.")

    # Nested columns get dotted names.
    dataset = load_rows(name_or_path, split, config_name).flatten()
    if max_samples is not None:
        dataset = dataset.select(range(min(max_samples, len(dataset))))
    problem_column = _column(dataset, problem_column, PROBLEM_COLUMNS, "problem_column", name_or_path)
    answer_column = _column(dataset, answer_column, ANSWER_COLUMNS, "answer_column", name_or_path)

    say_if_times(dataset, [problem_column, answer_column])
    _say_what_is_left_out(dataset, problem_column, conversational)
    _say_if_unanswerable(dataset, problem_column)
    _say_lost_digits(dataset, answer_column)
    short_dtype = _short_dtype(dataset, answer_column)
    names = _names_of_classes(dataset, answer_column)

    def convert(row: dict[str, Any]) -> dict[str, Any]:
        problem = as_written(row[problem_column])
        prompt = None
        if _is_there(problem):
            prompt = prompt_of(problem, prompt_template, system_prompt, conversational)
        answer = row[answer_column]
        if names is not None and answer is not None:
            # -1 is no class: the labels of a test set are hidden.
            answer = names.int2str(answer) if answer >= 0 else None
        if short_dtype is not None:
            answer = with_digits_of(answer, short_dtype)
        return {"prompt": prompt, "answer": final_answer(answer)}

    _say_prose(dataset, answer_column)
    converted = _converted(dataset, convert, _features(conversational, ["prompt", "answer"]), "Reading problems")
    lacking = f"(split {split!r}) lack a problem in {problem_column!r} or an answer in {answer_column!r}"
    advice = f"Set problem_column or answer_column: {dataset.column_names}."
    return _complete_rows(converted, f"rows of {name_or_path!r} {lacking}", advice)


def load_prompts(
    name_or_path: str,
    split: str = "train",
    prompt_template: str | None = None,
    *,
    config_name: str | None = None,
    problem_column: str | None = None,
    completion_column: str | None = None,
    system_prompt: str | None = None,
    conversational: bool = True,
) -> Dataset:
    """
    Load prompts and, if asked for, their completions, in row order: the columns `prompt` and `completion`.

    Rows without either are left out, and a warning says how many.

    Args:
        name_or_path: As for [`load_math_dataset`], as the arguments that are not named here.
        completion_column: The column of the completions, text or chat messages; `None`: no completions.
        conversational: Whether prompts and completions are chat messages, or text.

    Raises:
        FileNotFoundError: if the file is missing.
        ValueError: if a column is missing, the template has no `{problem}`, or no row is complete.
    """
    _check_prompt_settings(prompt_template, system_prompt, conversational)
    dataset = load_rows(name_or_path, split, config_name).flatten()
    problem_column = _column(dataset, problem_column, PROBLEM_COLUMNS, "problem_column", name_or_path)
    columns = ["prompt"]
    _say_what_is_left_out(dataset, problem_column, conversational)
    _say_if_unanswerable(dataset, problem_column)
    if completion_column is not None:
        _column(dataset, completion_column, (), "completion_column", name_or_path)
        columns.append("completion")
        # Of a completion as text its last message counts, which is all of it as a rule.
        _say_what_is_left_out(dataset, completion_column, conversational=True, is_prompt=False)
    say_if_times(dataset, [problem_column] if completion_column is None else [problem_column, completion_column])

    def convert(row: dict[str, Any]) -> dict[str, Any]:
        converted: dict[str, Any] = {"prompt": None}
        problem = as_written(row[problem_column])
        if _is_there(problem):
            converted["prompt"] = prompt_of(problem, prompt_template, system_prompt, conversational)
        if completion_column is not None:
            converted["completion"] = completion_of(as_written(row[completion_column]), conversational)
        return converted

    converted = _converted(dataset, convert, _features(conversational, columns), "Reading prompts")
    lacking = f"(split {split!r}) lack a {' or a '.join(columns)}"
    advice = f"Set problem_column or completion_column: {dataset.column_names}."
    return _complete_rows(converted, f"rows of {name_or_path!r} {lacking}", advice)


def _converted(
    dataset: Dataset, convert: Callable[[dict[str, Any]], dict[str, Any]], features: Features, title: str
) -> Dataset:
    """
    The rows as `convert` reads them, without the columns that they had.

    In memory, and never from datasets' files of an earlier run: these are known by the code of `convert` alone and not
    by that of the functions which it calls, so that a later version would train on what an earlier one had read. What
    is mapped from them stays in memory, too: datasets keeps its files beside those of the rows, and these have none.
    """
    return dataset.map(
        convert,
        remove_columns=dataset.column_names,
        features=features,
        desc=title,
        load_from_cache_file=False,
        keep_in_memory=True,
    )


def _say_what_is_left_out(dataset: Dataset, column: str, conversational: bool, is_prompt: bool = True) -> None:
    """Warn of what messages hold beside role and content, and of messages that prompts as text leave out."""
    rows = 0
    others: set[str] = set()
    cut = 0
    for value in dataset[column]:
        if not isinstance(value, list):
            continue
        # Other lists are refused where prompts are made.
        messages = [message for message in value if isinstance(message, dict)]
        # An answer is no part of a prompt.
        while is_prompt and messages and messages[-1].get("role") == "assistant":
            messages.pop()
        fields = {name for message in messages for name, content in message.items() if content}
        others |= fields - {"role", "content"}
        rows += bool(fields - {"role", "content"})
        cut += len(messages) > 1

    if others:
        logger.warning(
            f"{rows} of {len(dataset)} rows have {sorted(others)} in the messages of {column!r}, which are left out: "
            "of a message only role and content count. What the model must see belongs into the content."
        )
    if cut and not conversational:
        logger.warning(
            f"{cut} of {len(dataset)} rows have a system message or earlier turns in {column!r}, which prompts as "
            "text leave out (conversational=False). What the model must see belongs into prompt_template."
        )


def _is_there(problem: Any) -> bool:
    """Whether a row has a problem: a blank text is none."""
    return bool(problem.strip() if isinstance(problem, str) else problem)


def _say_if_unanswerable(dataset: Dataset, column: str) -> None:
    """Warn of columns without which nobody may answer a question: a prompt holds the problem alone."""
    # `flatten` has made several columns of an image, and of choices that have labels.
    needed = [name for name in dataset.column_names if name.partition(".")[0].lower() in _BESIDE_A_QUESTION]
    if needed:
        logger.warning(
            f"The columns {needed} are left out: the model sees {column!r} alone. If it needs them, write them into "
            "the problem; images and tools need a script, with a data set of its own."
        )


def _names_of_classes(dataset: Dataset, column: str) -> ClassLabel | None:
    """What names the numbers of a column of classes; `None` for another column."""
    from datasets import ClassLabel

    feature = dataset.features[column]
    return feature if isinstance(feature, ClassLabel) else None


def _short_dtype(dataset: Dataset, column: str) -> str | None:
    """The dtype of a column of floats in 16 or 32 bits, or of lists of these; `None` for another column."""
    feature = dataset.features[column]
    # Lists of lists have a feature of a feature.
    while hasattr(feature, "feature"):
        feature = feature.feature
    dtype = getattr(feature, "dtype", None)
    return dtype if dtype in _LARGEST_WHOLE_OF else None


def _say_lost_digits(dataset: Dataset, column: str) -> None:
    """Warn of whole numbers that a column of floats cannot hold: a reader makes one of ints and floats."""
    largest = _LARGEST_WHOLE_OF.get(_short_dtype(dataset, column) or "", _LARGEST_WHOLE)
    too_large = 0
    for value in dataset[column]:
        too_large += isinstance(value, float) and largest < abs(value) < float("inf")
    if too_large:
        logger.warning(
            f"{too_large} of {len(dataset)} answers in {column!r} are floats above {largest:.0f}, and may have "
            "lost their last digits. Write answers as text."
        )


def _say_prose(dataset: Dataset, column: str) -> None:
    """Warn of references that are explanations: one of their formulas would be the answer, which need not be right."""
    prose = []
    for value in dataset[column]:
        answer = final_answer(value) if isinstance(value, str) else ""
        # Not what stands in a box or in a last line: that is the answer, whatever it looks like.
        if value == answer and _PROSE.search(answer):
            prose.append(answer)
    if prose:
        logger.warning(
            f"{len(prose)} of {len(dataset)} answers in {column!r} are sentences without \\boxed{{}} or a last line "
            f"####, such as {prose[0]!r:.100}: math_reward would compare with one of their formulas. Put the final "
            "answer into a box, or name a column that has it alone (answer_column)."
        )


def _complete_rows(dataset: Dataset, lacking: str, advice: str) -> Dataset:
    """The rows that have something in every column; warns of others, and refuses (`ValueError`) to leave out all."""
    # An empty text lacks as much as `None`.
    complete = dataset.filter(lambda row: all(row.values()), desc="Checking rows")
    incomplete = len(dataset) - len(complete)
    if incomplete:
        lacking = f"{incomplete} of {len(dataset)} {lacking}"
        if len(complete) == 0:
            raise ValueError(f"{lacking}. {advice}")
        logger.warning(f"{lacking}, and are left out.")
    return complete


def _check_prompt_settings(prompt_template: str | None, system_prompt: str | None, conversational: bool) -> None:
    """Refuse (`ValueError`) a template without its slot, and a system message that a text cannot have."""
    if prompt_template is not None and SLOT not in prompt_template:
        raise ValueError(f"prompt_template={prompt_template!r} must have {SLOT} where the problem belongs.")
    if system_prompt is not None and not conversational:
        raise ValueError("system_prompt needs conversational=True. For plain text put it into prompt_template.")

    for name, text in {"prompt_template": prompt_template, "system_prompt": system_prompt}.items():
        if text is not None and _WRITTEN_BREAK.search(text):
            logger.warning(
                f"{name}={text!r} has a backslash and an n, which every prompt then has. For a line break write the "
                "text in double quotes in YAML, or in $'...' in a shell."
            )


def _features(conversational: bool, columns: Sequence[str]) -> Features:
    """The types of the columns: prompts and completions are messages or text, and all others text."""
    from datasets import Features, List, Value

    # Without them a column that keeps its name keeps its type, and AMC's answer "27" turns back into 27.0.
    text = Value("string")
    messages = List({"role": text, "content": text}) if conversational else text
    types = {"prompt": messages, "completion": messages, "answer": text}
    return Features({column: types[column] for column in columns})


def _column(dataset: Dataset, name: str | None, known: Sequence[str], argument: str, name_or_path: str) -> str:
    """The column `name`, or without a name the first of the known ones that exists; `ValueError` if there is none."""
    candidates = known if name is None else [name]
    for column in candidates:
        if column in dataset.column_names:
            return column

    missing = " or ".join(candidates)
    raise ValueError(f"The dataset {name_or_path!r} has columns {dataset.column_names}, no {missing}. Set {argument}.")
