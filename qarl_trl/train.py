"""Train from a recipe: `accelerate launch -m qarl_trl.train --config recipes/<model>/<arm>.yaml [--key value ...]`.

A recipe is a flat YAML file whose keys are fields of [`QaRLScriptArguments`], [`QaRLConfig`] or TRL's `ModelConfig`;
the command line overrides it, and `base: other.yaml` names a recipe to start from. An unknown key is an error on both.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .recipe import check_keys, checked, construct, read_recipe
from .redact import redact


# Only the standard library above: a recipe's `env:` may hold what torch or vLLM read at import.

if TYPE_CHECKING:
    from datasets import Dataset
    from trl import ModelConfig

    from .config import QaRLConfig
    from .trainer import QaRLTrainer

USAGE = "qarl-trl train --config FILE [--key value ...]"
DRY_RUN = "Check the settings, print them, load no data and no model."


@dataclass
class QaRLScriptArguments:
    """What a recipe says beyond the trainer and the model: the data and the rewards."""

    dataset_name_or_path: str | None = field(
        default=None, metadata={"help": "Hub id, or a local .jsonl, .json or .parquet file. Required."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a Hub dataset."})
    dataset_split: str = field(default="train", metadata={"help": "Split to train on, slices included: train[:1000]."})
    eval_dataset_name_or_path: str | None = field(default=None, metadata={"help": "Needed with eval_strategy."})
    eval_dataset_split: str = field(default="test", metadata={"help": "Of the Hub; a single local file is any split."})
    problem_column: str | None = field(default=None, metadata={"help": "Unset: problem, question or prompt."})
    answer_column: str | None = field(
        default=None, metadata={"help": "Reference answer; dots reach into nested columns. Unset: guessed."}
    )
    prompt_template: str | None = field(default=None, metadata={"help": "Text around {problem}. Unset: nothing."})
    system_prompt: str | None = field(default=None, metadata={"help": "Replaces a system message of the data."})
    conversational: bool = field(default=True, metadata={"help": "Prompts as chat messages, or as plain text."})
    reward_funcs: list[str] = field(
        default_factory=lambda: ["math_reward"],
        metadata={
            "help": "math_reward, or dotted import paths, also from the current directory: "
            "trl.rewards.think_format_reward, my_package.my_reward."
        },
    )
    dry_run: bool = field(default=False, metadata={"help": DRY_RUN})


def parse(
    argv: Sequence[str] | None = None, any_device: bool = False, engine_only: bool = False
) -> tuple[QaRLScriptArguments, "QaRLConfig", "ModelConfig"]:
    """
    Read and check the command line (without the program's name; by default the process's) and the recipe it names.

    With `any_device`, and for a dry run, a recipe for GPUs is also read where there is none. With `engine_only` data, rewards
    and the checkpoint to resume from, which an engine's machine may lack, are not looked at. `ValueError` on unknown keys, wrong
    types and settings that do not fit together, `FileNotFoundError` if the recipe or a local dataset is missing.
    """
    own, options = _own_parser().parse_known_args(argv)
    values = read_recipe(own.config) if own.config else {}
    if own.dry_run:
        os.environ["HF_HUB_OFFLINE"], any_device, values["dry_run"] = "1", True, True
    import torch  # only now: the recipe's `env:` may hold what torch or vLLM read at import

    groups = _groups()
    values |= _given(options, groups)
    check_keys(values, [field.name for group in groups for field in fields(group)])
    values = checked(values, groups)
    if any_device and not torch.cuda.is_available():  # transformers then accepts a GPU's settings, bf16 among them
        values.setdefault("use_cpu", True)
    script_args, training_args, model_args = (construct(group, values) for group in groups)
    if not model_args.model_name_or_path:
        raise ValueError("model_name_or_path is missing: give a Hub id or a model folder.")
    if not engine_only:
        _check_inputs(script_args, training_args)
    return script_args, training_args, model_args


def _check_inputs(script_args: QaRLScriptArguments, training_args: "QaRLConfig") -> None:
    from .checkpoints.resume import resume_path
    from .data import local_path

    names = ["dataset_name_or_path"] + ["eval_dataset_name_or_path"] * (training_args.eval_strategy != "no")
    for name in names:
        if not getattr(script_args, name):
            raise ValueError(f"{name} is missing: give a Hub id or a .jsonl, .json or .parquet file.")
        local_path(getattr(script_args, name))
    training_args.resume_from_checkpoint = resume_path(training_args.resume_from_checkpoint, training_args)


def _own_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("qarl-trl train", USAGE, description=__doc__, add_help=False, allow_abbrev=False)
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML recipe; the other options override its keys."
    )
    parser.add_argument("--dry_run", action="store_true", help=DRY_RUN)
    return parser


def _groups() -> tuple[type, ...]:
    from trl import ModelConfig

    from .config import QaRLConfig

    return QaRLScriptArguments, QaRLConfig, ModelConfig


def _given(options: Sequence[str], groups: tuple[type, ...]) -> dict[str, Any]:
    """The options by key, as texts: [`checked`] gives those of the command line and of a recipe their types."""
    from transformers import HfArgumentParser

    parser = HfArgumentParser(groups, exit_on_error=False, allow_abbrev=False, add_help=False)
    for action in parser._actions:
        action.default, action.type, action.choices = argparse.SUPPRESS, None, None
    try:
        given, unknown = parser.parse_known_args(options)
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from None
    return vars(given) | {option.partition("=")[0].lstrip("-"): None for option in unknown}


def make_trainer(
    script_args: QaRLScriptArguments, training_args: "QaRLConfig", model_args: "ModelConfig"
) -> "QaRLTrainer":
    """The trainer of a recipe, with data, model and engine loaded."""
    from trl import get_peft_config, get_quantization_config

    from .rewards import load_rewards
    from .trainer import QaRLTrainer

    reward_funcs = load_rewards(script_args.reward_funcs)
    train_dataset, eval_dataset = load_datasets(script_args, with_eval=training_args.eval_strategy != "no")
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        "trust_remote_code": training_args.trust_remote_code,
        **(training_args.model_init_kwargs or {}),
    }
    return QaRLTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=reward_funcs,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )


def train(trainer: "QaRLTrainer", dataset: str) -> None:
    """Train, save and (with `push_to_hub`) push; `dataset` is a name for the model card."""
    from .checkpoints.mixin import NothingTrained
    from .data import local_path
    from .export.push import HubError

    args = trainer.args
    try:
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        if args.push_to_hub:  # saves first
            trainer.push_to_hub(dataset_name=dataset if local_path(dataset) is None else None)
        else:
            trainer.save_model(args.output_dir)
    except (HubError, NothingTrained) as error:
        raise SystemExit(f"qarl-trl train: {error}") from error
    trainer.accelerator.print(f"Model saved in {args.output_dir}")


def load_datasets(script_args: QaRLScriptArguments, with_eval: bool) -> tuple["Dataset", "Dataset | None"]:
    """The training set and, if asked for, the evaluation set, with the columns `prompt` and `answer`."""
    from .data import load_math_dataset

    s = script_args
    names = "problem_column", "answer_column", "prompt_template", "system_prompt", "conversational"
    common = {name: getattr(s, name) for name in names} | {"config_name": s.dataset_config}
    train = load_math_dataset(s.dataset_name_or_path, s.dataset_split, **common)
    if not with_eval:
        return train, None
    return train, load_math_dataset(s.eval_dataset_name_or_path, s.eval_dataset_split, **common)


def describe(script_args: QaRLScriptArguments, training_args: "QaRLConfig", model_args: "ModelConfig") -> str:
    """The settings to print: the method, the batch arithmetic, every field off its default."""
    import torch

    from .config import changed_fields

    args = training_args
    per_update = args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps
    updates = args.generation_batch_size * args.num_iterations / per_update
    learner = "quantized" if args.quantized and args.quantize_learner else "in high precision"
    lines = [
        f"model: {model_args.model_name_or_path}, scheme {args.quant_name}, learner {learner}",
        f"rollout batch: {args.generation_batch_size // args.num_generations} prompts x {args.num_generations} = "
        f"{args.generation_batch_size} completions on {args.world_size} process(es)",
        f"update: {per_update} completions; {updates:g} updates per rollout batch",
    ]
    if not torch.cuda.is_available():
        lines.append("device: no CUDA device here, so the settings were checked for a CPU")
    for group in (script_args, training_args, model_args):
        for name, value in sorted(changed_fields(group).items()):
            lines.append(f"{type(group).__name__}.{name}: {redact(value, name)!r}")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> Callable[[], None] | None:
    """`qarl-trl train`: check everything, load everything, and return the training; `None` after a dry run."""
    if {"--help", "-h", "--help_all"} & {*argv}:
        _print_help(every_key="--help_all" in argv)
        return None
    from .rewards import load_rewards

    script_args, training_args, model_args = parse(argv)
    if not script_args.dry_run:
        return partial(train, make_trainer(script_args, training_args, model_args), script_args.dataset_name_or_path)
    load_rewards(script_args.reward_funcs)
    if training_args.process_index == 0:
        print(describe(script_args, training_args, model_args))
    return None


def _print_help(every_key: bool) -> None:
    parser = _own_parser()
    parser.add_argument("--help_all", action="store_true", help="Every key, also of QaRLConfig and of ModelConfig.")
    parser.add_argument("--debug", action="store_true", help="Bad input ends in a traceback.")
    for own in fields(QaRLScriptArguments):
        if own.name != "dry_run":
            parser.add_argument(f"--{own.name}", metavar="VALUE", help=own.metadata["help"])
    if every_key:  # needs the libraries that hold the others
        from transformers import HfArgumentParser

        parser = HfArgumentParser(_groups(), prog=parser.prog, usage=USAGE, description=__doc__)
    parser.print_help()


if __name__ == "__main__":
    if not sys.flags.safe_path:  # `python -m` has the current folder first: no file there stands in for a package
        sys.path.append(sys.path.pop(0))
    from .cli import main as cli_main

    cli_main(["train", *sys.argv[1:]])
