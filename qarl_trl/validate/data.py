"""Check the training data."""

from __future__ import annotations

from datasets import Dataset

from .rollouts import prompts_per_rollout
from .types import RunSettings, TrainerArguments


def check_data(trainer_arguments: TrainerArguments, args: RunSettings) -> None:
    """
    Refuse fewer prompts than a rollout batch has.

    Args:
        trainer_arguments: All arguments of the trainer by name. Only a `train_dataset` of known length is checked.
        args: Settings of the run.

    Raises:
        ValueError: with the numbers that make the size of a rollout batch.
    """
    needed = prompts_per_rollout(args)
    data = trainer_arguments.get("train_dataset")
    # A streamed data set has no length before it ends.
    if needed is None or not isinstance(data, Dataset):
        return

    # TRL's sampler drops an incomplete batch. Such a run would end at once, and report success.
    if len(data) < needed:
        raise ValueError(
            f"train_dataset must have at least {needed} prompts, got {len(data)}, which would train nothing: "
            f"a rollout batch has per_device_train_batch_size={args.per_device_train_batch_size} "
            f"x {args.world_size} processes x steps_per_generation={args.steps_per_generation} "
            f"= {args.generation_batch_size} completions, num_generations={args.num_generations} of each."
        )
