"""Pictures of results/arms/README.md from the cells, with the panels of `qarl-trl report`."""

from __future__ import annotations

import math
import statistics
from typing import Any

from arms import FOLDER, REGIMES
from arms_table import read
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
    for metric in (metric for panel in panels for metric in panel.metrics):
        curves = [cell["log"][metric] for cell in cells if metric in cell["log"]]
        for step, values in enumerate(zip(*curves, strict=True), 1):
            if known := [value for value in values if value is not None]:
                rows.setdefault(step, {"step": step})[metric] = statistics.fmean(known)
    return LoggedRun(name, list(rows.values()))


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
    panels, cells = (REWARD, MISMATCH, ENTROPY, ERRORS), [read(regime, arm) for arm in SHOWN]
    runs = [mean_run(f"{arm} ({len(of)} seeds)", of, panels) for arm, of in zip(SHOWN, cells, strict=True)]
    figure = draw_panels(panels, runs, columns=2)
    for axis, panel in zip(figure.axes, panels, strict=True):
        axis.set_xlabel(f"rollout batch ({REGIMES[regime]['updates']} updates each)")
        for colour, of in zip(COLOURS, cells, strict=False):
            for curve in (cell["log"][name] for cell in of for name in panel.metrics if name in cell["log"]):
                axis.plot(
                    range(1, len(curve) + 1),
                    [math.nan if v is None else v for v in curve],
                    color=colour,
                    linewidth=0.5,
                    alpha=0.4,
                )
    return figure


if __name__ == "__main__":
    for regime in ("hard", "hot"):
        draw_arms(regime).savefig(FOLDER / f"{regime}.png", dpi=100)
