"""
Train from a recipe: `accelerate launch -m qarl_trl.train --config recipes/<model>/<arm>.yaml [--key value ...]`.

A recipe is a flat YAML file whose keys are fields of [`QaRLScriptArguments`], [`QaRLConfig`] or TRL's `ModelConfig`;
the command line overrides it. With `base: other.yaml` it says only what differs from another recipe. An unknown key is an error
everywhere, so a typo cannot leave a default in force.
"""

import argparse
import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING


# Only the standard library above: a recipe's `env:` may hold what torch or vLLM read at import.

if TYPE_CHECKING:
    from datasets import Dataset
    from trl import ModelConfig, TrlParser

    from .config import QaRLConfig

REWARDS = ("math_reward", "boxed_format_reward")


@dataclass
class QaRLScriptArguments:
    """What a recipe says beyond the trainer and the model: the data and the rewards."""

    dataset_name_or_path: str | None = field(
        default=None, metadata={"help": "Hub id, or a local .jsonl, .json or .parquet file. Required."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a Hub dataset."})
    dataset_split: str = field(default="train", metadata={"help": "Split to train on."})
    eval_dataset_name_or_path: str | None = field(default=None, metadata={"help": "Needed with eval_strategy."})
    eval_dataset_split: str = field(default="test", metadata={"help": "Of the Hub; a single local file is any split."})
    problem_column: str | None = field(default=None, metadata={"help": "Unset: problem, question or prompt."})
    answer_column: str | None = field(
        default=None, metadata={"help": "Reference answer; dots reach into nested columns. Unset: guessed."}
    )
    prompt_template: str | None = field(default=None, metadata={"help": "Text around {problem}. Unset: nothing."})
    system_prompt: str | None = field(default=None, metadata={"help": "Replaces a system message of the data."})
    conversational: bool = field(default=True, metadata={"help": "Prompts as chat messages, or as plain text."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on the first so many problems."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on the first so many problems."})
    reward_funcs: list[str] = field(
        default_factory=lambda: ["math_reward"],
        metadata={
            "help": "math_reward, boxed_format_reward, or dotted import paths, also from the current directory: "
            "trl.rewards.think_format_reward, my_package.my_reward."
        },
    )
    dry_run: bool = field(
        default=False, metadata={"help": "Check the settings and a local dataset, print them, load no model."}
    )

    def __post_init__(self) -> None:
        if isinstance(self.reward_funcs, str):  # `reward_funcs: math_reward` in YAML
            self.reward_funcs = [self.reward_funcs]


def make_parser() -> "TrlParser":
    """Parser of [`QaRLScriptArguments`], [`QaRLConfig`] and `ModelConfig`. Abbreviated options are unknown to it."""
    from trl import ModelConfig, TrlParser

    from .config import QaRLConfig

    return TrlParser(
        (QaRLScriptArguments, QaRLConfig, ModelConfig),
        prog="qarl-trl train",
        description="Train with qarl_trl. --config FILE reads a YAML recipe; the options below override it.",
        allow_abbrev=False,
    )


def parse(argv: Sequence[str] | None = None) -> tuple[QaRLScriptArguments, "QaRLConfig", "ModelConfig"]:
    """
    Read and check the command line (without the program's name; by default the process's) and the recipe it names.

    Raises:
        ValueError: On unknown keys, and on settings that do not fit together.
        FileNotFoundError: If the recipe or a local dataset is missing.
    """
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--config", type=Path)
    given, options = early.parse_known_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        if given.config is not None:
            options = ["--config", str(_resolve(given.config, Path(folder))), *options]
        script_args, training_args, model_args = make_parser().parse_args_and_config(args=options)
    _check(script_args, training_args, model_args)
    return script_args, training_args, model_args


def main(script_args: QaRLScriptArguments, training_args: "QaRLConfig", model_args: "ModelConfig") -> None:
    """Train, save and (with `push_to_hub`) publish."""
    from trl import get_peft_config, get_quantization_config

    from .data import local_path
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
    trainer = QaRLTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=reward_funcs,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model(training_args.output_dir)
    trainer.accelerator.print(f"Model saved in {training_args.output_dir}")
    if training_args.push_to_hub:
        name = script_args.dataset_name_or_path
        trainer.push_to_hub(dataset_name=name if local_path(name) is None else None)


def load_rewards(names: Sequence[str]) -> list[Callable[..., list[float | None]]]:
    """Reward functions by name or dotted path, in order; `ValueError` for a name that is not found."""
    functions = []
    for name in names:
        path = f"{__package__}.rewards.{name}" if name in REWARDS else name
        module, _, attribute = path.rpartition(".")
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        try:
            functions.append(getattr(importlib.import_module(module or name), attribute))
        except (ImportError, AttributeError) as error:
            raise ValueError(
                f"reward_funcs has {name!r}, which cannot be imported: {error}. Give one of {REWARDS}, or the dotted path of "
                "a function that is installed or in the current folder."
            ) from error
    return functions


def load_datasets(script_args: QaRLScriptArguments, with_eval: bool) -> tuple["Dataset", "Dataset | None"]:
    """The training set and, if asked for, the evaluation set, with the columns `prompt` and `answer`."""
    from .data import load_math_dataset

    s = script_args
    load = partial(
        load_math_dataset,
        prompt_template=s.prompt_template,
        config_name=s.dataset_config,
        problem_column=s.problem_column,
        answer_column=s.answer_column,
        system_prompt=s.system_prompt,
        conversational=s.conversational,
    )
    train = load(s.dataset_name_or_path, s.dataset_split, max_samples=s.max_train_samples)
    if not with_eval:
        return train, None
    return train, load(s.eval_dataset_name_or_path, s.eval_dataset_split, max_samples=s.max_eval_samples)


def describe(script_args: QaRLScriptArguments, training_args: "QaRLConfig", model_args: "ModelConfig") -> str:
    """The settings to print: the method, the batch arithmetic, a look at local data, every field off its default."""
    from .config import changed_fields
    from .data import local_path

    args = training_args
    per_update = args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps
    updates = args.generation_batch_size * args.num_iterations / per_update
    learner = "" if not args.quantized else f", learner {'quantized' if args.quant_learner else 'in high precision'}"
    data = script_args.dataset_name_or_path
    lines = [
        f"model: {model_args.model_name_or_path}, scheme {args.quant_name}{learner}",
        f"objective: {args.loss_type}, {'muon' if args.optim_muon else args.optim.value} at {args.learning_rate:g}",
        f"rollout batch: {args.generation_batch_size // args.num_generations} prompts x {args.num_generations} = "
        f"{args.generation_batch_size} completions on {args.world_size} process(es)",
        f"update: {per_update} completions; {updates:g} updates per rollout batch",
    ]
    if local_path(data) is None:
        lines.append(f"dataset: {data} (Hub id, not contacted)")
    else:
        row = load_datasets(replace(script_args, max_train_samples=1), with_eval=False)[0][0]
        lines += [f"dataset: {data}", f"first prompt: {row['prompt']!r}", f"first answer: {row['answer']!r}"]
    for group in (script_args, training_args, model_args):
        for name, value in sorted(changed_fields(group).items()):
            lines.append(f"{type(group).__name__}.{name}: {'<hidden>' if name.endswith('_token') else repr(value)}")
    return "\n".join(lines)


def run(argv: Sequence[str] | None = None) -> None:
    """`python -m qarl_trl.train` and `qarl-trl train`. Wrong settings are one message and exit code 2."""
    try:
        script_args, training_args, model_args = parse(argv)
    except (ValueError, FileNotFoundError, ImportError) as error:
        print(f"qarl-trl train: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    if not script_args.dry_run:
        main(script_args, training_args, model_args)
    elif training_args.process_index == 0:
        print(describe(script_args, training_args, model_args))


def _resolve(recipe: Path, folder: Path) -> Path:
    """
    The file for TrlParser: `recipe`, or in `folder` the recipe that its `base:` names with the other keys put on top.

    TrlParser exports `env:` too, but building it needs `QaRLConfig`, and with it torch and vLLM.
    """
    import yaml

    if not recipe.is_file():
        raise FileNotFoundError(f"--config {recipe}: there is no such file in {Path.cwd()}.")
    content = yaml.safe_load(recipe.read_text())
    if not isinstance(content, dict):
        return recipe
    if "base" in content:
        base = recipe.parent / content.pop("base")
        if not base.is_file():
            raise FileNotFoundError(
                f"base of {recipe}: there is no file {base}. Give a path from the recipe's folder."
            )
        below = yaml.safe_load(base.read_text())
        if not isinstance(below, dict) or "base" in below:
            raise ValueError(f"base of {recipe}: {base} must be a whole recipe, without a base of its own.")
        content, recipe = below | content, folder / recipe.name
        recipe.write_text(yaml.safe_dump(content))
    if isinstance(content.get("env"), dict):
        os.environ.update({key: str(value) for key, value in content["env"].items()})
    return recipe


def _check(script_args: QaRLScriptArguments, training_args: "QaRLConfig", model_args: "ModelConfig") -> None:
    """What only the three together can tell, before anything is loaded."""
    from .checkpoints.resume import resume_path
    from .data import local_path

    if not model_args.model_name_or_path:
        raise ValueError("model_name_or_path is missing: give a Hub id or a model folder.")
    for key in ("dataset_name_or_path", "eval_dataset_name_or_path"):
        if key.startswith("eval") and training_args.eval_strategy == "no":
            continue
        if not (name := getattr(script_args, key)):
            raise ValueError(f"{key} is missing: give a Hub id or a .jsonl, .json or .parquet file.")
        local_path(name)
    if training_args.quantized and (model_args.load_in_4bit or model_args.load_in_8bit):
        raise ValueError(
            "load_in_4bit and load_in_8bit leave no high-precision masters. Remove them, or set quant_scheme: none."
        )
    if training_args.quantized and model_args.use_peft:
        from trl import get_peft_config

        from .preflight import check_adapter

        check_adapter(get_peft_config(model_args), training_args)
    load_rewards(script_args.reward_funcs)
    training_args.resume_from_checkpoint = resume_path(training_args.resume_from_checkpoint, training_args)


if __name__ == "__main__":
    run()
