"""Reads a recipe with further options of its command: what the run of a user would be with a change."""

from __future__ import annotations

import logging
import shlex
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from transformers import TrainingArguments

from ...methods import QARL, Method
from ...train import parse
from ...validate.launch import check_launch
from ...validate.rollouts import check_processes
from ...validate.schedule import check_schedule


# Fields of a recipe and the value of each, as a command line has it: {"optim": "adamw_8bit"}.
Options = Mapping[str, str]


def as_arguments(options: Options) -> list[str]:
    """
    Options as arguments of a command line.

    Args:
        options: Fields and values.
    """
    arguments = []
    for name, value in options.items():
        arguments += [f"--{name}", value]
    return arguments


def as_text(options: Options) -> str:
    """
    Options as a user pastes them after the command that trains, `qarl-trl train`.

    Args:
        options: Fields and values.
    """
    return shlex.join(as_arguments(options))


def read_settings(
    argv: Sequence[str],
    gpus: int,
    options: Options | None = None,
    method: Method = QARL,
    without: Collection[str] = (),
) -> tuple[Any, Any]:
    """
    Read a recipe.

    Args:
        argv: The command line of the command that trains, with the recipe.
        gpus: Processes of the run, which TRL divides a rollout batch among.
        options: What overrides it.
        method: What is trained.
        without: Keys of the recipe to leave out.

    Returns:
        The config, for `qarl-trl train` a `QaRLConfig`, and the `trl.ModelConfig`.

    Raises:
        ValueError: if the command that trains would refuse it.
    """
    # A config counts the processes of its run while it is made, and here is only one.
    with patch.object(TrainingArguments, "world_size", gpus):
        # Any device: the GPUs that it is meant for are not here.
        argv = [*argv, *as_arguments(options or {})]
        _, settings, model_args = parse(argv, any_device=True, method=method, without=without)
        # The trainer asks this at its start, on the machine with the GPUs. The data are not read here.
        check_launch(settings)
        check_processes(settings, {})
        check_schedule(settings, {})
    return settings, model_args


@contextmanager
def quiet() -> Iterator[None]:
    """Log and print no warnings: they would be about settings that are only tried."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
