"""Check the training data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accelerate.logging import get_logger
from datasets import Dataset
from trl import GRPOConfig, RLOOConfig

from .rollouts import prompts_per_rollout
from .types import RunSettings, TrainerArguments


logger = get_logger(__name__)


def check_data(trainer_arguments: TrainerArguments, args: RunSettings) -> None:
    """
    Refuse data without the columns that a trainer reads, and fewer prompts than a rollout batch has.

    Args:
        trainer_arguments: All arguments of the trainer by name. Only data sets of known length are checked.
        args: Settings of the run.

    Raises:
        ValueError: with the columns, or with the numbers that make the size of a rollout batch, and for an evaluation
            without rows.
    """
    _check_evaluations(trainer_arguments, args)
    data = trainer_arguments.get("train_dataset")
    # A streamed data set has no length before it ends.
    if not isinstance(data, Dataset):
        return
    _check_columns(data, trainer_arguments, args)

    # TRL's sampler drops an incomplete batch. Such a run would end at once, and report success.
    needed = prompts_per_rollout(args)
    if needed is not None and len(data) < needed:
        raise ValueError(
            f"train_dataset must have at least {needed} prompts, got {len(data)}, which would train nothing: "
            f"a rollout batch has {_size(args)}."
        )


def check_rows(trainer_arguments: TrainerArguments, args: RunSettings) -> None:
    """
    Refuse rows without a text to fine-tune on: TRL would fail at them in words of its own, after the model loaded.

    Args:
        trainer_arguments: All arguments of the trainer by name. Streamed data sets are not checked.
        args: Settings of the run.

    Raises:
        ValueError: with the first such row and its column.
    """
    text_field = _text_field(trainer_arguments, args)
    if text_field is None:
        return

    for title, data in data_sets(trainer_arguments, "train_dataset", "eval_dataset"):
        for column in _columns_of_texts(data, text_field):
            row = _first_without_text(data, column)
            if row is not None:
                raise ValueError(f"{title}[{row}]: {column} must be text or messages, got none. Leave such rows out.")


def _text_field(trainer_arguments: TrainerArguments, args: RunSettings) -> str | None:
    """The column of texts of SFT; `None` for other trainers, and if the user formats or prepares the rows."""
    # Who does so has columns of their own.
    if trainer_arguments.get("formatting_func") or getattr(args, "dataset_kwargs", None):
        return None
    # Only SFT's config has it.
    return getattr(args, "dataset_text_field", None)


def _columns_of_texts(data: Dataset, text_field: str) -> list[str]:
    """The columns of which TRL's SFT (1.16) makes tokens."""
    columns = data.column_names
    if len(data) == 0 or "input_ids" in columns:
        return []
    if {"prompt", "completion"} <= set(columns):
        return ["prompt", "completion"]

    # TRL decides by the first row whether it reads messages or texts.
    others = [name for name in ("messages", "conversations", text_field) if name in columns]
    first = data.select_columns(others).with_format(None)[0]
    filled = [name for name in others if first[name]]
    return (filled or others)[:1]


def _first_without_text(data: Dataset, column: str) -> int | None:
    """The first row without a text or messages in a column. Messages without content are for the chat template."""
    # By Arrow, which takes no time for a million rows.
    values = data.select_columns(column).with_format("arrow")[:].column(0)
    rows = 0
    for chunk in values.chunks:
        # TRL leaves out a row without messages in its completion.
        counts_messages = hasattr(chunk, "value_lengths") and column != "completion"
        first = chunk.value_lengths().fill_null(0).index(0) if counts_messages else chunk.is_valid().index(False)
        if first.as_py() >= 0:
            return rows + first.as_py()
        rows += len(chunk)
    return None


def data_sets(trainer_arguments: TrainerArguments, *arguments: str) -> Iterator[tuple[str, Dataset]]:
    """
    The data sets in memory among the arguments of a trainer, each with its name.

    Args:
        trainer_arguments: All arguments of the trainer by name.
        arguments: The names of those to look at.
    """
    for argument in arguments:
        data = trainer_arguments.get(argument)
        # A `DatasetDict` is a dict, too.
        several: dict[str, Any] = data if isinstance(data, dict) else {"": data}
        for name, rows in several.items():
            if isinstance(rows, Dataset):
                yield f"{argument}[{name!r}]" if name else argument, rows


def _check_evaluations(trainer_arguments: TrainerArguments, args: RunSettings) -> None:
    """
    Refuse (`ValueError`) evaluation sets without rows, at which TRL fails without a word after the model loaded, and
    those without the columns that a trainer with rewards or a distillation reads.
    """
    # Trainers that sample look at the rows only when they evaluate. The others prepare them at once.
    if prompts_per_rollout(args) is not None and args.eval_strategy == "no" and not args.eval_on_start:
        return

    for place, rows in data_sets(trainer_arguments, "eval_dataset"):
        if len(rows) == 0:
            raise ValueError(f"{place} must have rows, got none. Leave it out, with eval_strategy='no'.")
        _check_columns_of_prompts(rows, place, trainer_arguments, args)
        if isinstance(args, (GRPOConfig, RLOOConfig)):
            _warn_of_uneven_evaluation(place, len(rows), args)


def _warn_of_uneven_evaluation(place: str, rows: int, args: GRPOConfig | RLOOConfig) -> None:
    """Warn of a last batch that is not full: TRL (1.16) weighs the batches of an evaluation alike."""
    answers = rows * (args.num_generations_eval or args.num_generations)
    batch = args.per_device_eval_batch_size * args.world_size
    if answers % batch == 0:
        return

    effect = "weigh more than others"
    if args.dataloader_drop_last:
        effect = "are left out"
    elif args.world_size > 1:
        effect = "are filled up with those of the first prompts, which count twice"
    logger.warning(
        f"{place} has {answers} answers to evaluate, and a batch of all processes {batch}: in eval_reward and other "
        f"averages the {answers % batch} of the last batch {effect}. Make the rows times num_generations_eval a "
        "multiple of the batch."
    )


def _size(args: RunSettings) -> str:
    """The numbers that make the size of a rollout batch."""
    of_all = f"per_device_train_batch_size={args.per_device_train_batch_size} x {args.world_size} processes"
    if not hasattr(args, "num_generations"):
        return f"{of_all} x gradient_accumulation_steps={args.gradient_accumulation_steps} prompts"
    return (
        f"{of_all} x steps_per_generation={args.steps_per_generation} "
        f"= {args.generation_batch_size} completions, num_generations={args.num_generations} of each"
    )


def _check_columns_of_prompts(
    data: Dataset, place: str, trainer_arguments: TrainerArguments, args: RunSettings
) -> None:
    """
    Refuse (`ValueError`) a data set to distill on without completions; warn of one of GRPO or RLOO without prompts,
    which a user's trainer may make.
    """
    # Environments may make the prompts.
    needs_prompts = isinstance(args, (GRPOConfig, RLOOConfig)) and not trainer_arguments.get("environment_factory")
    if needs_prompts and not _has_column(data, "prompt"):
        logger.warning(
            f"{place} has no column prompt, which TRL asks for in the first step, but {sorted(data.column_names)}: "
            f"{place}.rename_column('question', 'prompt'), or a recipe, which makes prompts of problems."
        )
    if getattr(args, "distill_on", None) == "answers" and not _has_column(data, "completion"):
        raise ValueError(
            f"distill_on='answers' needs a column completion, and {place} has {sorted(data.column_names)}. In a "
            "recipe set completion_column, or distill_on: rollouts."
        )


def _has_column(data: Dataset, name: str) -> bool:
    """Whether rows have a column, which a transform of the data set may make."""
    return name in data.column_names or len(data) == 0 or name in data[0]


def _check_columns(data: Dataset, trainer_arguments: TrainerArguments, args: RunSettings) -> None:
    """Refuse (`ValueError`) training data without the columns that a trainer reads."""
    _check_columns_of_prompts(data, "train_dataset", trainer_arguments, args)

    columns = set(data.column_names)
    text_field = _text_field(trainer_arguments, args)
    if text_field is None:
        return

    pairs = {"prompt", "completion"} <= columns
    if args.completion_only_loss and not pairs and "input_ids" not in columns:
        raise ValueError(
            f"completion_only_loss needs the columns prompt and completion, and train_dataset has {sorted(columns)}."
        )
    if not (pairs or columns & {text_field, "messages", "conversations", "input_ids"}):
        raise ValueError(
            f"train_dataset must have a column {text_field!r} (dataset_text_field), messages, or prompt and "
            f"completion, got {sorted(columns)}."
        )
