"""A run's folder, read: its log, its settings, and where its texts are."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .settings import arm, bounds, level, read_settings


# Plain TRL's names for the same or nearly the same, used where ours were not logged.
TRL_NAMES = {
    "mismatch/logp_diff_mean": "sampling/sampling_logp_difference/mean",
    "mismatch/logp_diff_max": "sampling/sampling_logp_difference/max",
    "ratio/pos_high_frac": "clip_ratio/high_mean",
    "ratio/neg_low_frac": "clip_ratio/low_mean",
}
PHASES = ("time/rollout", "time/sync", "time/update")


@dataclass
class Run:
    """One run. `log` has a row for each log line, with its `step`; `unreadable` are files that were left out."""

    name: str
    folder: Path
    log: list[dict[str, Any]]
    settings: dict[str, Any] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)

    @property
    def arm(self) -> str:
        """In words."""
        return arm(self.settings)

    def edges(self, names: Sequence[str], clipped: str) -> list[float]:
        """Those bounds of its clip that exist, if it clips at this level: "sequence" or "token"."""
        found = bounds(self.settings)
        return [getattr(found, name) for name in names if found.exist[name] and level(self.settings) == clipped]

    @property
    def last_step(self) -> int:
        """Optimizer steps up to the last log line."""
        return max(row["step"] for row in self.log)

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a metric, in order; NaN and infinity are NaN, and both are empty if it was not logged."""
        for known in (name, TRL_NAMES.get(name)):
            rows = [(row["step"], row[known]) for row in self.log if isinstance(row.get(known), (int, float))]
            if rows:
                steps, values = np.array(sorted(rows, key=lambda row: row[0]), dtype=float).T
                return steps, np.where(np.isfinite(values), values, math.nan)
        return np.array([]), np.array([])

    def has(self, name: str) -> bool:
        """Whether there is a number to show."""
        return bool(np.isfinite(self.series(name)[1]).any())

    def mean(self, name: str) -> float:
        """Over its log lines; NaN if there is none."""
        values = self.series(name)[1]
        return float(np.nanmean(values)) if np.isfinite(values).any() else math.nan

    def phases(self) -> dict[str, float]:
        """Mean seconds of an update in each phase; empty if they were not logged."""
        return {name.removeprefix("time/"): self.mean(name) for name in PHASES if self.has(name)}

    def seconds(self) -> float:
        """Mean seconds of an update: the sum of the phases, else TRL's `step_time`; NaN if neither was logged."""
        return sum(self.phases().values()) or self.mean("step_time")

    def parquet_files(self, kind: str) -> list[Path]:
        """Files `KIND/KIND_<step>.parquet` in the order of their steps."""
        return sorted((self.folder / kind).glob(f"{kind}_*.parquet"), key=lambda file: (len(file.name), file.name))


def read_run(given: str) -> Run:
    """
    Read `FOLDER` or `NAME=FOLDER`.

    Raises:
        ValueError: If it is missing, no run, or has logged nothing.
    """
    is_named = "=" in given and not Path(given).expanduser().exists()
    name, _, path = given.partition("=") if is_named else ("", "", given)
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ValueError(f"no such folder: {folder}")
    if (folder / "quickstart.json").is_file() and (folder / "log.json").is_file():
        log, settings = _quickstart(folder)
    else:
        log, settings = _newest_log(folder), {}
    log = [row for row in log if isinstance(row, dict) and isinstance(row.get("step"), int) and len(row) > 1]
    if not log:
        raise ValueError(f"{folder} has logged nothing yet: its log is empty.")
    return Run(name or folder.resolve().name, folder, log, read_settings(folder) or settings)


def _newest_log(folder: Path) -> list[Any]:
    """`log_history` of the `trainer_state.json` that is furthest on: at the top, or in a checkpoint."""
    files = [*folder.glob("trainer_state.json"), *folder.glob("checkpoint-*/trainer_state.json")]
    if not files:
        raise ValueError(
            f"{folder} is no run: it needs a trainer_state.json, at the top or in a checkpoint-*, or the quickstart's "
            "log.json and quickstart.json. `trainer.save_state()` writes one."
        )
    states = [_read_json(file, dict) for file in files]
    log = max(states, key=lambda state: state.get("global_step") or 0).get("log_history")
    return log if isinstance(log, list) else []


def _quickstart(folder: Path) -> tuple[list[Any], dict[str, Any]]:
    """The quickstart's log; its held-out accuracies become `eval_reward`, its floor a line of two points."""
    log, summary = _read_json(folder / "log.json", list), _read_json(folder / "quickstart.json", dict)
    last = max((row.get("step", 0) for row in log), default=0)
    for step, accuracy in ((0, "accuracy_before"), (last, "accuracy_after")) if log else ():
        log.append(
            {
                "step": step,
                "eval_reward": summary.get(accuracy),
                "logp_diff_floor": summary.get("logp_diff_bf16_floor"),
            }
        )
    return log, {"quant_scheme": summary.get("scheme", "none"), "quantize_learner": True}


def _read_json(file: Path, kind: type) -> Any:
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, kind):
        raise ValueError(f"{file} is no log: must hold a {kind.__name__}, got a {type(found).__name__}.")
    return found
