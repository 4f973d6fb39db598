"""What a run logged: its seconds, to which an estimate is fitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..memory.engine import synced_bytes
from ..run import Run
from .parts import Parts


# By what share the bytes of a sync may differ from the estimate. An engine's own tensors beside those of the model are
# few; schemes differ by far more.
SYNC_TOLERANCE = 0.05


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

    @classmethod
    def from_log(cls, log: Sequence[Mapping[str, Any]], updates: int) -> Measured:
        """
        The mean rollout batch of a run. The first, in which kernels compile and graphs are captured, is left out, and
        so is one that the log does not have to its end.

        Args:
            log: The rows of its log, each with a `step`.
            updates: Optimizer steps of a rollout batch.

        Raises:
            ValueError: if it has no times, or none after the first rollout batch.
        """
        lines = _lines_of_whole_batches(log, updates)
        if not lines:
            raise ValueError(
                f"the log must have time/update of a whole rollout batch after step {updates}, the end of the first "
                f"one, and has none: let the run train longer, best with logging_steps that divide {updates}."
            )

        # Every step logs its times, 0 seconds for a rollout that is not in it. TRL logs means over steps.
        rows = [row for row, _ in lines]
        batches = sum(steps for _, steps in lines) / updates
        seconds = Parts(
            rollout=_sum(lines, "time/rollout") / batches,
            sync=_sum(lines, "time/sync") / batches,
            update=_sum(lines, "time/update") / batches,
        )
        if not (seconds.rollout and seconds.sync):
            raise ValueError("the log has no seconds of rollouts and syncs: it must be of a run with an engine.")

        bytes_of_a_sync = None
        if any("sync/bytes" in row for row in rows):
            bytes_of_a_sync = _mean(rows, "sync/bytes")
        return cls(seconds, _mean(rows, "completions/mean_length"), bytes_of_a_sync)

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


def _lines_of_whole_batches(log: Sequence[Mapping[str, Any]], updates: int) -> list[tuple[Mapping[str, Any], int]]:
    """
    The lines of a log that together hold whole rollout batches, without the first, each with the steps that it covers.

    A part of a batch has its rollout and not all of its updates.
    """
    lines: list[tuple[Mapping[str, Any], int]] = []
    # How many of the lines hold whole batches.
    whole = 0
    end = 0
    for row in log:
        if "time/update" not in row:
            continue
        # A line has means over the steps since the one before it.
        begin, end = end, row["step"]
        begins_batch = begin >= updates and begin % updates == 0
        if lines or begins_batch:
            lines.append((row, end - begin))
        if end % updates == 0:
            whole = len(lines)
    return lines[:whole]


def _sum(lines: Sequence[tuple[Mapping[str, Any], int]], name: str) -> float:
    """The sum of a metric over the steps of the lines that have it."""
    return sum(float(row[name]) * steps for row, steps in lines if name in row)


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    """The mean of a metric over the rows that have it."""
    values = [float(row[name]) for row in rows if name in row]
    return sum(values) / len(values)


def check_same_run(run: Run, measured: Measured) -> None:
    """
    `ValueError` if a log is of another run than the recipe's, as far as bytes show: another scheme or model.

    Args:
        run: The recipe's run.
        measured: What a run logged.
    """
    expected = synced_bytes(run)
    if measured.synced_bytes is None:
        return
    if abs(measured.synced_bytes - expected) > SYNC_TOLERANCE * expected:
        raise ValueError(
            f"--from must be a run of this recipe: it synced {measured.synced_bytes:,.0f} bytes at a time, "
            f"the recipe syncs {expected:,}."
        )
