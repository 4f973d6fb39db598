"""Loads training checkpoints. Importing this module also lets `torch.load` resume a CPU run under DDP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from transformers import PreTrainedModel
from transformers.trainer_callback import ExportableState, TrainerState


# peft's name of an adapter that got no other.
_DEFAULT_ADAPTER = "default"


def restore_master_weights(model: PreTrainedModel, folder: str) -> None:
    """
    Copy the weights of a training checkpoint into a model that `save_pretrained` stores under other names, in place.

    It stores experts one by one, and models of several parts and some others, such as GPT-NeoX, under older names.
    The Trainer resumes by `load_state_dict` (`Trainer._load_from_checkpoint`, transformers 5.17), which does not know
    those names: it would warn and continue with the initial weights.

    Args:
        model: The model, with the policy's names.
        folder: The training checkpoint.

    Raises:
        RuntimeError: if the checkpoint lacks a weight.
    """
    # float32 by name: without it transformers takes the dtype of the config, and a resumed run would begin with
    # rounded master weights.
    stored, report = type(model).from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    # transformers has drawn these at random, and `load_state_dict` below could not tell.
    if report["missing_keys"]:
        raise RuntimeError(f"The checkpoint {folder} lacks {sorted(report['missing_keys'])}: it cannot be resumed.")
    # A copy into the parameters that are there: the optimizer may hold them already.
    model.load_state_dict(stored.state_dict())


def restore_default_adapter(model: Any, folder: str) -> None:
    """
    Load peft's first adapter from a training checkpoint into a model that has several.

    peft saves an adapter named "default" in the folder itself, and others in sub-folders. The Trainer
    (`Trainer._load_from_checkpoint`, transformers 5.17) loads those of sub-folders alone where there are any, and
    would continue with the first adapter as the run began. TRL adds one named "ref" to a `PeftModel` with `beta`.

    Args:
        model: The `PeftModel`, after the Trainer's method.
        folder: The training checkpoint.
    """
    # One adapter has no sub-folders, so the Trainer has loaded it.
    if len(model.peft_config) == 1 or _DEFAULT_ADAPTER not in model.peft_config:
        return

    active = model.active_adapter
    model.load_adapter(folder, _DEFAULT_ADAPTER, is_trainable=active == _DEFAULT_ADAPTER)
    # The loaded one is trained only if it was active before. "ref" must stay frozen.
    model.set_adapter(active)


@contextmanager
def dtypes_and_flags_kept(model: Any) -> Iterator[None]:
    """
    Let parameters keep their dtypes, and whether they are trained, while a checkpoint is loaded in the block.

    `PeftModel.load_adapter` (peft 0.21) makes an adapter of bfloat16 float32, in new parameters that an optimizer of a
    script does not know, and `set_adapter` makes all of its parameters trainable.

    Args:
        model: The `PeftModel`.
    """
    before = {name: (parameter.dtype, parameter.requires_grad) for name, parameter in model.named_parameters()}
    load_as_it_is = partial(model.load_adapter, autocast_adapter_dtype=False)
    with patch.object(model, "load_adapter", load_as_it_is):
        yield

    for name, parameter in model.named_parameters():
        # An adapter that a user put into the checkpoint is a new one.
        if name not in before:
            continue
        dtype, is_trained = before[name]
        # In place, as above.
        if parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
        parameter.requires_grad_(is_trained)


def add_states_of_callbacks(trainer: Any) -> None:
    """
    Give a state that was loaded from a checkpoint the entries of callbacks that its run did not have.

    A save replaces the entry of each stateful callback and takes for granted that there is one
    (`Trainer._save_checkpoint`, transformers 5.17).

    Args:
        trainer: The trainer, with the state of the checkpoint.
    """
    callbacks = [*trainer.callback_handler.callbacks, trainer.control]
    stateful: list[Any] = [callback for callback in callbacks if isinstance(callback, ExportableState)]
    states: Any = TrainerState(stateful_callbacks=stateful).stateful_callbacks
    trainer.state.stateful_callbacks = states | trainer.state.stateful_callbacks


def _load_to_numbered_cpus() -> None:
    """
    Let `torch.load` take "cpu:0" as a place.

    Under DDP the Trainer resumes with this `map_location`, accelerate's name of a CPU; torch (2.13) knows only "cpu",
    and raises. A version that knows it gives the same storage.
    """

    def tag(storage: Any) -> None:
        return None  # no file is written with such a place

    def put(storage: Any, place: str) -> Any:
        return storage if place.startswith("cpu:") else None

    # Before torch's own places, which begin at 10 (`torch.serialization`).
    torch.serialization.register_package(9, tag, put)


# torch has a list of such functions and no way to take one from it, so it is added once.
_load_to_numbered_cpus()
