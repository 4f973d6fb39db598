"""Train from a recipe, a flat YAML file: qarl-trl train --config recipe.yaml [--key value ...]

Its keys are the options below and TRL's. The command line overrides it. `base: other.yaml` names one that it extends.
On several GPUs: accelerate launch -m qarl_trl.train --config recipe.yaml
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import partial
from textwrap import fill, indent
from typing import TYPE_CHECKING, Any

from .allocator import let_segments_grow
from .data import load_math_dataset, local_path
from .errors import naming_config
from .redact import redact
from .rewards import REWARD_TIMEOUT_S, load_rewards


# At run time inside of functions: `--help` of other commands must be instant, and a dry run loads no vLLM.
if TYPE_CHECKING:
    from datasets import Dataset
    from trl import ModelConfig

    from .config import QaRLConfig
    from .trainer import QaRLTrainer


def _arg(*, help: str, **default: Any) -> Any:
    """A field with a help text. transformers' `HfArg` does the same, but its import takes seconds."""
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
    reward_timeout: float = _arg(
        default=REWARD_TIMEOUT_S,
        help="Seconds that math_reward may take for a batch. Answers that are not graded then count as wrong.",
    )
    dry_run: bool = _arg(default=False, help="Only check and print the settings; load nothing.")


# Groups of our fields in `--help`, by the beginnings of their names.
GROUPS = {
    "Data and rewards": tuple(option.name for option in fields(QaRLScriptArguments)),
    "Loss": ("loss_type", "tbpo_", "advantage_", "optim_muon"),
    "Quantization": ("quant", "learner_", "lora_base", "export_"),
    "Engine and memory": ("vllm_engine_", "verify_", "sync_", "mismatch_", "max_tokens_"),
}


def parse(
    argv: Sequence[str], any_device: bool = False, engine_only: bool = False
) -> tuple[QaRLScriptArguments, QaRLConfig, ModelConfig]:
    """
    Read and check the command line and the recipe that it names.

    Args:
        argv: The command line, without the program's name.
        any_device: Accept a recipe for GPUs on a machine without one, as a dry run does.
        engine_only: Ignore the data and the checkpoint to resume from, which a server's machine may lack.

    Returns:
        The settings of data and rewards, of the trainer, and of the model.

    Raises:
        FileNotFoundError: if the recipe or a dataset's file is missing.
        ValueError: for unknown keys and refused settings.
    """
    import torch

    from .checkpoints.resume import resume_path
    from .recipe import RecipeParser

    parser = RecipeParser(_groups())
    values = parser.read(argv)

    only_checks = any_device or values.get("dry_run")
    if only_checks and not torch.cuda.is_available():
        # transformers then accepts a GPU's settings, bf16 among them.
        values.setdefault("use_cpu", True)
    if not only_checks and not engine_only:
        # Before the settings are built, which asks torch about its devices.
        let_segments_grow(values)

    script_args, training_args, model_args = parser.build(values)
    if not model_args.model_name_or_path:
        raise ValueError("model_name_or_path is missing: give a Hub id or a model folder.")

    if not engine_only:
        # Before a model loads, which takes minutes.
        _check_data(script_args, with_eval=training_args.eval_strategy != "no")
        training_args.resume_from_checkpoint = resume_path(training_args.resume_from_checkpoint, training_args)
    return script_args, training_args, model_args


def _groups() -> tuple[type, ...]:
    """The dataclasses whose fields are the keys of a recipe."""
    from trl import ModelConfig

    from .config import QaRLConfig

    return QaRLScriptArguments, QaRLConfig, ModelConfig


def _check_data(script_args: QaRLScriptArguments, with_eval: bool) -> None:
    """Refuse settings without data, or whose files are missing."""
    names = ["dataset_name_or_path"]
    if with_eval:
        names.append("eval_dataset_name_or_path")

    for name in names:
        name_or_path = getattr(script_args, name)
        if not name_or_path:
            raise ValueError(f"{name} is missing: give a Hub id or a .jsonl, .json or .parquet file.")
        local_path(name_or_path)


def describe_options() -> str:
    """The text of `--help`: our fields in groups."""
    from trl import GRPOConfig

    # Our loss_type takes TBPO, too.
    stock = {option.name for option in fields(GRPOConfig)} - {"loss_type"}
    script_group, config_group, _ = _groups()
    options = [*fields(script_group), *fields(config_group)]
    added = [option for option in options if option.name not in stock]

    lines = [f"usage: qarl-trl train --config FILE [--key value ...]\n\n{__doc__}"]
    for title, starts in GROUPS.items():
        lines.append(f"{title}\n")
        for option in added:
            if option.name.startswith(starts):
                lines.append(_describe_option(option))
        lines.append("")

    lines.append("TRL's options: the fields of GRPOConfig and ModelConfig, https://huggingface.co/docs/trl")
    return "\n".join(lines)


def _describe_option(option: Field) -> str:
    """Name, meaning and default of a field."""
    text = option.metadata["help"]
    if option.default is not None and option.default is not MISSING:
        text += f" (default: {option.default})"
    return f"  --{option.name}\n" + indent(fill(text, 110), " " * 8)


def make_trainer(script_args: QaRLScriptArguments, training_args: QaRLConfig, model_args: ModelConfig) -> QaRLTrainer:
    """
    Make the trainer of a recipe, with data, model and engine loaded.

    Args:
        script_args: Data and rewards; from [`parse`], as the others.
        training_args: Its `model_init_kwargs` get the model's settings.
        model_args: The model, its dtype, and the adapter.
    """
    from trl import get_peft_config, get_quantization_config

    from .trainer import QaRLTrainer

    reward_funcs = load_rewards(script_args.reward_funcs, script_args.reward_timeout)
    train_dataset, eval_dataset = load_datasets(script_args, with_eval=training_args.eval_strategy != "no")

    model_settings = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        "trust_remote_code": training_args.trust_remote_code,
    }
    # What the user sets there counts.
    training_args.model_init_kwargs = model_settings | (training_args.model_init_kwargs or {})

    with naming_config([model_args.model_name_or_path]):
        return QaRLTrainer(
            model=model_args.model_name_or_path,
            reward_funcs=reward_funcs,
            args=training_args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            quantization_config=get_quantization_config(model_args),
            peft_config=get_peft_config(model_args),
        )


def train(trainer: QaRLTrainer, dataset: str | None) -> None:
    """
    Train, save and (with `push_to_hub`) push.

    Args:
        trainer: From [`make_trainer`].
        dataset: The dataset, for the model card. A local path is left out of it.

    Raises:
        SystemExit: with one line, if no step updated the weights.
    """
    from .checkpoints.saving import NoUpdateError

    args = trainer.args
    # Before the training, in which a reward may change the current folder.
    is_on_hub = bool(dataset) and local_path(str(dataset)) is None
    try:
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    except NoUpdateError as error:
        # An error of the data: a traceback would not help.
        raise SystemExit(f"qarl-trl train: {error}") from error

    if args.push_to_hub:
        # This saves first.
        trainer.push_to_hub(dataset_name=dataset if is_on_hub else None)
    else:
        trainer.save_model(args.output_dir)
    trainer.accelerator.print(f"Model saved in {args.output_dir}")


def load_datasets(script_args: QaRLScriptArguments, with_eval: bool) -> tuple[Dataset, Dataset | None]:
    """
    Load the training set and, if asked for, the evaluation set, with the columns `prompt` and `answer`.

    Args:
        script_args: Where the data are, and how to read them.
        with_eval: Whether to load the evaluation set. Without it the second result is `None`.
    """

    def load(name_or_path: Any, split: str) -> Dataset:
        return load_math_dataset(
            name_or_path,
            split,
            script_args.prompt_template,
            config_name=script_args.dataset_config,
            problem_column=script_args.problem_column,
            answer_column=script_args.answer_column,
            system_prompt=script_args.system_prompt,
            conversational=script_args.conversational,
        )

    train_dataset = load(script_args.dataset_name_or_path, script_args.dataset_split)
    if not with_eval:
        return train_dataset, None
    return train_dataset, load(script_args.eval_dataset_name_or_path, script_args.eval_dataset_split)


def describe(script_args: QaRLScriptArguments, args: QaRLConfig, model_args: ModelConfig) -> str:
    """
    The settings to print: method, batch sizes, and every field that differs from its default.

    Args:
        script_args: Data and rewards; from [`parse`], as the others.
        args: The settings of the trainer.
        model_args: The settings of the model.
    """
    import torch

    from .config import changed_fields

    completions = args.generation_batch_size
    prompts = completions // args.num_generations
    per_update = args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps
    updates = completions * args.num_iterations / per_update
    learner = "quantized" if args.quantized and args.quantize_learner else "in high precision"

    lines = [
        f"model: {model_args.model_name_or_path}, scheme {args.quant_name}, learner {learner}",
        f"rollout batch: {prompts} prompts x {args.num_generations} = {completions} completions "
        f"on {args.world_size} process(es)",
        f"update: {per_update} completions; {updates:g} updates per rollout batch",
    ]
    if not torch.cuda.is_available():
        lines.append("device: no CUDA device here, so the settings were checked for a CPU")

    for group in (script_args, args, model_args):
        for name, value in sorted(changed_fields(group).items()):
            lines.append(f"{type(group).__name__}.{name}: {redact(value, name)!r}")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> Callable[[], None] | None:
    """
    `qarl-trl train`: check everything, and load everything.

    Args:
        argv: The command line after the command's name.

    Returns:
        The training, or `None` after `--help` or a dry run.
    """
    if "--help" in argv or "-h" in argv:
        print(describe_options())
        return None

    from .checkpoints.resume import check_start

    script_args, training_args, model_args = parse(argv)
    # The trainer checks this too, but only after the model has loaded: a script says in `train()` what it resumes.
    check_start(training_args.resume_from_checkpoint, training_args)
    if script_args.dry_run:
        # Finds a reward that cannot be imported.
        load_rewards(script_args.reward_funcs, script_args.reward_timeout)
        # With torchrun, once.
        if training_args.process_index == 0:
            print(describe(script_args, training_args, model_args))
        return None

    trainer = make_trainer(script_args, training_args, model_args)
    return partial(train, trainer, script_args.dataset_name_or_path)


if __name__ == "__main__":
    # `python -m` puts the current folder first: no file there may replace a package.
    if not sys.flags.safe_path:
        sys.path.append(sys.path.pop(0))
    from .cli import main as cli_main

    cli_main(["train", *sys.argv[1:]])
