"""Where an update's seconds go, and the speed-up over a baseline (paper Figs. 9b and 11)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from .draw import COLOURS, Picture, picture, plain
from .runs import Run


if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Shades of one hue, apart from the colours of the runs; "step" is TRL's sum where phases were not logged.
PHASE_COLOURS = {"rollout": "#4B4F73", "sync": "#8A8FBF", "update": "#C5C8E4", "step": "#9A9A9A"}


def speed_up(run: Run, baseline: Run) -> float:
    """How many times faster an update of `run` is than one of `baseline`, in mean seconds; NaN if either has none."""
    if run.phases() and baseline.phases():
        return baseline.seconds() / run.seconds()
    return baseline.mean("step_time") / run.mean("step_time")  # TRL's, without the optimizer's step


def time_chart(runs: Sequence[Run], baseline: Run | None) -> list[Picture]:
    """Seconds of an update by phase, and the speed-up if there is a baseline."""
    if not any(math.isfinite(run.seconds()) for run in runs):
        return []
    if baseline is not None and not any(math.isfinite(speed_up(run, baseline)) for run in runs):
        baseline = None
    caption = (
        "Mean over all updates that were logged, the first with its warm-up among them. Completions of different length take "
        "different time: compare with their lengths. "
    )
    if baseline is not None:
        caption += "Speed-up of a mean update over the baseline, whose own is the dashed line (paper Figs. 9b and 11)."
    return [picture("time", "Time", caption, partial(_draw, runs, baseline))]


def _draw(runs: Sequence[Run], baseline: Run | None) -> Figure:
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10 if baseline else 6, 1.4 + 0.35 * len(runs)), layout="constrained")
    bars, *rest = figure.subplots(1, 2 if baseline else 1, sharey=True, squeeze=False)[0]
    for row, run in enumerate(runs):
        left = 0.0
        for phase, seconds in (run.phases() or {"step": run.seconds()}).items():
            bars.barh(row, seconds, left=left, color=PHASE_COLOURS[phase])
            left += seconds
    used = [phase for phase in PHASE_COLOURS if any(phase in (run.phases() or ("step",)) for run in runs)]
    handles = [bars.barh(0, 0, color=PHASE_COLOURS[phase]) for phase in used]
    names = ["step, phases not logged" if phase == "step" else phase for phase in used]
    figure.legend(handles, names, loc="outside upper center", ncols=4, frameon=False)
    bars.set(xlabel="seconds of an update", yticks=range(len(runs)), yticklabels=[plain(run.name) for run in runs])
    bars.invert_yaxis()
    for axis in rest:
        values = [speed_up(run, baseline) for run in runs]  # NaN draws nothing
        axis.barh(range(len(runs)), values, color=COLOURS[: len(runs)])
        for row, value in enumerate(values):
            if math.isfinite(value):
                axis.text(value, row, f" {value:.2f}", va="center")
        axis.axvline(1.0, color=rcParams["text.color"], linestyle="--", linewidth=1)
        axis.set(xlabel=f"times faster than {plain(baseline.name)}", xlim=(0, 1.12 * np.nanmax(values)))
        axis.tick_params(labelleft=False)
    return figure
