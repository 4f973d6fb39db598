"""The plots: a table of metrics, and a function that draws a panel. Colours show runs, line styles show metrics."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .runs import LoggedRun


if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which colour-blind readers can tell apart, without those too pale on white; and a grey.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#7F7F7F")
STYLES = {"solid": "-", "dashed": "--", "dotted": ":"}
FLOOR = "sync/verify_noise_floor"
LOG_BOTTOM = 1e-8  # lower end of a log axis: log-probs in float32 resolve about 1e-7 nats


@dataclass(frozen=True)
class Panel:
    """
    One plot.

    Args:
        title: Its heading.
        unit: Label of its vertical axis.
        metrics: Names of the metrics in it, in the order of `STYLES`.
        log: Whether its vertical axis is logarithmic.
    """

    title: str
    unit: str
    metrics: tuple[str, ...]
    log: bool = False

    def split(self, runs: Sequence[LoggedRun]) -> tuple[list[str], dict[str, float]]:
        """
        Split the logged metrics into those that vary and those that do not.

        Args:
            runs: The runs of the report.

        Returns:
            The names of the metrics that vary over batches or runs, and the constant ones with their values.
        """
        varying = []
        constant = {}
        for name in self.metrics:
            values = np.concatenate([run.values(name) for run in runs])
            if len(values) == 0:
                continue
            # Over all runs together: two flat lines at different heights are worth a picture.
            if np.ptp(values) == 0:
                constant[name] = float(values[0])
            else:
                varying.append(name)
        return varying, constant


PANELS = (
    Panel("Reward", "mean reward", ("reward", "eval_reward")),
    Panel("Log-prob mismatch", "nats per token", ("mismatch/logp_diff_mean",), log=True),
    Panel("Clipped", "share of completions", ("ratio/clipped_frac", "ratio/neg_low_frac", "ratio/neg_high_frac")),
    Panel("Extremes of the sequence ratio", "learner now / at rollout", ("ratio/max", "ratio/min")),
    Panel("Quantized values that a sync changed", "share", ("quant/flip_frac",)),
    Panel("Entropy", "nats per token", ("entropy",)),
    Panel("Length of answers", "tokens", ("completions/mean_length",)),
    Panel("Answers cut off, tokens in loops", "share", ("completions/clipped_ratio", "error_tokens/frac")),
    Panel("Time of an update", "seconds", ("time/update", "time/rollout", "time/sync")),
)


def png(panel: Panel, runs: Sequence[LoggedRun]) -> bytes:
    """
    One panel as a picture, readable at a width of 370 pixels.

    Args:
        panel: What to draw.
        runs: The runs, in the order of `COLOURS`.

    Returns:
        The content of a PNG file.
    """
    from matplotlib.figure import Figure

    # Not by pyplot, which would look for a screen and keep the figure.
    figure = Figure(figsize=(4.2, 2.7), layout="constrained")
    draw(figure.add_subplot(), panel, runs)

    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=190)
    return file.getvalue()


def draw(axis: Axes, panel: Panel, runs: Sequence[LoggedRun]) -> None:
    """
    Draw the varying metrics of each run. It draws no text of a run; the page escapes such text.

    Args:
        axis: Where to draw.
        panel: What to draw.
        runs: The runs, in the order of `COLOURS`.
    """
    varying, _ = panel.split(runs)
    for colour, run in zip(COLOURS, runs, strict=False):
        for name, style in zip(varying, STYLES.values(), strict=False):
            _draw_metric(axis, panel, run, name, style, colour)
        if panel.log:
            _draw_noise_floor(axis, run, colour)

    axis.set(xlabel="update", ylabel=panel.unit)
    axis.grid(color="#e4e7eb")
    if panel.log:
        axis.set_yscale("log")
        # Whole powers of ten, where the axis has its labels.
        low, high = np.log10(axis.dataLim.intervaly)
        axis.set_ylim(10 ** np.floor(low), 10 ** np.ceil(high + 0.1))


def _draw_metric(axis: Axes, panel: Panel, run: LoggedRun, name: str, style: str, colour: str) -> None:
    """Draw one line: a metric of a run."""
    steps, values = run.series(name)
    # A mismatch may be 0, which a log axis cannot show.
    if panel.log:
        values = np.maximum(values, LOG_BOTTOM)
    # A line through a few points, or through one, is hard to see.
    marker = "o" if len(values) < 12 else None
    axis.plot(steps, values, style, color=colour, linewidth=1.2, marker=marker, markersize=3)


def _draw_noise_floor(axis: Axes, run: LoggedRun, colour: str) -> None:
    """Draw the mean noise floor of a run, if it was measured, across the whole panel."""
    floors = run.values(FLOOR)
    if not len(floors):
        return

    floor = floors.mean()
    axis.axhline(floor, color=colour, linewidth=0.8, linestyle=":")
    # One label is enough for the floors of all runs.
    if not axis.texts:
        axis.annotate("noise floor", (0.99, floor), xycoords=("axes fraction", "data"), ha="right", va="top")
