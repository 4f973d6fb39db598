"""Pictures of results/arms/README.md from the cells, with the panels of `qarl-trl report`."""

from __future__ import annotations

import math
import statistics
from typing import Any

from arms import FOLDER, REGIMES
from arms_table import read
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from qarl_trl.tools.report.plots import COLOURS, Panel, draw
from qarl_trl.tools.report.runs import LoggedRun


SHOWN = ("bf16 GRPO", "QaRL TBPO", "QaRL GSPO", "rollout-only TBPO", "rollout-only GRPO")
MISMATCH = Panel("Mismatch between engine and learner", "nats per token", ("mismatch/logp_diff_mean",), log=True)
REWARD = Panel("Sampled reward", "mean reward", ("reward",))
ENTROPY = Panel("Entropy", "nats per token", ("entropy",))
ERRORS = Panel("Error tokens", "share of tokens", ("error_tokens/frac",))


def mean_run(name: str, cells: list[dict[str, Any]], panels: tuple[Panel, ...]) -> LoggedRun:
    """The mean over seeds, rollout batch by rollout batch, as a run of a report."""
    rows: dict[int, dict[str, Any]] = {}
    for panel in panels:
        for metric in panel.metrics:
            for step, mean in mean_curve(cells, metric).items():
                row = rows.setdefault(step, {"step": step})
                row[metric] = mean
    return LoggedRun(name, list(rows.values()))


def mean_curve(cells: list[dict[str, Any]], metric: str) -> dict[int, float]:
    """The mean of a metric over the cells that log it, by rollout batch, from 1."""
    means = {}
    for step, values in enumerate(zip(*curves_of(cells, metric), strict=True), 1):
        logged = [value for value in values if value is not None]
        if logged:
            means[step] = statistics.fmean(logged)
    return means


def curves_of(cells: list[dict[str, Any]], metric: str) -> list[list[float | None]]:
    """A metric of the cells that log it, a value for each rollout batch."""
    return [cell["log"][metric] for cell in cells if metric in cell["log"]]


def draw_panels(panels: tuple[Panel, ...], runs: list[LoggedRun], columns: int) -> Figure:
    """A figure of some panels, with the names of the runs above them."""
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(10, 2.9 * rows + 0.4), layout="constrained")
    handles = [Line2D([], [], color=colour) for colour in COLOURS[: len(runs)]]
    figure.legend(handles, [run.name for run in runs], loc="outside upper center", ncols=3, frameon=False)
    for index, panel in enumerate(panels):
        axis = figure.add_subplot(rows, columns, index + 1, title=panel.title)
        draw(axis, panel, runs)
    return figure


def draw_arms(regime: str) -> Figure:
    """Reward, mismatch, entropy and error tokens of the arms of a regime; thin lines are seeds."""
    panels = (REWARD, MISMATCH, ENTROPY, ERRORS)
    cells_of_arms = [read(regime, arm) for arm in SHOWN]
    runs = []
    for arm, cells in zip(SHOWN, cells_of_arms, strict=True):
        runs.append(mean_run(f"{arm} ({len(cells)} seeds)", cells, panels))

    figure = draw_panels(panels, runs, columns=2)
    for axis, panel in zip(figure.axes, panels, strict=True):
        axis.set_xlabel(f"rollout batch ({REGIMES[regime]['updates']} updates each)")
        for colour, cells in zip(COLOURS, cells_of_arms, strict=False):
            for metric in panel.metrics:
                draw_seeds(axis, curves_of(cells, metric), colour)
    return figure


def draw_seeds(axis: Axes, curves: list[list[float | None]], colour: str) -> None:
    """A thin line for each curve, with gaps where there is no value."""
    for curve in curves:
        values = [math.nan if value is None else value for value in curve]
        axis.plot(range(1, len(curve) + 1), values, color=colour, linewidth=0.5, alpha=0.4)


def main() -> None:
    for regime in ("hard", "hot"):
        draw_arms(regime).savefig(FOLDER / f"{regime}.png", dpi=100)


if __name__ == "__main__":
    main()
