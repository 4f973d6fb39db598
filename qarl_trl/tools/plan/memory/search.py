"""A greedy search for few levers that together make a run fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..recipe import Options, as_text
from ..run import Run
from .levers import Lever, changes_micro_batches, merge
from .moments import best_utilization, fits


# The run of the recipe with further options. `ValueError` if the trainer would refuse it.
RunWith = Callable[[Options], Run]


@dataclass(frozen=True)
class Fitting:
    """
    A run that fits.

    Attributes:
        options: What was changed in its recipe.
        run: The run with these options.
    """

    options: Options
    run: Run

    @property
    def text(self) -> str:
        """The options, as a user pastes them after the command that trains."""
        return as_text(self.options)


def greedy_search(required: Sequence[Lever], levers: Sequence[Lever], run_with: RunWith) -> Fitting | None:
    """
    Find few levers that make a run fit.

    Take all of them. Then leave out one after the other, the most costly first, if the run still fits without it. Each
    is tried once, in this order, so another set might be smaller still.

    Args:
        required: Levers that are taken in any case.
        levers: All others, from cheap to costly.
        run_with: The run with some options.

    Returns:
        `None` if the run does not fit even with all levers.
    """
    fitting = try_levers([*required, *levers], run_with)
    if fitting is None:
        # A recipe that sets `generation_batch_size` refuses micro-batches of other sizes.
        levers = [lever for lever in levers if not changes_micro_batches(lever)]
        fitting = try_levers([*required, *levers], run_with)
    if fitting is None:
        return None

    kept = list(levers)
    for lever in reversed(levers):
        others = [other for other in kept if other != lever]
        without = try_levers([*required, *others], run_with)
        if without is not None:
            kept = others
            fitting = without
    return fitting


def try_levers(levers: Sequence[Lever], run_with: RunWith) -> Fitting | None:
    """
    The run with all levers, if it fits; if need be, with another share for the engine.

    Args:
        levers: The levers.
        run_with: The run with some options.
    """
    options = merge(levers)
    try:
        run = run_with(options)
    except ValueError:  # an option may conflict with a field of the recipe
        return None

    # The engine's share is computed, not searched: the largest that fits is best for the engine.
    if not fits(run) and run.engine == "colocate":
        run = replace(run, utilization=best_utilization(run))
        options = {**options, "vllm_gpu_memory_utilization": f"{run.utilization:g}"}

    if not fits(run):
        return None
    return Fitting(options, run)
