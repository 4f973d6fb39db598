"""Load math datasets, from the Hub or a file, with the columns `prompt` and `answer` for training."""

from __future__ import annotations

import glob
import json
import logging
import math
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .boxes import last_boxes
from .rewards import text_of


if TYPE_CHECKING:
    from datasets import Dataset, Features

logger = logging.getLogger(__name__)

# The first match wins. A dot names a nested column: verl's files have the reference in `reward_model.ground_truth`,
# and a whole solution in `target`.
PROBLEM_COLUMNS = ("problem", "question", "prompt")
ANSWER_COLUMNS = ("answer", "final_answer", "reward_model.ground_truth", "solution", "target")

BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_SLOT = "{problem}"
# A comma between thousands, not one between the parts of "(1, 2)".
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


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
        max_samples: Read at most so many rows.

    Raises:
        FileNotFoundError: if the file is missing.
        ValueError: if a column is missing, the template has no `{problem}`, or no row has a prompt and an answer.
    """
    _check_prompt_settings(prompt_template, system_prompt, conversational)

    # Nested columns get dotted names.
    dataset = load_rows(name_or_path, split, config_name).flatten()
    if max_samples is not None:
        dataset = dataset.select(range(min(max_samples, len(dataset))))
    problem_column = _column(dataset, problem_column, PROBLEM_COLUMNS, "problem_column", name_or_path)
    answer_column = _column(dataset, answer_column, ANSWER_COLUMNS, "answer_column", name_or_path)

    _say_what_is_left_out(dataset, problem_column, conversational)

    def convert(row: dict[str, Any]) -> dict[str, Any]:
        problem = _as_written(row[problem_column])
        prompt = None
        if problem:
            prompt = _prompt(problem, prompt_template, system_prompt, conversational)
        return {"prompt": prompt, "answer": final_answer(row[answer_column])}

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
    if completion_column is not None:
        _column(dataset, completion_column, (), "completion_column", name_or_path)
        columns.append("completion")
        # Of a completion as text its last message counts, which is all of it as a rule.
        _say_what_is_left_out(dataset, completion_column, conversational=True, is_prompt=False)

    def convert(row: dict[str, Any]) -> dict[str, Any]:
        converted: dict[str, Any] = {"prompt": None}
        problem = _as_written(row[problem_column])
        if problem:
            converted["prompt"] = _prompt(problem, prompt_template, system_prompt, conversational)
        if completion_column is not None:
            converted["completion"] = _completion(_as_written(row[completion_column]), conversational)
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


def _completion(completion: Any, conversational: bool) -> Any:
    """A completion as messages or text; `None` if there is none."""
    if not completion:
        return None
    if not conversational:
        return text_of(completion)
    if isinstance(completion, str):
        return [{"role": "assistant", "content": completion}]
    return _messages(completion)


def _check_prompt_settings(prompt_template: str | None, system_prompt: str | None, conversational: bool) -> None:
    """Refuse (`ValueError`) a template without its slot, and a system message that a text cannot have."""
    if prompt_template is not None and _SLOT not in prompt_template:
        raise ValueError(f"prompt_template={prompt_template!r} must have {_SLOT} where the problem belongs.")
    if system_prompt is not None and not conversational:
        raise ValueError("system_prompt needs conversational=True. For plain text put it into prompt_template.")


def _features(conversational: bool, columns: Sequence[str]) -> Features:
    """The types of the columns: prompts and completions are messages or text, and all others text."""
    from datasets import Features, List, Value

    # Without them a column that keeps its name keeps its type, and AMC's answer "27" turns back into 27.0.
    text = Value("string")
    messages = List({"role": text, "content": text}) if conversational else text
    types = {"prompt": messages, "completion": messages, "answer": text}
    return Features({column: types[column] for column in columns})


def final_answer(reference: Any) -> str:
    r"""
    Read the final answer in a reference: the text after GSM8K's `####` or in the last `\boxed{}`, else the whole text.

    Boxes beside each other ("`\boxed{1}` or `\boxed{2}`") are the parts of one answer.

    Args:
        reference: A text, a number, a date, a list of these (the parts of one answer), or chat messages (the last
            counts).

    Returns:
        `""` without an answer, also for NaN. Whole floats lose their `.0`.
    """
    if isinstance(reference, list) and not any(isinstance(part, dict) for part in reference):
        # OlympiadBench: the parts of one answer.
        return ", ".join(final_answer(part) for part in reference)

    if isinstance(reference, float) and math.isnan(reference):
        # pandas writes it for a missing answer.
        return ""
    if isinstance(reference, float) and reference.is_integer():
        # AMC has its answers as floats, and "27.0" is not what a model writes.
        reference = int(reference)

    text = text_of(_as_written(reference))
    after_mark = text.rsplit("####", 1)[1].strip() if "####" in text else ""
    # GSM8K's is the last line. A heading of Markdown begins like it, and has lines below it.
    if after_mark and "\n" not in after_mark:
        return _THOUSANDS.sub("", after_mark)
    # Boxes beside each other are one answer, as in a completion.
    parts = [part for part in last_boxes(text) if part]
    return (", ".join(parts) or text).strip()


def _as_written(value: Any) -> Any:
    """A value of a row; a date as the text that it was in the file, with the messages of a chat."""
    if isinstance(value, list):
        return [_as_written(part) for part in value]
    if isinstance(value, dict):
        return {name: _as_written(part) for name, part in value.items()}
    # pyarrow's reader of JSON takes "2024-01-05" for a time of that day.
    if isinstance(value, datetime):
        return value.isoformat(sep=" ").removesuffix(" 00:00:00")
    return value


def local_path(name_or_path: str) -> Path | None:
    """
    The file or folder of a dataset, or `None` for a Hub id.

    Args:
        name_or_path: As for [`load_math_dataset`].

    Raises:
        FileNotFoundError: if the name is that of a file which is missing.
        ValueError: for a file of an unknown kind, or a folder whose path datasets would take for a pattern.
    """
    path = Path(name_or_path).expanduser()
    if path.suffix in BUILDERS and not path.exists():
        raise FileNotFoundError(f"The dataset {name_or_path!r} was not found at {path.absolute()}.")
    if path.is_file() and path.suffix not in BUILDERS:
        raise ValueError(f"The dataset {name_or_path!r} is a {path.suffix!r} file. Give one of {sorted(BUILDERS)}.")
    # Escaped, datasets does not find a folder; as it is, datasets reads others: data1 for data[1].
    if path.is_dir() and glob.has_magic(str(path.absolute())):
        raise ValueError(f"The dataset's folder must have no *, ? or [ in its path, got {str(path.absolute())!r}.")
    return path if path.exists() else None


def load_rows(name_or_path: str, split: str, config_name: str | None = None) -> Dataset:
    """
    Load a dataset unchanged.

    Args:
        name_or_path: As for [`load_math_dataset`], as the others.
        split: For a single local file it may be any.
        config_name: The configuration of a dataset on the Hub.

    Raises:
        FileNotFoundError: if the file is missing.
        ValueError: if the dataset cannot be read.
    """
    from datasets import load_dataset

    path = local_path(name_or_path)
    if path is not None and BUILDERS.get(path.suffix) == "json" and path.is_file():
        _refuse_null_rows(path)
    try:
        if path is not None and path.is_file():
            if config_name is not None:
                logger.warning(
                    f"The dataset {name_or_path!r} is a file, so its configuration {config_name!r} is not used."
                )
            # A file has one split, so give it the name that is asked for, without the slice.
            # Absolute and escaped: datasets takes the name as a pattern, and the current folder is a part of it.
            files = {split.partition("[")[0]: glob.escape(str(path.absolute()))}
            return load_dataset(BUILDERS[path.suffix], data_files=files, split=split)
        return load_dataset(str(path or name_or_path), name=config_name, split=split)
    except OSError:  # a missing file, or no network
        raise
    except Exception as error:
        # The reader of a format may raise anything: an empty file is a StopIteration, a cut one an EOFError. Messages
        # name neither the file nor the cause.
        raise ValueError(
            f"The dataset {name_or_path!r} (split {split!r}) cannot be read: {_reason(error.__cause__ or error)}"
        ) from error


def _reason(error: BaseException) -> str:
    """Why a file cannot be read, in a line."""
    text = " ".join(str(error).split())
    if not text:
        return f"it is empty or damaged ({type(error).__name__})."
    return text[:300]


def _refuse_null_rows(path: Path) -> None:
    """Refuse (`ValueError`) a row that is null: pyarrow 26 ends the process if a block of a file begins with one."""
    with path.open("rb") as file:
        is_array = file.read(1) == b"["
        file.seek(0)
        # A file of rows has one in each line. In an array a line may be any part of a row.
        if not is_array:
            for number, line in enumerate(file, start=1):
                if line.lstrip().startswith(b"null"):
                    raise ValueError(f"The dataset {str(path)!r} must have an object in line {number}, got null.")
            return

        try:
            rows = json.load(file)
        except ValueError:  # datasets says what is wrong with it
            return
    if None in rows:
        raise ValueError(f"The dataset {str(path)!r} must have an object in row {rows.index(None)}, got null.")


def _column(dataset: Dataset, name: str | None, known: Sequence[str], argument: str, name_or_path: str) -> str:
    """The column `name`, or without a name the first of the known ones that exists; `ValueError` if there is none."""
    candidates = known if name is None else [name]
    for column in candidates:
        if column in dataset.column_names:
            return column

    missing = " or ".join(candidates)
    raise ValueError(f"The dataset {name_or_path!r} has columns {dataset.column_names}, no {missing}. Set {argument}.")


def _prompt(problem: Any, template: str | None, system_prompt: str | None, conversational: bool) -> Any:
    """The prompt of a row, as messages or text; `None` if the user's message is empty."""
    messages = _messages(problem)
    # The last message of the user is the question; those before it are an example or a conversation.
    from_user = [message for message in messages if message["role"] == "user"]
    if not from_user:
        raise ValueError(f"A prompt has no user message: {messages}. Name the problem's column with problem_column.")

    # Data for fine-tuning have the answer after the question: the model would read what it is to find.
    while messages[-1]["role"] == "assistant":
        messages.pop()

    question = from_user[-1]
    if not question["content"]:
        return None
    if template is not None:
        # Not str.format: the template may hold \boxed{}.
        question["content"] = template.replace(_SLOT, question["content"])

    if not conversational:
        return question["content"]
    if system_prompt is None:
        return messages
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": system_prompt}, *others]


def _messages(problem: Any) -> list[dict[str, Any]]:
    """A problem as new chat messages of role and content."""
    if not isinstance(problem, list):
        return [{"role": "user", "content": str(problem)}]

    for message in problem:
        if not (isinstance(message, dict) and message.keys() >= {"role", "content"}):
            raise ValueError(
                f"A prompt must be text, or messages that each have role and content, got {problem!r:.200}."
            )
        # The templates of language models join texts.
        if isinstance(message["content"], list | dict):
            raise ValueError(
                f"The content of a message must be text, got {message['content']!r:.200}. Join its parts to one text."
            )
    return [{"role": message["role"], "content": message["content"]} for message in problem]
