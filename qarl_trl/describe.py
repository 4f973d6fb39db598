"""What a command that trains tells its user: its options (`--help`) and a run's settings (`--dry_run`)."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from pathlib import Path
from textwrap import fill, indent
from typing import TYPE_CHECKING, Any

from .methods import QARL, DataArguments, Method, groups_of
from .options import DATA, GROUPS
from .redact import redact


# At run time inside of functions: a dry run loads no vLLM.
if TYPE_CHECKING:
    from trl import ModelConfig


_USAGE = """usage: qarl-trl {command} --config FILE [--key value ...]

{about}, from a recipe, a flat YAML file.

Its keys are the options below and TRL's. The command line overrides it; null is no value, in both.
`base: other.yaml` names a recipe that it extends.
On several GPUs: accelerate launch -m qarl_trl.cli {command} --config recipe.yaml
"""


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
    data_group, config_group, _ = groups_of(method)
    added = _names_of_ours(config_group)
    return [*fields(data_group), *(option for option in fields(config_group) if option.name in added)]


def _names_of_ours(config: type) -> set[str]:
    """The names of those fields of a config."""
    names: set[str] = set()
    for base in config.__mro__:
        # By annotation, not by `fields`: those include what TRL's config has.
        if base.__module__.startswith("qarl_trl."):
            names |= vars(base).get("__annotations__", {}).keys()
    return names


def _describe_option(option: Field) -> str:
    """Name, meaning and default of a field."""
    text = option.metadata["help"]
    if option.default is not None and option.default is not MISSING:
        text += f" (default: {option.default})"
    return f"  --{option.name}\n" + indent(fill(text, 110), " " * 8)


def describe(script_args: DataArguments, args: Any, model_args: ModelConfig) -> str:
    """
    What a run would do: method, batch sizes, where it starts, what it writes and pushes, and every field that differs
    from its default.

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
        f"start: {_describe_start(args)}",
        f"output: {_describe_output(args, model_args)}",
        f"checkpoints: {_describe_checkpoints(args)}",
        f"push: {_describe_push(args)}",
    ]
    if not torch.cuda.is_available():
        # What a GPU, the engine or the model refuse comes later.
        lines.append("device: no CUDA device here, so the settings were read for a CPU; qarl-trl doctor checks more")

    lines.append("settings other than the defaults:")
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


def _describe_start(args: Any) -> str:
    """Where the run starts: `parse` has found the checkpoint."""
    checkpoint = args.resume_from_checkpoint
    if checkpoint is None:
        return "from the beginning"
    return f"resumes from {Path(checkpoint).absolute()}"


def _describe_output(args: Any, model_args: ModelConfig) -> str:
    """What the run saves at its end, and where."""
    from .export.files import BASE_FOLDER
    from .export.outputs import outputs_of

    folder = Path(args.output_dir).absolute()
    outputs = outputs_of(args, model_args.use_peft, in_checkpoint=False)
    saved = []
    if outputs.high_precision:
        kind = "adapter" if model_args.use_peft else "model"
        saved.append(f"the {kind} in {folder}")
    if outputs.low_bit is not None:
        saved.append(f"the low-bit model in {folder / outputs.low_bit}")
    if outputs.frozen_base and not args.from_checkpoint:
        saved.append(f"its base in {folder / BASE_FOLDER}")
    return ", ".join(saved)


def _describe_checkpoints(args: Any) -> str:
    """When the run saves training checkpoints, and how many stay."""
    strategy = args.save_strategy.value
    if strategy == "no":
        return "none, so nothing can be resumed"

    if strategy == "epoch":
        when = "after each epoch"
    elif strategy == "best":
        when = "after each best evaluation"
    elif args.save_steps < 1:
        when = f"every {args.save_steps:.0%} of the run"
    else:
        when = f"every {args.save_steps:g} updates"

    # 0 and below limit nothing, as for `checkpoints.folder.rotate`.
    limit = args.save_total_limit or 0
    kept = f"the last {limit} stay" if limit > 0 else "all stay"
    return f"{when}, in {Path(args.output_dir).absolute()}; {kept}"


def _describe_push(args: Any) -> str:
    """What the run pushes to the Hub."""
    if not args.push_to_hub:
        return "nothing"

    name = args.hub_model_id or Path(args.output_dir).absolute().name
    pushed = f"to {name} at the end"
    if args.frozen and not args.from_checkpoint:
        pushed += f", its base to {name}-base"
    return pushed
