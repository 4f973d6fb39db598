"""Seconds of a rollout batch in its parts, fitted to a run that was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import items
from .batch import Batch
from .costs import COSTS, Costs, Gpu
from .rollout import rollout_seconds
from .run import Run
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
        return Parts(self.rollout * other.rollout, self.sync * other.sync, self.update * other.update)


NO_FIT = Parts(1.0, 1.0, 1.0)


def seconds(run: Run, batch: Batch, gpu: Gpu, costs: Costs = COSTS) -> Parts:
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


@dataclass(frozen=True)
class Measured:
    """
    What a run logged.

    Attributes:
        seconds: Mean of a rollout batch.
        answer_tokens: Mean tokens of an answer.
        synced_bytes: Of a weight sync; `None` if it is not in the log.
    """

    seconds: Parts
    answer_tokens: float
    synced_bytes: float | None

    def factors(self, estimate: Parts) -> Parts:
        """
        Measured seconds as multiples of estimated ones, part by part.

        Args:
            estimate: Seconds of the same run, with its `answer_tokens`.
        """
        return Parts(
            self.seconds.rollout / estimate.rollout,
            self.seconds.sync / estimate.sync,
            self.seconds.update / estimate.update,
        )


def measured(log: Sequence[Mapping[str, Any]], updates: int) -> Measured:
    """
    The mean rollout batch of a run. The first, in which kernels compile and graphs are captured, is left out.

    Args:
        log: The rows of its log, each with a `step`.
        updates: Optimizer steps of a rollout batch.

    Raises:
        ValueError: if it has no times, or none after the first rollout batch.
    """
    rows = [row for row in log if "time/update" in row and row["step"] > updates]
    if not rows:
        raise ValueError(
            f"the log must have time/update after step {updates}, the end of the first rollout batch, and has none: "
            "let the run train longer."
        )

    def mean(name: str) -> float:
        values = [float(row[name]) for row in rows if name in row]
        return sum(values) / len(values)

    # Every step logs its times, 0 seconds for a rollout that is not in it. TRL logs means over steps.
    parts = Parts(*(updates * mean(f"time/{part}") for part in ("rollout", "sync", "update")))
    if not (parts.rollout and parts.sync):
        raise ValueError("the log has no seconds of rollouts and syncs: it must be of a run with an engine.")

    synced_bytes = mean("sync/bytes") if any("sync/bytes" in row for row in rows) else None
    return Measured(parts, mean("completions/mean_length"), synced_bytes)


def check_same(run: Run, log: Measured) -> None:
    """
    `ValueError` if a log is of another run than the recipe's, as far as bytes show: another scheme or model.

    Args:
        run: The recipe's run.
        log: What a run logged.
    """
    expected = items.synced_bytes(run)
    if log.synced_bytes is None:
        return
    # An engine's own tensors beside those of the model are few. Schemes differ by far more.
    if abs(log.synced_bytes - expected) > 0.05 * expected:
        raise ValueError(
            f"--from must be a run of this recipe: it synced {log.synced_bytes:,.0f} bytes at a time, "
            f"the recipe syncs {expected:,}."
        )
