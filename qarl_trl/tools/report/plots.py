"""The plots: a table of metrics, and a function that draws a panel. Colours show runs, line styles show metrics."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .runs import Run


if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which colour-blind readers can tell apart, without those too pale on white; and a grey.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#7F7F7F")
STYLES = {"solid": "-", "dashed": "--", "dotted": ":"}
FLOOR = "sync/verify_noise_floor"
LOG_BOTTOM = 1e-8  # lower end of a log axis: log-probs in float32 resolve about 1e-7 nats


class Panel(NamedTuple):
    """One plot, of `metrics` in the order of `STYLES`."""

    title: str
    unit: str
    metrics: tuple[str, ...]
    log: bool = False

    def split(self, runs: Sequence[Run]) -> tuple[list[str], dict[str, float]]:
        """Split the logged metrics into those that vary over batches or runs, and the constant ones with their values."""
        values = {name: np.concatenate([run.values(name) for run in runs]) for name in self.metrics}
        flat = {name: float(v[0]) for name, v in values.items() if len(v) and np.ptp(v) == 0}
        return [name for name, v in values.items() if len(v) and name not in flat], flat


PANELS = (
    Panel("Reward", "mean reward", ("reward", "eval_reward")),
    Panel("Log-prob mismatch", "nats per token", ("mismatch/logp_diff_mean",), log=True),
    Panel("Clipped", "share of completions", ("ratio/pos_high_frac", "ratio/neg_low_frac", "ratio/neg_high_frac")),
    Panel("Extremes of the sequence ratio", "learner now / at rollout", ("ratio/max", "ratio/min")),
    Panel("Quantized values that a sync changed", "share", ("quant/flip_frac",)),
    Panel("Entropy", "nats per token", ("entropy",)),
    Panel("Length of answers", "tokens", ("completions/mean_length",)),
    Panel("Answers cut off, tokens in loops", "share", ("completions/clipped_ratio", "error_tokens/frac")),
    Panel("Time of an update", "seconds", ("time/update", "time/rollout", "time/sync")),
)


def png(panel: Panel, runs: Sequence[Run]) -> bytes:
    """One panel as a picture, readable at a width of 370 pixels."""
    from matplotlib.figure import Figure

    figure, file = Figure(figsize=(4.2, 2.7), layout="constrained"), io.BytesIO()
    draw(figure.add_subplot(), panel, runs)
    figure.savefig(file, format="png", dpi=190)
    return file.getvalue()


def draw(axis: Axes, panel: Panel, runs: Sequence[Run]) -> None:
    """Draw the varying metrics of each run. It draws no text of a run; the page escapes such text."""
    names = panel.split(runs)[0]
    for colour, run in zip(COLOURS, runs, strict=False):
        for name, style in zip(names, STYLES.values(), strict=False):
            steps, values = run.series(name)
            values = np.maximum(values, LOG_BOTTOM) if panel.log else values
            marker = "o" if len(values) < 12 else None  # else a few single points would be invisible
            axis.plot(steps, values, style, color=colour, linewidth=1.2, marker=marker, markersize=3)
        if panel.log and len(floors := run.values(FLOOR)):
            axis.axhline(floors.mean(), color=colour, linewidth=0.8, linestyle=":")
            if not axis.texts:
                place = (0.99, floors.mean())
                axis.annotate("noise floor", place, xycoords=("axes fraction", "data"), ha="right", va="top")
    axis.set(xlabel="update", ylabel=panel.unit)
    axis.grid(color="#e4e7eb")
    if panel.log:
        axis.set_yscale("log")
        low, high = np.log10(axis.dataLim.intervaly)
        axis.set_ylim(10 ** np.floor(low), 10 ** np.ceil(high + 0.1))  # whole powers of ten
