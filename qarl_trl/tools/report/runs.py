"""A run's folder, read: its log, one point per rollout batch, and its settings."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from .settings import read_settings


# Plain TRL's names for the same or nearly the same, used where ours were not logged.
TRL_NAMES = {
    "mismatch/logp_diff_mean": "sampling/sampling_logp_difference/mean",
    "ratio/pos_high_frac": "clip_ratio/high_mean",
    "ratio/neg_low_frac": "clip_ratio/low_mean",
    "time/update": "step_time",
}


@dataclass
class Run:
    """One run. `log` has a row for each log line, with its `step`."""

    name: str
    folder: Path
    log: list[dict[str, Any]]
    settings: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def points(self) -> list[dict[str, float]]:
        """
        The log with one row per rollout batch, at the step of its first update.

        The ratio of a batch is 1 at its first update and leaves 1 with each further one, so that a point per update draws a
        saw-tooth. A batch has the mean over its log lines, or the extreme for names that end in `min` or `max`.
        Evaluations keep a row of their own.
        """
        batches: list[list[dict[str, Any]]] = []
        evaluations: list[list[dict[str, Any]]] = []
        for row in sorted(self.log, key=lambda row: row["step"]):
            if any(name.startswith("eval_") for name in row):
                evaluations.append([row])
            elif "reward" in row or not batches:  # TRL logs the reward in the line of the update that samples
                batches.append([row])
            else:
                batches[-1].append(row)
        return [_combine(rows) for rows in batches + evaluations]

    def logged_name(self, name: str) -> str:
        """The name under which this run logged a metric: ours or TRL's."""
        logged = any(name in row for row in self.points)
        return name if logged else TRL_NAMES.get(name, name)

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and finite values of a metric, `(N,)` each, in order; empty if it was not logged."""
        logged = self.logged_name(name)
        found = sorted((row["step"], row[logged]) for row in self.points if logged in row)
        steps, values = np.array(found, dtype=float).reshape(-1, 2).T
        return steps, values

    def values(self, name: str) -> np.ndarray:
        """Values of [`series`]."""
        return self.series(name)[1]


def _combine(rows: list[dict[str, Any]]) -> dict[str, float]:
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if isinstance(value, (int, float)) and math.isfinite(value):
                columns.setdefault(name, []).append(value)
    combine = {"min": min, "max": max}
    point = {name: combine.get(name[-3:], np.mean)(values) for name, values in columns.items()}
    return point | {"step": rows[0]["step"]}


def read_run(given: str) -> Run:
    """
    Read `FOLDER` or `NAME=FOLDER`, which has a `trainer_state.json`, at the top or in a `checkpoint-*`.

    Raises:
        ValueError: If the folder is missing, has no log, or logged nothing.
    """
    named = "=" in given and not Path(given).expanduser().exists()
    name, _, path = given.partition("=") if named else ("", "", given)
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ValueError(f"no such folder: {folder}")
    files = [*folder.glob("trainer_state.json"), *folder.glob("checkpoint-*/trainer_state.json")]
    if not files:
        raise ValueError(
            f"{folder} is no run: it must hold a trainer_state.json (`trainer.save_state()` writes one), at the top or in a "
            "checkpoint-*."
        )
    log = max(map(_read_log, files), key=len)  # of several checkpoints the one that is furthest on
    if not log:
        raise ValueError(f"{folder} has logged nothing yet: its log is empty.")
    return Run(name or folder.resolve().name, folder, log, read_settings(folder))


def _read_log(file: Path) -> list[dict[str, Any]]:
    try:
        rows = json.loads(file.read_text())["log_history"]
        return [row for row in rows if isinstance(row.get("step"), int) and len(row) > 1]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} cannot be read: {error!r}") from error
