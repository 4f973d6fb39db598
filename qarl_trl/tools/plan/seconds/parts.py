"""Seconds of a rollout batch: its three parts, and their sum."""

from __future__ import annotations

from dataclasses import dataclass

from ..gpus import Gpu
from ..run import Run
from .batch import Batch
from .costs import COSTS, Costs
from .rollout import rollout_seconds
from .sync import sync_seconds
from .update import update_seconds


@dataclass(frozen=True)
class Parts:
    """
    A number for each part of a rollout batch: seconds, or factors of seconds.

    Attributes:
        rollout: Generation, as `time/rollout`.
        sync: The weight sync, as `time/sync`.
        update: All the rest, as `time/update`: passes of the learner and optimizer steps.
    """

    rollout: float
    sync: float
    update: float

    @property
    def sum(self) -> float:
        """Of the whole rollout batch, for seconds."""
        return self.rollout + self.sync + self.update

    def __mul__(self, other: Parts) -> Parts:
        """Part by part: seconds and factors of them."""
        return Parts(self.rollout * other.rollout, self.sync * other.sync, self.update * other.update)


# Factors of an estimate that is not fitted to a run.
NO_FIT = Parts(1.0, 1.0, 1.0)


def batch_seconds(run: Run, batch: Batch, gpu: Gpu, costs: Costs = COSTS) -> Parts:
    """
    Estimated seconds of a rollout batch.

    Args:
        run: The run, whose engine holds at least one sequence.
        batch: Its rollout batch.
        gpu: The GPU.
        costs: What operations cost.
    """
    return Parts(
        rollout_seconds(run, batch, gpu, costs),
        sync_seconds(run, gpu, costs),
        update_seconds(run, batch, gpu, costs),
    )
