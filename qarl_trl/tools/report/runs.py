"""Read the log in a run's folder, with one point per rollout batch."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np


# TRL's metrics that replace ours in a run of plain TRL.
OF_TRL = {"mismatch/logp_diff_mean": "sampling/sampling_logp_difference/mean", "time/update": "step_time"}


@dataclass
class Run:
    """One run. `log` has a row for each log line, with its `step`."""

    name: str
    log: list[dict[str, Any]]

    @cached_property
    def points(self) -> list[dict[str, float]]:
        """
        The log with one row per rollout batch, at the step of its first update.

        The ratio is 1 at the first update of a batch and moves away with each further one, so one point per update would draw a
        sawtooth. The value of a batch is the mean over its log lines, or the extreme for names that end in `min` or `max`.
        """
        batches: list[dict[str, list[float]]] = []
        for row in sorted(self.log, key=lambda row: row["step"]):
            if "reward" in row or not batches:  # TRL logs the reward in the line of the update that samples
                batches.append({})
            for name, value in row.items():
                if isinstance(value, (int, float)) and math.isfinite(value):
                    batches[-1].setdefault(name, []).append(value)
        for batch in batches:
            batch |= {ours: batch[theirs] for ours, theirs in OF_TRL.items() if ours not in batch and theirs in batch}
        combine = {"min": min, "max": max}
        return [
            {name: float(combine.get(name[-3:], np.mean)(values)) for name, values in batch.items()}
            | {"step": batch["step"][0]}
            for batch in batches
        ]

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and finite values of a metric, `(N,)` each, in order; empty if it was not logged."""
        found = [(row["step"], row[name]) for row in self.points if name in row]
        steps, values = np.array(found, dtype=float).reshape(-1, 2).T
        return steps, values

    def values(self, name: str) -> np.ndarray:
        """Values of [`series`]."""
        return self.series(name)[1]


def read_run(folder: Path, name: str) -> Run:
    """Read a folder with a `trainer_state.json` at the top or in a `checkpoint-*`; `ValueError` if it has none or an empty one."""
    files = [*folder.glob("trainer_state.json"), *folder.glob("checkpoint-*/trainer_state.json")]
    logs = [json.loads(file.read_text())["log_history"] for file in files]
    if not logs:
        raise ValueError(f"{folder} is not a run: no trainer_state.json (`trainer.save_state()`), no checkpoint-*/.")
    log = max(logs, key=len)  # the longest one, if there are several
    if not log:
        raise ValueError(f"{folder} has logged nothing yet: its log is empty.")
    return Run(name, log)
