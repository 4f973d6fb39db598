"""Read the log in a run's folder, with one point per rollout batch."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np


# What begins a rollout batch: TRL logs the reward in the line of the update that samples. A distillation has no reward
# and logs lengths; fine-tuning samples nothing, and each line stands alone.
BEGINS_BATCH = ("reward", "completions/mean_length", "loss")
# TRL's metrics that replace ours in a run of plain TRL.
OF_TRL = {"mismatch/logp_diff_mean": "sampling/sampling_logp_difference/mean", "time/update": "step_time"}


@dataclass
class LoggedRun:
    """
    What a run logged.

    Attributes:
        name: Name of the run, for headings.
        log: A row for each log line, with its `step`.
        note: Which log this is, if the run's folder has several; otherwise empty.
    """

    name: str
    log: list[dict[str, Any]]
    note: str = ""

    @cached_property
    def points(self) -> list[dict[str, float]]:
        """
        The log with one row per rollout batch, at the step of its first update.

        The ratio is 1 at the first update of a batch and moves away with each further one, so one point per update
        would draw a sawtooth. The value of a batch is the mean over its log lines, or the extreme for names that end
        in `min` or `max`.
        """
        # The step of a batch is its first, not the mean of its steps.
        points = []
        for batch in self._batches():
            point = {name: _combined(name, values) for name, values in batch.items()}
            point["step"] = batch["step"][0]
            points.append(point)
        return points

    def _batches(self) -> list[dict[str, list[float]]]:
        """The finite values of each metric in the log lines of each rollout batch."""
        logged = {name for row in self.log for name in row}
        beginning = next((name for name in BEGINS_BATCH if name in logged), "")
        batches: list[dict[str, list[float]]] = []
        for row in sorted(self.log, key=lambda row: row["step"]):
            if beginning in row or not batches:
                batches.append({})
            # Text is no point of a plot, and NaN or infinity would spread to the whole batch.
            for name, value in row.items():
                if isinstance(value, (int, float)) and math.isfinite(value):
                    batches[-1].setdefault(name, []).append(value)

        # A run of QaRL may log TRL's metrics too; ours win.
        for batch in batches:
            for ours, theirs in OF_TRL.items():
                if ours not in batch and theirs in batch:
                    batch[ours] = batch[theirs]
        return batches

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """
        Steps and finite values of a metric, `(N,)` each, in order; empty if it was not logged.

        Args:
            name: The metric's name in the log.
        """
        rows = [row for row in self.points if name in row]
        steps = np.array([row["step"] for row in rows], dtype=float)
        values = np.array([row[name] for row in rows], dtype=float)
        return steps, values

    def values(self, name: str) -> np.ndarray:
        """Values of [`series`]."""
        return self.series(name)[1]


def _combined(name: str, values: Sequence[float]) -> float:
    """The value of a metric for a rollout batch."""
    if name.endswith("min"):
        return float(min(values))
    if name.endswith("max"):
        return float(max(values))
    return float(np.mean(values))


def read_run(folder: Path, name: str) -> LoggedRun:
    """
    Read the log of a run.

    Args:
        folder: A folder with a `trainer_state.json` at the top or in a `checkpoint-*`.
        name: What to call the run.

    Raises:
        ValueError: if it has none, an empty one, or a file that is no log.
    """
    files = [*folder.glob("trainer_state.json"), *folder.glob("checkpoint-*/trainer_state.json")]
    logs = {file: _read_log(file) for file in files}
    if not logs:
        raise ValueError(f"{folder} is not a run: no trainer_state.json (`trainer.save_state()`), no checkpoint-*/.")

    ends = _ends(logs)
    # A run that went back to an earlier checkpoint leaves the later ones, with another log, and goes on in a new one.
    file = max(ends, key=lambda file: (file.stat().st_mtime_ns, _length(logs[file])))
    log = logs[file]
    if not log:
        raise ValueError(f"{folder} has logged nothing yet: its log is empty.")

    note = ""
    if len(ends) > 1:
        others = ", ".join(str(other.relative_to(folder)) for other in ends if other != file)
        note = f"the newest log, {file.relative_to(folder)}, was read; not continued, so left out: {others}"
    return LoggedRun(name, log, note)


def _ends(logs: dict[Path, list[dict[str, Any]]]) -> list[Path]:
    """The files whose log no other file goes on with: a run that never went back has one."""
    # Each checkpoint has the log up to its step. As text, because NaN is not equal to itself.
    texts = {}
    for file, log in logs.items():
        # The line that sums up a training comes after its last checkpoint, with which a longer run goes on.
        of_updates = [row for row in log if "train_runtime" not in row]
        texts[file] = [_as_text(row) for row in of_updates]
    ends: list[Path] = []
    # The longest first, so that of equal ones the first is the end.
    for file in sorted(texts, key=lambda file: len(texts[file]), reverse=True):
        rows = texts[file]
        if not any(texts[end][: len(rows)] == rows for end in ends):
            ends.append(file)
    return ends


def _as_text(row: dict[str, Any]) -> str:
    """A row without what an evaluation took: a run that goes on from before one repeats it."""
    counted = {name: value for name, value in row.items() if not name.endswith(("_runtime", "_per_second"))}
    return json.dumps(counted, sort_keys=True)


def _length(log: list[dict[str, Any]]) -> tuple[float, int]:
    """How far on a log is: its last step, and its number of lines."""
    return max((row["step"] for row in log), default=0), len(log)


def _read_log(file: Path) -> list[dict[str, Any]]:
    """The rows in a `trainer_state.json`, each of which must have its step."""
    try:
        state = json.loads(file.read_text())
    except ValueError as error:  # bytes that are no text, too
        raise ValueError(f"{file} must be JSON, as the Trainer writes it: {error}.") from error

    log = state.get("log_history") if isinstance(state, dict) else None
    rows: list[Any] = log if isinstance(log, list) else [None]
    if not all(_has_step(row) for row in rows):
        raise ValueError(f"{file} must have log_history, a list of rows that each have a step, as the Trainer writes.")
    return rows


def _has_step(row: Any) -> bool:
    """Whether a row of a log has a number for its step."""
    step = row.get("step") if isinstance(row, dict) else None
    return isinstance(step, int | float) and math.isfinite(step)
