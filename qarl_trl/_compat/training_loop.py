"""What the Trainer's loop decides for each micro-batch, and whom it tells of a step first."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from transformers import Trainer, TrainerCallback


def add_first_callback(trainer: Trainer, callback: TrainerCallback) -> None:
    """
    Add a callback that is told of a step before all others.

    `Trainer.add_callback` puts a callback behind those that the user gave the constructor, and has no argument for the
    place. They are called in the order of `callback_handler.callbacks` (transformers 5.17); without that list this
    raises `AttributeError`.

    Args:
        trainer: The trainer.
        callback: The callback.
    """
    # By the list: `CallbackHandler.add_callback` would append it, as the Trainer's method does.
    trainer.callback_handler.callbacks.insert(0, callback)


def accumulating(accelerator: Any, syncs: bool) -> AbstractContextManager:
    """
    Set what `accelerator.sync_gradients` answers, as the Trainer sets it for each micro-batch.

    It has no public setter: the Trainer writes `gradient_state.sync_gradients` (accelerate 1.15) through
    `GradientState._set_sync_gradients`. TRL's loss reads it to see whether an optimizer step comes next. If the
    attribute is gone, this raises `AttributeError`.

    Args:
        accelerator: The Trainer's.
        syncs: The answer.
    """
    return patch.object(accelerator.gradient_state, "sync_gradients", syncs)
