"""
Train from a recipe: `accelerate launch -m qarl_trl.train --config recipes/<model>/<arm>.yaml [--key value ...]`.

A recipe is a flat YAML file whose keys are fields of [`QaRLScriptArguments`], [`QaRLConfig`] or TRL's `ModelConfig`;
the command line overrides it. Invariants: an unknown key is an error on both, so a typo cannot leave a default in
force; and the recipe's `env:` section is in the environment before this module imports torch, vLLM or TRL.
"""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING


# Only the standard library above: `env:` may hold what torch or vLLM read at import.

if TYPE_CHECKING:
    from datasets import Dataset
    from trl import ModelConfig, TrlParser

    from .config import QaRLConfig


@dataclass
class QaRLScriptArguments:
    """What a recipe says beyond the trainer and the model: the data and the rewards."""

    dataset_name_or_path: str | None = field(
        default=None, metadata={"help": "Hub id, or a local .jsonl, .json or .parquet file. Required."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a Hub dataset."})
    dataset_split: str = field(default="train", metadata={"help": "Split to train on."})
    eval_dataset_name_or_path: str | None = field(
        default=None, metadata={"help": "Dataset to evaluate on; needs eval_strategy."}
    )
    eval_dataset_split: str = field(
        default="test", metadata={"help": "Split to evaluate on; a single local file is any split."}
    )
    problem_column: str | None = field(
        default=None, metadata={"help": "Column of the problem. Unset: problem, question or prompt."}
    )
    answer_column: str | None = field(
        default=None,
        metadata={"help": "Column of the reference answer, dots reach into nested ones. Unset: guessed."},
    )
    prompt_template: str | None = field(
        default=None, metadata={"help": "Text around the problem, which replaces {problem} in it. Unset: nothing."}
    )
    system_prompt: str | None = field(
        default=None, metadata={"help": "System message; replaces one that the data has."}
    )
    conversational: bool = field(
        default=True,
        metadata={"help": "Prompts as chat messages (chat template applied), or as plain text."},
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on the first so many problems."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on the first so many problems."})
    reward_funcs: list[str] = field(
        default_factory=lambda: ["math_reward"],
        metadata={"help": "Names in qarl_trl.rewards, or dotted import paths such as my_package.my_reward."},
    )
    dry_run: bool = field(
        default=False,
        metadata={"help": "Check the settings and a local dataset, print them, load no model."},
    )

    def __post_init__(self) -> None:
        if isinstance(self.reward_funcs, str):  # `reward_funcs: math_reward` in YAML
            self.reward_funcs = [self.reward_funcs]


def make_parser() -> "TrlParser":
    """
    Parser of [`QaRLScriptArguments`], [`QaRLConfig`] and `ModelConfig`.

    Returns:
        [`~trl.TrlParser`]: Its `parse_args_and_config()` refuses unknown keys. Abbreviated options are unknown too.
    """
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
    Read the command line and the recipe it names.

    Args:
        argv (`Sequence[str]`, *optional*):
            Arguments without the program's name. Defaults to those of the process.

    Returns:
        `tuple`: [`QaRLScriptArguments`], [`QaRLConfig`] and `ModelConfig`, validated.

    Raises:
        ValueError: On unknown keys, and on settings that do not fit together.
        FileNotFoundError: If the recipe is missing.
    """
    argv = [part for arg in (sys.argv[1:] if argv is None else argv) for part in _split_config(arg)]
    _export_env(argv)
    script_args, training_args, model_args = make_parser().parse_args_and_config(args=argv)
    _check(script_args, training_args, model_args)
    return script_args, training_args, model_args


def main(script_args: QaRLScriptArguments, training_args: "QaRLConfig", model_args: "ModelConfig") -> None:
    """
    Train, save and (with `push_to_hub`) publish.

    Args:
        script_args ([`QaRLScriptArguments`]):
            Data and rewards.
        training_args ([`QaRLConfig`]):
            The trainer's settings.
        model_args ([`~trl.ModelConfig`]):
            The model and, with `use_peft`, its adapter.
    """
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
    if hasattr(trainer, "end"):  # transformers >= 5.18: closes trackers and the process group
        trainer.end()


def load_rewards(names: Sequence[str]) -> list[Callable[..., list[float | None]]]:
    """
    Reward functions by name.

    Args:
        names (`Sequence[str]`):
            Functions of `qarl_trl.rewards` (`math_reward`, `boxed_format_reward`) or dotted import paths, which are
            also looked up from the current directory.

    Returns:
        `list[Callable]`: The functions, in order.

    Raises:
        ValueError: If a name is not found.
    """
    from . import rewards

    known = {"math_reward": rewards.math_reward, "boxed_format_reward": rewards.boxed_format_reward}
    return [known[name] if name in known else _import_reward(name, sorted(known)) for name in names]


def load_datasets(script_args: QaRLScriptArguments, with_eval: bool) -> tuple["Dataset", "Dataset | None"]:
    """
    The training set and, if asked for, the evaluation set.

    Args:
        script_args ([`QaRLScriptArguments`]):
            Where they are and how they read.
        with_eval (`bool`):
            Whether an evaluation set is needed.

    Returns:
        `tuple`: Datasets with the columns `prompt` and `answer`; the second is `None` without evaluation.
    """
    from .data import load_math_dataset

    def load(name: str, split: str, max_samples: int | None) -> "Dataset":
        return load_math_dataset(
            name,
            split,
            script_args.prompt_template,
            config_name=script_args.dataset_config,
            problem_column=script_args.problem_column,
            answer_column=script_args.answer_column,
            system_prompt=script_args.system_prompt,
            conversational=script_args.conversational,
            max_samples=max_samples,
        )

    train = load(script_args.dataset_name_or_path, script_args.dataset_split, script_args.max_train_samples)
    if not with_eval:
        return train, None
    return train, load(
        script_args.eval_dataset_name_or_path, script_args.eval_dataset_split, script_args.max_eval_samples
    )


def describe(script_args: QaRLScriptArguments, training_args: "QaRLConfig", model_args: "ModelConfig") -> str:
    """
    The settings as text: the method, the batch arithmetic, a look at the data, and every field off its default.

    Args:
        script_args ([`QaRLScriptArguments`]):
            Data and rewards.
        training_args ([`QaRLConfig`]):
            The trainer's settings.
        model_args ([`~trl.ModelConfig`]):
            The model.

    Returns:
        `str`: Lines to print.
    """
    args = training_args
    per_update = args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps
    updates = args.generation_batch_size * args.num_iterations / per_update
    learner = "" if not args.quantized else f", learner {'quantized' if args.quant_learner else 'in high precision'}"
    lines = [
        f"model: {model_args.model_name_or_path}, scheme {args.quant_name}{learner}",
        f"objective: {args.loss_type}, {'muon' if args.optim_muon else args.optim.value} at {args.learning_rate:g}",
        f"rollout batch: {args.generation_batch_size // args.num_generations} prompts x {args.num_generations} = "
        f"{args.generation_batch_size} completions on {args.world_size} process(es)",
        f"update: {per_update} completions; {updates:g} updates per rollout batch",
        *_describe_data(script_args),
    ]
    for group in (script_args, training_args, model_args):
        for f in sorted(fields(group), key=lambda f: f.name):
            default = f.default_factory() if callable(f.default_factory) else f.default
            value = getattr(group, f.name)
            if value != default:
                shown = "<hidden>" if f.name.endswith("_token") else repr(value)
                lines.append(f"{type(group).__name__}.{f.name}: {shown}")
    return "\n".join(lines)


def run(argv: Sequence[str] | None = None) -> None:
    """
    Entry of `python -m qarl_trl.train` and of `qarl-trl train`.

    Args:
        argv (`Sequence[str]`, *optional*):
            Arguments without the program's name.
    """
    script_args, training_args, model_args = parse(argv)
    if not script_args.dry_run:
        main(script_args, training_args, model_args)
    elif training_args.process_index == 0:
        print(describe(script_args, training_args, model_args))


def _split_config(arg: str) -> list[str]:
    # TrlParser knows `--config FILE` only; argparse users write `--config=FILE` as well.
    return arg.split("=", 1) if arg.startswith("--config=") else [arg]


def _export_env(argv: Sequence[str]) -> None:
    """TrlParser exports `env:` too, but building it needs `QaRLConfig`, and with it torch and vLLM."""
    if "--config" not in argv[:-1]:
        return
    import yaml

    path = Path(argv[argv.index("--config") + 1])
    if not path.is_file():
        raise FileNotFoundError(f"--config {path}: there is no such file in {Path.cwd()}. Give the path of a recipe.")
    recipe = yaml.safe_load(path.read_text())
    env = recipe.get("env") if isinstance(recipe, dict) else None
    if isinstance(env, dict):
        os.environ.update({key: str(value) for key, value in env.items()})


def _check(script_args: QaRLScriptArguments, training_args: "QaRLConfig", model_args: "ModelConfig") -> None:
    """What only the three together can tell, before anything is loaded."""
    from .data import local_path

    if not model_args.model_name_or_path:
        raise ValueError(
            "model_name_or_path is missing: give a Hub id or a model folder, in the recipe or as an option."
        )
    if not script_args.dataset_name_or_path:
        raise ValueError("dataset_name_or_path is missing: give a Hub id or a .jsonl, .json or .parquet file.")
    local_path(script_args.dataset_name_or_path)
    if training_args.eval_strategy != "no":
        if not script_args.eval_dataset_name_or_path:
            raise ValueError(
                f"eval_strategy={training_args.eval_strategy!r} needs eval_dataset_name_or_path; set it, or "
                "eval_strategy: 'no'."
            )
        local_path(script_args.eval_dataset_name_or_path)
    if training_args.quantized and (model_args.load_in_4bit or model_args.load_in_8bit):
        raise ValueError(
            "load_in_4bit and load_in_8bit quantize the masters with bitsandbytes, but QaRL quantizes high-precision "
            "masters itself. Remove them, or set quant_scheme: none."
        )
    if training_args.quantized and model_args.use_peft:
        from trl import get_peft_config

        from .lora_config import check_lora

        check_lora(get_peft_config(model_args), training_args)
    load_rewards(script_args.reward_funcs)


def _import_reward(name: str, known: list[str]) -> Callable[..., list[float | None]]:
    module_name, _, attribute = name.rpartition(".")
    if not module_name:
        raise ValueError(f"reward_funcs has {name!r}. Choose from {known}, or give a dotted path: my_package.{name}.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"reward_funcs has {name!r}, which cannot be imported: {error}. Run from the folder that holds the "
            f"module, install it, or choose from {known}."
        ) from error


def _describe_data(script_args: QaRLScriptArguments) -> list[str]:
    from .data import local_path

    name = script_args.dataset_name_or_path
    if local_path(name) is None:
        return [f"dataset: {name} (Hub id, not contacted)"]
    row = load_datasets(replace(script_args, max_train_samples=1), with_eval=False)[0][0]
    return [f"dataset: {name}", f"first prompt: {row['prompt']!r}", f"first answer: {row['answer']!r}"]


if __name__ == "__main__":
    run()
