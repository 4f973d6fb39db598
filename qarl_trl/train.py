"""The commands that train from a recipe: `qarl-trl train`, `sft`, `rloo` and `distill`.

`methods` says what each of them trains. On several GPUs: accelerate launch -m qarl_trl.cli train --config recipe.yaml.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

from .allocator import let_segments_grow
from .data import local_path
from .describe import describe, describe_options
from .errors import naming_config
from .methods import DISTILL, QARL, RLOO, SFT, DataArguments, Method, groups_of
from .rewards import load_rewards
from .unread import check_length, check_switches


# At run time inside of functions: `--help` of other commands must be instant, and a dry run loads no vLLM.
if TYPE_CHECKING:
    from datasets import Dataset
    from trl import ModelConfig

# peft's word for all linear layers.
ALL_LINEAR = "all-linear"
# The name of a layer, or its end, without other characters of a regular expression than dots between its parts.
PLAIN_NAME = re.compile(r"[\w-]+(\.[\w-]+)*")


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
    from .export.files import check_no_adapter
    from .recipe import RecipeParser

    parser = RecipeParser(groups_of(method))
    values = parser.read(argv)
    for name in without:
        values.pop(name, None)
    if not values.get("model_name_or_path"):
        raise ValueError(_what_is_missing(argv, method))
    # A dry run makes no trainer, which checks it too.
    check_no_adapter(values["model_name_or_path"])
    check_switches(values, {field.name for group in groups_of(method) for field in fields(group)})
    check_length(values, argv)
    # Before the settings are built, which asks torch about its devices.
    _prepare_devices(values, only_checks=bool(any_device or values.get("dry_run")), engine_only=engine_only)

    script_args, training_args, model_args = parser.build(values)
    model_args.lora_target_modules = _as_names(model_args.lora_target_modules)
    if not engine_only:
        _find_data_and_checkpoint(script_args, training_args)
    return script_args, training_args, model_args


def _as_names(modules: Any) -> Any:
    """
    The layers of an adapter as a recipe names them: TRL makes a text of a list of one, and peft a regular expression
    of that, which must match the whole name of a layer.

    Args:
        modules: `ModelConfig.lora_target_modules`.
    """
    is_name = isinstance(modules, str) and modules != ALL_LINEAR and PLAIN_NAME.fullmatch(modules)
    return [modules] if is_name else modules


def _what_is_missing(argv: Sequence[str], method: Method) -> str:
    """What to say of a command line and a recipe without a model."""
    options = {word.partition("=")[0] for word in argv}
    if options & {"--config", "--model_name_or_path"}:
        return "model_name_or_path is missing: give a Hub id or a model folder."

    example = f"qarl-trl {method.command} --config recipe.yaml"
    return f"missing --config, or a model and data without one. For example: {example} (--help: all keys)"


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
            # transformers then accepts a GPU's settings, bf16 among them. Also in place of `use_cpu: false`.
            values["use_cpu"] = True
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

    _check_data(script_args, with_eval=evaluates(training_args))
    training_args.resume_from_checkpoint = resume_path(training_args.resume_from_checkpoint, training_args)


def evaluates(training_args: Any) -> bool:
    """
    Whether a run needs data to evaluate on.

    Args:
        training_args: From [`parse`].
    """
    return training_args.eval_strategy != "no" or training_args.eval_on_start


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
    train_dataset, eval_dataset = load_datasets(script_args, evaluates(training_args), training_args, method)

    # transformers' errors about a config or about weights do not say which file they mean.
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
        training_args: From [`parse`]. What its `model_init_kwargs` set counts, also beside a default of `model_args`.
        model_args: From [`parse`].

    Raises:
        ValueError: if both set one argument, to two values.
    """
    chosen = training_args.model_init_kwargs or {}
    defaults = type(model_args)()
    twice = {"model_revision": "revision", "attn_implementation": "attn_implementation", "dtype": "dtype"}
    for name, key in twice.items():
        value = getattr(model_args, name)
        if value != getattr(defaults, name) and chosen.get(key, value) != value:
            raise ValueError(
                f"{name}={value!r} and model_init_kwargs: {{{key}: {chosen[key]}}} must not differ. Leave one out."
            )

    of_recipe = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        "trust_remote_code": training_args.trust_remote_code,
    }
    return of_recipe | chosen


def train(trainer: Any, dataset: str | None, method: Method = QARL) -> None:
    """
    Train, save the log and the model, and (with `push_to_hub`) push.

    Args:
        trainer: From [`make_trainer`].
        dataset: The dataset, for the model card. A local path is left out of it.
        method: What is trained.

    Raises:
        SystemExit: with one line, if no step updated the weights.
    """
    from .checkpoints.calls import NoUpdateError

    args = trainer.args
    # Before the training, in which a reward may change the current folder.
    is_on_hub = bool(dataset) and local_path(str(dataset)) is None
    try:
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    except NoUpdateError as error:
        # An error of the data: a traceback would not help.
        raise SystemExit(f"qarl-trl {method.command}: {error}") from error

    # A run without checkpoints has its log nowhere else. First, because the disk or the Hub may refuse the model.
    trainer.save_state()
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
    train_dataset = load(script_args.dataset_name_or_path, script_args.dataset_split, script_args.dataset_config)
    if not with_eval:
        return train_dataset, None

    eval_name = script_args.eval_dataset_name_or_path
    eval_config = script_args.eval_dataset_config
    # Another dataset has other configurations, and the Hub refuses a name that it does not know.
    if eval_config is None and eval_name == script_args.dataset_name_or_path:
        eval_config = script_args.dataset_config
    return train_dataset, load(eval_name, script_args.eval_dataset_split, eval_config)


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
        _check_adapter(training_args, model_args)
        # With torchrun, once.
        if training_args.process_index == 0:
            print(describe(script_args, training_args, model_args))
        return None

    trainer = make_trainer(script_args, training_args, model_args, method)
    return partial(train, trainer, script_args.dataset_name_or_path, method)


def _check_adapter(args: Any, model_args: Any) -> None:
    """Refuse (`ValueError`) what the trainer would refuse of an adapter."""
    if not args.quantized or not (args.frozen or model_args.use_peft):
        return
    from trl import get_peft_config

    from .validate.adapters import check_adapters

    check_adapters(model_args.model_name_or_path, get_peft_config(model_args), args)


if __name__ == "__main__":
    # `python -m` puts the current folder first: no file there may replace a package.
    if not sys.flags.safe_path:
        sys.path.append(sys.path.pop(0))
    from .cli import main as cli_main

    cli_main(["train", *sys.argv[1:]])
