"""Check the schedule of the learning rate by making it once."""

from __future__ import annotations

import torch
from transformers import get_scheduler

from .types import RunSettings, TrainerArguments


def check_schedule(args: RunSettings, trainer_arguments: TrainerArguments) -> None:
    """
    Refuse a schedule of the learning rate that transformers cannot make: it tries after the engine has started.

    Args:
        args: Settings of the run.
        trainer_arguments: All arguments of the trainer by name. A schedule among its `optimizers` is
            taken as it is.

    Raises:
        ValueError: with the words of transformers.
    """
    _, of_script = trainer_arguments.get("optimizers") or (None, None)
    # DeepSpeed's config may have a schedule of its own.
    if of_script is not None or args.deepspeed:
        return

    # Of any rate: whether there is such a schedule does not depend on it.
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    # And of any length.
    steps = max(args.max_steps, 1)
    try:
        get_scheduler(
            args.lr_scheduler_type,
            optimizer,
            num_warmup_steps=args.get_warmup_steps(steps),
            num_training_steps=steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"lr_scheduler_kwargs must be those of lr_scheduler_type={args.lr_scheduler_type.value!r}, got "
            f"{args.lr_scheduler_kwargs}: {error}"
        ) from error
