"""Load math datasets, from the Hub or a file, with the columns `prompt` and `answer` for training."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .rewards import last_boxed, text_of


if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

# The first match wins. A dot names a nested column: verl's files have the reference in `reward_model.ground_truth`, and a whole
# solution in `target`.
PROBLEM_COLUMNS = ("problem", "question", "prompt")
ANSWER_COLUMNS = ("answer", "final_answer", "reward_model.ground_truth", "solution", "target")

BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_SLOT = "{problem}"


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
) -> "Dataset":
    r"""
    Load problems with their reference answers, in row order: the columns `prompt` and `answer` (text, by [`final_answer`]).

    `name_or_path` is a Hub id, a folder, or a `.jsonl`, `.json` or `.parquet` file. A file has one split; slices work (`"train[:100]"`).
    By default the columns are the first of `PROBLEM_COLUMNS` and `ANSWER_COLUMNS` that exist. If the problem is a list of chat
    messages, the template applies to the last user message. The other arguments are those of `QaRLScriptArguments`.

    Leaves out rows without a prompt or an answer. `FileNotFoundError`, or `ValueError` if a column is missing, the template has no
    `{problem}`, or no row has both.
    """
    from datasets import Features, List, Value

    if prompt_template is not None and _SLOT not in prompt_template:
        raise ValueError(f"prompt_template={prompt_template!r} must have {_SLOT} where the problem belongs.")
    if system_prompt is not None and not conversational:
        raise ValueError("system_prompt needs conversational=True. For plain text put it into prompt_template.")
    dataset = load_rows(name_or_path, split, config_name).flatten()  # nested columns get dotted names
    if max_samples is not None:
        dataset = dataset.select(range(min(max_samples, len(dataset))))
    problem_column = _column(dataset, problem_column, PROBLEM_COLUMNS, "problem_column", name_or_path)
    answer_column = _column(dataset, answer_column, ANSWER_COLUMNS, "answer_column", name_or_path)

    def convert(row: dict[str, Any]) -> dict[str, Any]:
        problem = row[problem_column]
        prompt = _prompt(problem, prompt_template, system_prompt, conversational) if problem else None
        return {"prompt": prompt, "answer": final_answer(row[answer_column])}

    # Without explicit features a column that keeps its name keeps its type, and AMC's answer "27" turns back into 27.0.
    text = Value("string")
    features = Features({"prompt": List({"role": text, "content": text}) if conversational else text, "answer": text})
    converted = dataset.map(convert, remove_columns=dataset.column_names, features=features, desc="Reading problems")
    whole = converted.filter(lambda row: bool(row["prompt"] and row["answer"]), desc="Checking rows")
    if len(whole) < len(converted):
        lacking = (
            f"{len(converted) - len(whole)} of {len(converted)} rows of {name_or_path!r} (split {split!r}) lack a problem in "
            f"{problem_column!r} or an answer in {answer_column!r}"
        )
        if not len(whole):
            raise ValueError(f"{lacking}. Set problem_column or answer_column: {dataset.column_names}.")
        logger.warning(f"{lacking}, and are left out.")
    return whole


def final_answer(reference: Any) -> str:
    r"""
    Read the final answer in a reference: the text after GSM8K's `####` or in the last `\boxed{}`, else the whole text.

    A reference is a text, a number, a list of texts (parts of one answer), or chat messages (it reads the last one).
    Returns `""` without an answer; whole floats lose their `.0`.
    """
    if isinstance(reference, float) and reference.is_integer():
        reference = int(reference)
    if isinstance(reference, list) and all(isinstance(part, str) for part in reference):
        reference = ", ".join(reference)  # OlympiadBench: the parts of one answer
    text = text_of(reference)
    if "####" in text:
        return text.rsplit("####", 1)[1].strip().replace(",", "")
    return (last_boxed(text) or text).strip()


def local_path(name_or_path: str) -> Path | None:
    """The existing file or folder `name_or_path`, or `None` for a Hub id. `ValueError` for a file of an unknown kind."""
    path = Path(name_or_path).expanduser()
    if path.suffix in BUILDERS and not path.exists():
        raise FileNotFoundError(f"The dataset {name_or_path!r} was not found at {path.absolute()}.")
    if path.is_file() and path.suffix not in BUILDERS:
        raise ValueError(f"The dataset {name_or_path!r} is a {path.suffix!r} file. Give one of {sorted(BUILDERS)}.")
    return path if path.exists() else None


def load_rows(name_or_path: str, split: str, config_name: str | None = None) -> "Dataset":
    """Load a dataset unchanged; a single local file is used for any split. Errors: [`local_path`]'s, and `ValueError`."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    path = local_path(name_or_path)
    try:
        if path is not None and path.is_file():
            return load_dataset(BUILDERS[path.suffix], data_files={split.partition("[")[0]: str(path)}, split=split)
        return load_dataset(str(path or name_or_path), name=config_name, split=split)
    except (DatasetGenerationError, ValueError) as error:  # their messages name neither the file nor the cause
        cause = error.__cause__ or error
        raise ValueError(f"The dataset {name_or_path!r} (split {split!r}) cannot be read: {cause}") from error


def _column(dataset: "Dataset", given: str | None, table: tuple[str, ...], argument: str, name_or_path: str) -> str:
    candidates = table if given is None else (given,)
    if found := [column for column in candidates if column in dataset.column_names]:
        return found[0]
    missing = " or ".join(candidates)
    raise ValueError(f"The dataset {name_or_path!r} has columns {dataset.column_names}, no {missing}. Set {argument}.")


def _prompt(problem: Any, template: str | None, system_prompt: str | None, conversational: bool) -> Any:
    """The prompt of a row, as messages or text; `None` if the user's message is empty."""
    messages = problem if isinstance(problem, list) else [{"role": "user", "content": str(problem)}]
    if not all(isinstance(message, dict) and message.keys() >= {"role", "content"} for message in messages):
        raise ValueError(f"A prompt must be text, or messages that each have role and content, got {messages!r:.200}.")
    messages = [{"role": message["role"], "content": message["content"]} for message in messages]
    user = next((message for message in reversed(messages) if message["role"] == "user"), None)
    if user is None:
        raise ValueError(f"A prompt has no user message: {messages}. Name the problem's column with problem_column.")
    if not user["content"]:
        return None
    if template is not None:
        user["content"] = template.replace(_SLOT, user["content"])  # not str.format: it may hold \boxed{}
    if not conversational:
        return user["content"]
    if system_prompt is not None:
        messages = [{"role": "system", "content": system_prompt}, *(m for m in messages if m["role"] != "system")]
    return messages
