"""Train from a recipe, a flat YAML file: qarl-trl train --config recipe.yaml [--key value ...]

Its keys are the options below and TRL's. The command line overrides it. `base: other.yaml` names a recipe that it extends.
On several GPUs: accelerate launch -m qarl_trl.train --config recipe.yaml
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from pathlib import Path
from textwrap import fill, indent
from typing import TYPE_CHECKING, Any

from .data import load_math_dataset, local_path
from .recipe import check_keys, checked, construct, read_recipe
from .redact import redact
from .rewards import load_rewards


if TYPE_CHECKING:  # at run time in the functions: `--help` of other commands is instant, and a dry run loads no vLLM
    from datasets import Dataset
    from trl import ModelConfig

    from .config import QaRLConfig
    from .trainer import QaRLTrainer


def _arg(*, help: str, **default: Any) -> Any:
    return field(metadata={"help": help}, **default)


@dataclass
class QaRLScriptArguments:
    """The fields of a recipe for data and rewards; the others belong to the trainer and the model."""

    dataset_name_or_path: str | None = _arg(default=None, help="Hub id, folder, .jsonl, .json or .parquet. Required.")
    dataset_config: str | None = _arg(default=None, help="Configuration of a Hub dataset, e.g. main of openai/gsm8k.")
    dataset_split: str = _arg(default="train", help="Split to train on; slices such as train[:1000] work.")
    eval_dataset_name_or_path: str | None = _arg(default=None, help="Dataset to evaluate on, for eval_strategy.")
    eval_dataset_split: str = _arg(default="test", help="Split to evaluate on; a local file has only one.")
    problem_column: str | None = _arg(default=None, help="Column of the problems. Unset: problem, question or prompt.")
    answer_column: str | None = _arg(default=None, help="Column of the answers (a.b: nested). Unset: answer, ...")
    prompt_template: str | None = _arg(default=None, help="Text that contains {problem}. Unset: the problem alone.")
    system_prompt: str | None = _arg(default=None, help="System message; replaces one in the data.")
    conversational: bool = _arg(default=True, help="Prompts as chat messages. False: as text, without chat template.")
    reward_funcs: list[str] = field(
        default_factory=lambda: ["math_reward"],
        metadata={"help": "math_reward, or import paths such as my_rewards.my_reward, also from the current folder."},
    )
    dry_run: bool = _arg(default=False, help="Only check and print the settings; load nothing.")


def parse(
    argv: Sequence[str], any_device: bool = False, engine_only: bool = False
) -> tuple[QaRLScriptArguments, "QaRLConfig", "ModelConfig"]:
    """
    Read and check the command line (without the program's name) and the recipe that it names.

    `any_device`, or a dry run, accepts a recipe for GPUs on a machine without one. `engine_only` ignores the data and the
    checkpoint to resume from, which a server's machine may lack. `FileNotFoundError`, or `ValueError`.
    """
    import torch

    from .checkpoints.resume import resume_path

    groups = _groups()
    given = _given(argv)
    config = given.pop("config", None)
    values = (read_recipe(Path(str(config))) if config else {}) | given
    check_keys(values, [field.name for group in groups for field in fields(group)])
    values = checked(values, groups)
    if (any_device or values.get("dry_run")) and not torch.cuda.is_available():
        values.setdefault("use_cpu", True)  # transformers then accepts a GPU's settings, bf16 among them
    script_args, training_args, model_args = (construct(group, values) for group in groups)
    if not model_args.model_name_or_path:
        raise ValueError("model_name_or_path is missing: give a Hub id or a model folder.")
    names = ["dataset_name_or_path"] + ["eval_dataset_name_or_path"] * (training_args.eval_strategy != "no")
    for name in [] if engine_only else names:
        if not getattr(script_args, name):
            raise ValueError(f"{name} is missing: give a Hub id or a .jsonl, .json or .parquet file.")
        local_path(getattr(script_args, name))
    if not engine_only:
        training_args.resume_from_checkpoint = resume_path(training_args.resume_from_checkpoint, training_args)
    return script_args, training_args, model_args


def _groups() -> tuple[type, ...]:
    from trl import ModelConfig

    from .config import QaRLConfig

    return QaRLScriptArguments, QaRLConfig, ModelConfig


def _given(argv: Sequence[str]) -> dict[str, Any]:
    """The options by key: a text, a list of texts, or `True` without a value; [`checked`] converts them to their types."""
    given: dict[str, list[str]] = {}
    values: list[str] | None = None
    for word in argv:
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--"):
            values = given[name.replace("-", "_")] = [value] if equals else []
        elif values is None:
            raise ValueError(f"{word!r} is no option: write --key value.")
        else:
            values.append(word)
    return {key: words[0] if len(words) == 1 else words or True for key, words in given.items()}


# Groups of our fields, by the beginnings of their names.
GROUPS = {
    "Data and rewards": tuple(field.name for field in fields(QaRLScriptArguments)),
    "Loss": ("loss_type", "tbpo_", "advantage_", "optim_muon"),
    "Quantization": ("quant", "learner_", "lora_base", "export_"),
    "Engine and memory": ("vllm_engine_", "verify_", "sync_", "mismatch_", "max_tokens_"),
}


def describe_options() -> str:
    """The text of `--help`: our fields in groups."""
    from trl import GRPOConfig

    stock = {one.name for one in fields(GRPOConfig)} - {"loss_type"}
    own = [one for group in _groups()[:2] for one in fields(group) if one.name not in stock]
    lines = [f"usage: qarl-trl train --config FILE [--key value ...]\n\n{__doc__}"]
    for title, starts in GROUPS.items():
        lines.append(f"{title}\n")
        for one in (one for one in own if one.name.startswith(starts)):
            default = "" if one.default in (None, MISSING) else f" (default: {one.default})"
            lines.append(f"  --{one.name}\n{indent(fill(one.metadata['help'] + default, 110), ' ' * 8)}")
        lines.append("")
    lines.append("TRL's options: the fields of GRPOConfig and ModelConfig, https://huggingface.co/docs/trl")
    return "\n".join(lines)


def make_trainer(script_args: QaRLScriptArguments, training_args: "QaRLConfig", model_args: Any) -> "QaRLTrainer":
    """The trainer of a recipe, with data, model and engine loaded."""
    from trl import get_peft_config, get_quantization_config

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


def train(trainer: "QaRLTrainer", dataset: str | None) -> None:
    """Train, save and (with `push_to_hub`) push; `dataset` is a name for the model card."""
    from .checkpoints.saving import NoUpdateError

    args = trainer.args
    try:
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    except NoUpdateError as error:  # an error of the data, so print one line
        raise SystemExit(f"qarl-trl train: {error}") from error
    if args.push_to_hub:  # saves first
        trainer.push_to_hub(dataset_name=dataset if dataset and local_path(dataset) is None else None)
    else:
        trainer.save_model(args.output_dir)
    trainer.accelerator.print(f"Model saved in {args.output_dir}")


def load_datasets(script_args: QaRLScriptArguments, with_eval: bool) -> tuple["Dataset", "Dataset | None"]:
    """The training set and, if asked for, the evaluation set, with the columns `prompt` and `answer`."""
    s: Any = script_args
    names = "problem_column", "answer_column", "prompt_template", "system_prompt", "conversational"
    common = {name: getattr(s, name) for name in names} | {"config_name": s.dataset_config}
    train = load_math_dataset(s.dataset_name_or_path, s.dataset_split, **common)
    if not with_eval:
        return train, None
    return train, load_math_dataset(s.eval_dataset_name_or_path, s.eval_dataset_split, **common)


def describe(script_args: QaRLScriptArguments, args: "QaRLConfig", model_args: Any) -> str:
    """The settings to print: method, batch sizes, and every field that differs from its default."""
    import torch

    from .config import changed_fields

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
    for group in (script_args, args, model_args):
        for name, value in sorted(changed_fields(group).items()):
            lines.append(f"{type(group).__name__}.{name}: {redact(value, name)!r}")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> Callable[[], None] | None:
    """`qarl-trl train`: check everything, load everything, and return the training; `None` after a dry run."""
    if {"--help", "-h"} & {*argv}:
        return print(describe_options())
    script_args, training_args, model_args = parse(argv)
    if not script_args.dry_run:
        return partial(train, make_trainer(script_args, training_args, model_args), script_args.dataset_name_or_path)
    load_rewards(script_args.reward_funcs)
    if training_args.process_index == 0:
        print(describe(script_args, training_args, model_args))
    return None


if __name__ == "__main__":
    if not sys.flags.safe_path:  # `python -m` puts the current folder first: no file there may replace a package
        sys.path.append(sys.path.pop(0))
    from .cli import main as cli_main

    cli_main(["train", *sys.argv[1:]])
