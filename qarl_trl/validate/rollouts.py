"""What the settings say about rollouts, and checks of the engine's processes.

Not every trainer of TRL has such settings: SFT has no rollouts at all. So ask `args.has_engine` or the functions here,
before you read a setting of the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trl import DistillationConfig

from .types import RunSettings, TrainerArguments


def uses_server(args: RunSettings) -> bool:
    """Whether the engine is a server, in processes of its own."""
    return args.has_engine and args.vllm_mode == "server"


def shares_engine(args: RunSettings) -> bool:
    """Whether all processes must call the engine equally often, because they wait for each other at each call."""
    if not args.has_engine:
        return False
    # The first process asks a server for all, and the ranks of one engine compute together. Sleep drops the weights,
    # so the next call begins with a weight sync, in which all processes gather.
    return uses_server(args) or args.vllm_enable_sleep_mode or args.vllm_tensor_parallel_size > 1


def prompts_per_rollout(args: RunSettings) -> int | None:
    """Number of different prompts in a rollout batch; `None` for a trainer that does not complete prompts."""
    if hasattr(args, "teacher_model_name_or_path"):
        # Distillation has one completion of each prompt, and a rollout batch for each update.
        return args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps

    generations = getattr(args, "num_generations", None)
    completions = getattr(args, "generation_batch_size", None)
    if generations is None or completions is None:
        return None
    return completions // generations


def check_processes(args: RunSettings, trainer_arguments: TrainerArguments) -> None:
    """
    Refuse an engine for several processes, or on a server, that would hang or fail late.

    Args:
        args: Settings of the run.
        trainer_arguments: All arguments of the trainer by name.

    Raises:
        ValueError: for batches that the first process hands out, for a server without a folder for weights, for a
            server and images, and for tools with an engine that processes share.
    """
    _check_batches(args)
    if uses_server(args) and args.sync_folder is None:
        raise ValueError("vllm_mode='server' needs sync_folder: weights go through files that both sides see.")

    # Processes need different numbers of turns, so one would wait for calls that the others never make.
    has_turns = trainer_arguments.get("tools") or trainer_arguments.get("environment_factory")
    if has_turns and args.world_size > 1 and shares_engine(args):
        raise ValueError(
            "Tools with several processes need an engine for each that stays awake: vllm_mode='colocate', "
            "vllm_enable_sleep_mode=False, vllm_tensor_parallel_size=1."
        )

    if uses_server(args):
        _check_text(trainer_arguments)


def _check_batches(args: RunSettings) -> None:
    """Refuse (`ValueError`) loaders that do not hand out prompts as TRL's sampler orders them."""
    # The trainers whose batches are lists of prompts, and whose sampler (`trl.trainer.utils.RepeatSampler`) repeats
    # them for every turn of a rollout batch.
    has_sampler = hasattr(args, "num_generations") or isinstance(args, DistillationConfig)
    if not has_sampler:
        return

    if args.accelerator_config.dispatch_batches:
        raise ValueError(
            "accelerator_config: dispatch_batches must be false, got true: accelerate hands out tensors alone, and a "
            "batch of this trainer is a list of prompts."
        )


def _check_text(trainer_arguments: TrainerArguments) -> None:
    """Refuse (`ValueError`) data with images."""
    for name in ("train_dataset", "eval_dataset"):
        for part in _parts(trainer_arguments.get(name)):
            columns = getattr(part, "column_names", None) or ()
            images = {"image", "images"} & set(columns)
            if images:
                raise ValueError(f"vllm_mode='server' takes text only, got {images} in {name}. Use 'colocate'.")


def _parts(data: Any) -> Iterator[Any]:
    """The data sets of an argument that takes one, or several by name."""
    if isinstance(data, dict):
        yield from data.values()
    else:
        yield data
