"""What the commands that train have in common, and what each of them trains: data, settings and trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .data import load_math_dataset, load_prompts, load_rows
from .options import DATA, option
from .rewards import REWARD_TIMEOUT_S


# Settings of the other groups load torch, and `--help` of other commands must be instant.
if TYPE_CHECKING:
    from datasets import Dataset


# Settings of data ----------------------------------------------------------------------------------------------------


@dataclass
class DataArguments:
    """The fields of a recipe for data; the others belong to the trainer and the model."""

    dataset_name_or_path: str | None = option(
        DATA, default=None, help="Hub id, folder, .jsonl, .json or .parquet. Required."
    )
    dataset_config: str | None = option(
        DATA, default=None, help="Configuration of a Hub dataset, e.g. main of openai/gsm8k."
    )
    dataset_split: str = option(DATA, default="train", help="Split to train on; slices such as train[:1000] work.")
    eval_dataset_name_or_path: str | None = option(
        DATA, default=None, help="Dataset to evaluate on, for eval_strategy."
    )
    eval_dataset_config: str | None = option(
        DATA, default=None, help="Its configuration. Unset: that of dataset_config, if both are one dataset."
    )
    eval_dataset_split: str = option(DATA, default="test", help="Split to evaluate on; a local file has only one.")
    dry_run: bool = option(
        DATA, default=False, help="Only check and print the settings; load nothing. qarl-trl doctor checks more."
    )


@dataclass
class PromptArguments(DataArguments):
    """The fields of a recipe for prompts."""

    problem_column: str | None = option(
        DATA, default=None, help="Column of the problems. Unset: problem, question or prompt."
    )
    prompt_template: str | None = option(
        DATA, default=None, help="Text that contains {problem}. Unset: the problem alone."
    )
    system_prompt: str | None = option(DATA, default=None, help="System message; replaces one in the data.")
    conversational: bool = option(
        DATA, default=True, help="Prompts as chat messages. False: as text, without chat template."
    )


@dataclass
class QaRLScriptArguments(PromptArguments):
    """The fields of a recipe for prompts, answers and rewards."""

    answer_column: str | None = option(
        DATA, default=None, help="Column of the answers (a.b: nested). Unset: answer, ..."
    )
    reward_funcs: list[str] = option(
        DATA,
        default_factory=lambda: ["math_reward"],
        help="math_reward, or import paths such as my_rewards.my_reward, also from the current folder.",
    )
    reward_timeout: float = option(
        DATA,
        default=REWARD_TIMEOUT_S,
        help="Seconds that math_reward may take for a batch. Answers that are not graded then count as wrong.",
    )


@dataclass
class DistillationArguments(PromptArguments):
    """The fields of a recipe for prompts, and for completions that are there already."""

    completion_column: str = option(
        DATA, default="completion", help="Column of the completions, text or chat messages, for distill_on: answers."
    )


# The methods ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """
    What a command trains.

    Args:
        command: The command of `qarl-trl`.
        about: What it does, in one line of its `--help`.
        data: The dataclass of its settings of data.
        config: The import path of its config, from this package on.
        trainer: The import path of its trainer.
        trl_config: The name of TRL's config below it.
        load: Loads a data set by its settings: `load(settings, config, name_or_path, split)`.
    """

    command: str
    about: str
    data: type[DataArguments]
    # Import paths, not classes: importing a trainer loads vLLM, and `--help` needs neither.
    config: str
    trainer: str
    trl_config: str
    load: Callable[[Any, Any, str, str, str | None], Dataset]

    @property
    def has_rewards(self) -> bool:
        """Whether a recipe names rewards."""
        return issubclass(self.data, QaRLScriptArguments)

    def config_class(self) -> type:
        """The config."""
        return _imported(self.config)

    def trainer_class(self) -> type:
        """The trainer, whose import loads vLLM."""
        return _imported(self.trainer)


def _imported(path: str) -> Any:
    """A class of this package."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(f".{module}", __package__), name)


def _load_problems(
    settings: QaRLScriptArguments, config: Any, name_or_path: str, split: str, config_name: str | None
) -> Dataset:
    """Prompts and reference answers."""
    return load_math_dataset(
        name_or_path,
        split,
        settings.prompt_template,
        config_name=config_name,
        problem_column=settings.problem_column,
        answer_column=settings.answer_column,
        system_prompt=settings.system_prompt,
        conversational=settings.conversational,
    )


def _load_rows(
    settings: DataArguments, config: Any, name_or_path: str, split: str, config_name: str | None
) -> Dataset:
    """Rows as they are: TRL reads their columns. Without a `prompt` that has no completion."""
    rows = load_rows(name_or_path, split, config_name)
    columns = set(rows.column_names)
    # TRL takes each row with a prompt for one with a completion. UltraChat has it beside the messages.
    if "prompt" in columns and "completion" not in columns and columns & {"messages", config.dataset_text_field}:
        return rows.remove_columns("prompt")
    return rows


def _load_prompts(
    settings: DistillationArguments, config: Any, name_or_path: str, split: str, config_name: str | None
) -> Dataset:
    """Prompts and, if the run trains on them, completions."""
    return load_prompts(
        name_or_path,
        split,
        settings.prompt_template,
        config_name=config_name,
        problem_column=settings.problem_column,
        # Without a name no completion is read, so data for rollouts need no such column.
        completion_column=settings.completion_column if config.distill_on == "answers" else None,
        system_prompt=settings.system_prompt,
        conversational=settings.conversational,
    )


QARL = Method(
    command="train",
    about="Train by QaRL or GRPO on low-bit rollouts",
    data=QaRLScriptArguments,
    config="config.QaRLConfig",
    trainer="trainer.QaRLTrainer",
    trl_config="GRPOConfig",
    load=_load_problems,
)
RLOO = Method(
    command="rloo",
    about="Train by TRL's RLOO on low-bit rollouts",
    data=QaRLScriptArguments,
    config="trainers.configs.LowBitRLOOConfig",
    trainer="trainers.rloo.LowBitRLOOTrainer",
    trl_config="RLOOConfig",
    load=_load_problems,
)
SFT = Method(
    command="sft",
    about="Fine-tune low-bit weights on given texts by TRL's SFT",
    data=DataArguments,
    config="trainers.configs.LowBitSFTConfig",
    trainer="trainers.sft.LowBitSFTTrainer",
    trl_config="SFTConfig",
    load=_load_rows,
)
DISTILL = Method(
    command="distill",
    about="Distill a model in high precision into low bits by TRL's distillation",
    data=DistillationArguments,
    config="trainers.configs.LowBitDistillationConfig",
    trainer="trainers.distillation.LowBitDistillationTrainer",
    trl_config="DistillationConfig",
    load=_load_prompts,
)

# By command. A recipe that fits several is the first one's ([`choose_method`]).
METHODS = {method.command: method for method in (QARL, RLOO, DISTILL, SFT)}


def groups_of(method: Method = QARL) -> tuple[type, ...]:
    """
    The dataclasses whose fields are the keys of a recipe.

    Args:
        method: What is trained.
    """
    from trl import ModelConfig

    return method.data, method.config_class(), ModelConfig


# The choice of one ---------------------------------------------------------------------------------------------------


def choose_method(argv: Sequence[str], command: str | None = None) -> tuple[Method, str]:
    """
    Choose what a recipe trains, by its keys: what knows most of them, so that a wrong key is reported as one.

    Args:
        argv: The command line, with the recipe.
        command: The command that the user named; `None`: none.

    Returns:
        The method, and a line for the user if the recipe may be another's too; empty if it may not.

    Raises:
        FileNotFoundError: if the recipe is missing.
        ValueError: if it cannot be read.
    """
    if command is not None:
        return METHODS[command], ""

    keys = keys_of(argv)
    unknown = {}
    for method in METHODS.values():
        # A key that no method knows counts for all of them, and decides nothing.
        known = {field.name for group in groups_of(method) for field in fields(group)}
        unknown[method] = len(keys - known)

    fewest = min(unknown.values())
    # In the order of `METHODS`, in which `qarl-trl train` is the first.
    chosen, *others = [method for method, number in unknown.items() if number == fewest]
    if not others:
        return chosen, ""
    names = " or ".join(method.command for method in others)
    return chosen, f"Read as a recipe of qarl-trl {chosen.command}. Its keys also fit {names}: --trainer says which."


def keys_of(argv: Sequence[str]) -> set[str]:
    """
    The keys of a recipe, and of the options that override it.

    Args:
        argv: The command line, with the recipe.

    Raises:
        FileNotFoundError: if the recipe is missing.
        ValueError: if it cannot be read.
    """
    from .recipe_file import read_recipe

    keys: set[str] = set()
    for place, word in enumerate(argv):
        if not word.startswith("--"):
            continue
        name, has_value, value = word.removeprefix("--").partition("=")
        if name == "config":
            # `--config FILE` or `--config=FILE`.
            recipe = value if has_value else argv[place + 1]
            keys |= read_recipe(Path(recipe)).keys()
        else:
            keys.add(name.replace("-", "_"))
    return keys
