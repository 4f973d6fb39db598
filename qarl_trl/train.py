"""The commands that train from a recipe: `qarl-trl train`, `sft`, `rloo` and `distill`.

`methods` says what each of them trains. On several GPUs: accelerate launch -m qarl_trl.train --config recipe.yaml, or
accelerate launch -m qarl_trl.cli sft --config recipe.yaml.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import MISSING, Field, fields
from functools import partial
from textwrap import fill, indent
from typing import TYPE_CHECKING, Any

from .allocator import let_segments_grow
from .data import local_path
from .errors import naming_config
from .methods import DISTILL, METHODS, QARL, RLOO, SFT, DataArguments, Method
from .options import DATA, GROUPS
from .redact import redact
from .rewards import load_rewards


# At run time inside of functions: `--help` of other commands must be instant, and a dry run loads no vLLM.
if TYPE_CHECKING:
    from datasets import Dataset
    from trl import ModelConfig


_USAGE = """usage: qarl-trl {command} --config FILE [--key value ...]

{about}, from a recipe, a flat YAML file.

Its keys are the options below and TRL's. The command line overrides it. `base: other.yaml` names one that it extends.
On several GPUs: accelerate launch -m qarl_trl.cli {command} --config recipe.yaml
"""


def parse(
    argv: Sequence[str],
    any_device: bool = False,
    engine_only: bool = False,
    method: Method = QARL,
    without: Collection[str] = (),
) -> tuple[Any, Any, ModelConfig]:
    """
    Read and check the command line and the recipe that it names.

    Args:
        argv: The command line, without the program's name.
        any_device: Accept a recipe for GPUs on a machine without one, as a dry run does.
        engine_only: Ignore the data and the checkpoint to resume from, which a server's machine may lack.
        method: What is trained.
        without: Keys of the recipe to leave out, because a command line cannot unset one.

    Returns:
        The settings of the data, `method.data`; of the trainer, its config; and of the model.

    Raises:
        FileNotFoundError: if the recipe or a dataset's file is missing.
        ValueError: for unknown keys and refused settings.
    """
    from .recipe import RecipeParser

    parser = RecipeParser(_groups(method))
    values = parser.read(argv)
    for name in without:
        values.pop(name, None)
    # Before the settings are built, which asks torch about its devices.
    _prepare_devices(values, only_checks=bool(any_device or values.get("dry_run")), engine_only=engine_only)

    script_args, training_args, model_args = parser.build(values)
    if not model_args.model_name_or_path:
        raise ValueError("model_name_or_path is missing: give a Hub id or a model folder.")

    if not engine_only:
        _find_data_and_checkpoint(script_args, training_args)
    return script_args, training_args, model_args


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

    keys = _keys_of(argv)
    unknown = {}
    for method in METHODS.values():
        known = {field.name for group in _groups(method) for field in fields(group)}
        unknown[method] = len(keys - known)

    fewest = min(unknown.values())
    # In the order of `METHODS`, in which `qarl-trl train` is the first.
    chosen, *others = [method for method, number in unknown.items() if number == fewest]
    if not others:
        return chosen, ""
    names = " or ".join(method.command for method in others)
    return chosen, f"Read as a recipe of qarl-trl {chosen.command}. Its keys also fit {names}: --trainer says which."


def _keys_of(argv: Sequence[str]) -> set[str]:
    """The keys of a recipe, and of the options that override it."""
    from pathlib import Path

    from .recipe import read_recipe

    keys: set[str] = set()
    for place, word in enumerate(argv):
        if not word.startswith("--"):
            continue
        name, has_value, value = word.removeprefix("--").partition("=")
        if name == "config":
            recipe = value if has_value else argv[place + 1]
            keys |= read_recipe(Path(recipe)).keys()
        else:
            keys.add(name.replace("-", "_"))
    return keys


def _prepare_devices(values: dict[str, Any], only_checks: bool, engine_only: bool) -> None:
    """
    Let a recipe for GPUs be checked without one, or set up the memory of the GPU that a run will have.

    Args:
        values: The keys of the recipe; may get `use_cpu`.
        only_checks: Nothing will run, so the devices may be missing.
        engine_only: The learner is elsewhere.
    """
    import torch

    if only_checks:
        if not torch.cuda.is_available():
            # transformers then accepts a GPU's settings, bf16 among them.
            values.setdefault("use_cpu", True)
    elif not engine_only:
        let_segments_grow(values)


def _find_data_and_checkpoint(script_args: DataArguments, training_args: Any) -> None:
    """
    Refuse missing data, and make `resume_from_checkpoint` a path: before a model loads, which takes minutes.

    Args:
        script_args: Where the data are.
        training_args: Modified in place.
    """
    from .checkpoints.resume import resume_path

    _check_data(script_args, with_eval=training_args.eval_strategy != "no")
    training_args.resume_from_checkpoint = resume_path(training_args.resume_from_checkpoint, training_args)


def _groups(method: Method = QARL) -> tuple[type, ...]:
    """The dataclasses whose fields are the keys of a recipe."""
    from trl import ModelConfig

    return method.data, method.config_class(), ModelConfig


def _check_data(script_args: DataArguments, with_eval: bool) -> None:
    """Refuse settings without data, or whose files are missing."""
    names = ["dataset_name_or_path"]
    if with_eval:
        names.append("eval_dataset_name_or_path")

    for name in names:
        name_or_path = getattr(script_args, name)
        if not name_or_path:
            raise ValueError(f"{name} is missing: give a Hub id or a .jsonl, .json or .parquet file.")
        local_path(name_or_path)


def describe_options(method: Method = QARL) -> str:
    """The text of `--help`: our fields in groups."""
    options = options_of(method)
    lines = [_USAGE.format(command=method.command, about=method.about)]
    for group in GROUPS:
        described = [_describe_option(option) for option in options if option.metadata["help"].group == group]
        if not described:
            continue
        title = "Data and rewards" if group == DATA and method.has_rewards else group
        lines += [f"{title}\n", *described, ""]

    lines.append(f"TRL's options: the fields of {method.trl_config} and ModelConfig, https://huggingface.co/docs/trl")
    return "\n".join(lines)


def options_of(method: Method) -> list[Field]:
    """The fields that this package adds to TRL's settings, or gives another meaning."""
    data_group, config_group, _ = _groups(method)
    added = _names_of_ours(config_group)
    return [*fields(data_group), *(option for option in fields(config_group) if option.name in added)]


def _names_of_ours(config: type) -> set[str]:
    """The names of those fields of a config."""
    names: set[str] = set()
    for base in config.__mro__:
        if base.__module__.startswith("qarl_trl."):
            names |= vars(base).get("__annotations__", {}).keys()
    return names


def _describe_option(option: Field) -> str:
    """Name, meaning and default of a field."""
    text = option.metadata["help"]
    if option.default is not None and option.default is not MISSING:
        text += f" (default: {option.default})"
    return f"  --{option.name}\n" + indent(fill(text, 110), " " * 8)


def make_trainer(script_args: Any, training_args: Any, model_args: ModelConfig, method: Method = QARL) -> Any:
    """
    Make the trainer of a recipe, with data, model and engine loaded.

    Args:
        script_args: Data and rewards; from [`parse`], as the others.
        training_args: Its `model_init_kwargs` get the model's settings.
        model_args: The model, its dtype, and the adapter.
        method: What is trained.
    """
    from trl import get_peft_config, get_quantization_config

    training_args.model_init_kwargs = model_settings(training_args, model_args)

    rewards = {}
    if method.has_rewards:
        rewards["reward_funcs"] = load_rewards(script_args.reward_funcs, script_args.reward_timeout)
    with_eval = training_args.eval_strategy != "no"
    train_dataset, eval_dataset = load_datasets(script_args, with_eval, training_args, method)

    with naming_config([model_args.model_name_or_path]):
        return method.trainer_class()(
            model=model_args.model_name_or_path,
            args=training_args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            quantization_config=get_quantization_config(model_args),
            peft_config=get_peft_config(model_args),
            **rewards,
        )


def model_settings(training_args: Any, model_args: ModelConfig) -> dict[str, Any]:
    """
    The arguments of `from_pretrained` by which a recipe's model loads.

    Args:
        training_args: From [`parse`]. What its `model_init_kwargs` set counts.
        model_args: From [`parse`].
    """
    of_recipe = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        "trust_remote_code": training_args.trust_remote_code,
    }
    return of_recipe | (training_args.model_init_kwargs or {})


def train(trainer: Any, dataset: str | None, method: Method = QARL) -> None:
    """
    Train, save and (with `push_to_hub`) push.

    Args:
        trainer: From [`make_trainer`].
        dataset: The dataset, for the model card. A local path is left out of it.
        method: What is trained.

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
        raise SystemExit(f"qarl-trl {method.command}: {error}") from error

    if args.push_to_hub:
        # This saves first.
        trainer.push_to_hub(dataset_name=dataset if is_on_hub else None)
    else:
        trainer.save_model(args.output_dir)
    trainer.accelerator.print(f"Model saved in {args.output_dir}")


def load_datasets(
    script_args: Any, with_eval: bool, training_args: Any = None, method: Method = QARL
) -> tuple[Dataset, Dataset | None]:
    """
    Load the training set and, if asked for, the evaluation set.

    Args:
        script_args: Where the data are, and how to read them.
        with_eval: Whether to load the evaluation set. Without it the second result is `None`.
        training_args: The settings of the trainer; RL and SFT read their data without them.
        method: What is trained.

    Returns:
        For RL with the columns `prompt` and `answer`.
    """
    load = partial(method.load, script_args, training_args)
    train_dataset = load(script_args.dataset_name_or_path, script_args.dataset_split)
    if not with_eval:
        return train_dataset, None
    return train_dataset, load(script_args.eval_dataset_name_or_path, script_args.eval_dataset_split)


def describe(script_args: DataArguments, args: Any, model_args: ModelConfig) -> str:
    """
    The settings to print: method, batch sizes, and every field that differs from its default.

    Args:
        script_args: Data and rewards; from [`parse`], as the others.
        args: The settings of the trainer.
        model_args: The settings of the model.
    """
    import torch

    from .config import changed_fields

    learner = "quantized" if args.quantized and args.quantize_learner else "in high precision"

    lines = [
        f"model: {model_args.model_name_or_path}, scheme {args.quant_name}, learner {learner}",
        *_describe_batches(args),
    ]
    if not torch.cuda.is_available():
        lines.append("device: no CUDA device here, so the settings were checked for a CPU")

    for group in (script_args, args, model_args):
        for name, value in sorted(changed_fields(group).items()):
            lines.append(f"{type(group).__name__}.{name}: {redact(value, name)!r}")
    return "\n".join(lines)


def _describe_batches(args: Any) -> list[str]:
    """How many rows an update has, and a rollout batch if the trainer samples several completions of a prompt."""
    per_update = args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps
    if not hasattr(args, "num_generations"):
        return [f"update: {per_update} rows on {args.world_size} process(es)"]

    completions = args.generation_batch_size
    prompts = completions // args.num_generations
    updates = completions * args.num_iterations / per_update
    return [
        f"rollout batch: {prompts} prompts x {args.num_generations} = {completions} completions "
        f"on {args.world_size} process(es)",
        f"update: {per_update} completions; {updates:g} updates per rollout batch",
    ]


def sft(argv: Sequence[str]) -> Callable[[], None] | None:
    """`qarl-trl sft`, see [`main`]."""
    return main(argv, SFT)


def rloo(argv: Sequence[str]) -> Callable[[], None] | None:
    """`qarl-trl rloo`, see [`main`]."""
    return main(argv, RLOO)


def distill(argv: Sequence[str]) -> Callable[[], None] | None:
    """`qarl-trl distill`, see [`main`]."""
    return main(argv, DISTILL)


def main(argv: Sequence[str], method: Method = QARL) -> Callable[[], None] | None:
    """
    `qarl-trl train`: check everything, and load everything.

    Args:
        argv: The command line after the command's name.
        method: What is trained.

    Returns:
        The training, or `None` after `--help` or a dry run.
    """
    if "--help" in argv or "-h" in argv:
        print(describe_options(method))
        return None

    from .checkpoints.resume import check_start

    script_args, training_args, model_args = parse(argv, method=method)
    # The trainer checks this too, but only after the model has loaded: a script says in `train()` what it resumes.
    check_start(training_args.resume_from_checkpoint, training_args)
    if script_args.dry_run:
        if method.has_rewards:
            # Finds a reward that cannot be imported.
            load_rewards(script_args.reward_funcs, script_args.reward_timeout)
        # With torchrun, once.
        if training_args.process_index == 0:
            print(describe(script_args, training_args, model_args))
        return None

    trainer = make_trainer(script_args, training_args, model_args, method)
    return partial(train, trainer, script_args.dataset_name_or_path, method)


if __name__ == "__main__":
    # `python -m` puts the current folder first: no file there may replace a package.
    if not sys.flags.safe_path:
        sys.path.append(sys.path.pop(0))
    from .cli import main as cli_main

    cli_main(["train", *sys.argv[1:]])
