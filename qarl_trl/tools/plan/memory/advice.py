"""What saves memory in a run: each lever alone, and the fewest together that make it fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ....methods import QARL, Method
from ..recipe import Options, quiet, read_settings
from ..run import Hardware, Run
from ..settings import run_of
from .backward import gradients_between_passes
from .levers import Lever, levers_to_combine, levers_to_compare, one_pass_a_micro_batch
from .moments import fits
from .search import Fitting, RunWith, greedy_search


@dataclass(frozen=True)
class Trial:
    """
    A lever, taken alone.

    Attributes:
        lever: The lever.
        run: The run with it; `None` if it is refused.
        refusal: Why it is refused; empty if it is not.
    """

    lever: Lever
    run: Run | None
    refusal: str = ""


@dataclass(frozen=True)
class Advice:
    """
    What `qarl-trl plan` knows of the memory of a run.

    Attributes:
        name: The model and its scheme, and what is trained if it is not QaRL.
        run: The run of the recipe.
        alone: Each lever alone; empty for a run that fits on several GPUs.
        together: Levers that together make the run fit, for the user to choose from; empty for a run that fits.
        one_pass: Smaller micro-batches, if now gradients are kept between the passes of one.
    """

    name: str
    run: Run
    alone: list[Trial]
    together: list[Fitting]
    one_pass: Trial | None = None


def advise(argv: Sequence[str], hardware: Hardware, method: Method = QARL) -> Advice:
    """
    Estimate the memory of a run, and look for levers that save some.

    Args:
        argv: The recipe, as options of the command that trains.
        hardware: The GPUs.
        method: What is trained.

    Raises:
        ValueError: if the run cannot work, or its model is unknown.
    """

    def run_with(options: Options) -> Run:
        return run_of(*read_settings(argv, hardware.gpus, options, method), hardware)

    # First and not quietly: what is wrong with the recipe itself is raised, and its warnings are logged.
    settings, model_args = read_settings(argv, hardware.gpus, method=method)
    run = run_of(settings, model_args, hardware)

    alone: list[Trial] = []
    together: list[Fitting] = []
    one_pass: Trial | None = None
    with quiet():
        lever = one_pass_a_micro_batch(run, settings)
        if lever is not None and gradients_between_passes(run) > 0:
            one_pass = try_each_alone([lever], run_with)[0]

        # On one GPU even if the run fits: memory that is saved allows longer rows or a larger model.
        if hardware.gpus == 1 or not fits(run):
            alone = try_each_alone(levers_to_compare(model_args.use_peft, run, settings), run_with)
        if not fits(run):
            together = _combinations_that_fit(alone, settings, run_with)

    name = f"{model_args.model_name_or_path}, {settings.quant_name}"
    if method is not QARL:
        name = f"{method.command}: {name}"
    return Advice(name, run, alone, together, one_pass)


def try_each_alone(levers: Sequence[Lever], run_with: RunWith) -> list[Trial]:
    """
    Take each lever alone.

    Args:
        levers: The levers. One that is refused is shown rather than left out, so that the user learns why.
        run_with: The run with some options.
    """
    trials = []
    for lever in levers:
        try:
            trials.append(Trial(lever, run_with(lever.options)))
        except ValueError as error:
            trials.append(Trial(lever, None, refusal=str(error)))
    return trials


def _combinations_that_fit(alone: Sequence[Trial], settings: Any, run_with: RunWith) -> list[Fitting]:
    """Levers that make the run fit: without a new adapter, and with each kind of one."""
    # The search does not decide on an adapter: the user chooses between these answers.
    answers: list[list[Lever]] = [[]]
    for trial in alone:
        if trial.lever.adds_adapter and trial.run is not None:
            answers.append([trial.lever])

    together: dict[str, Fitting] = {}
    for required in answers:
        run = run_with(required[0].options if required else {})
        fitting = greedy_search(required, levers_to_combine(run, settings), run_with)
        # The adapter of a recipe stays as it is, so that two answers may be the same.
        if fitting is not None:
            together[fitting.text] = fitting
    return list(together.values())
