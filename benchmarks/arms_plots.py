"""Pictures of docs/results.md and docs/metrics.md from the committed cells, drawn as `qarl-trl report` draws runs."""

from __future__ import annotations

import json
import math
import statistics
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arms import REGIMES, file_of
from arms_table import read

from qarl_trl.tools.report.draw import COLOURS, picture
from qarl_trl.tools.report.figures import Panel, draw_panels
from qarl_trl.tools.report.runs import Run


if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOCS = Path(__file__).resolve().parents[1] / "docs"
SHOWN = ("bf16 GRPO", "QaRL TBPO", "QaRL GSPO", "rollout-only TBPO", "rollout-only GRPO")
GAP = Panel("Mismatch between engine and learner", "nats per token", {"mismatch/logp_diff_mean": ""}, log=True)
REWARD = Panel("Sampled reward", "mean reward", {"reward": ""})
ENTROPY = Panel("Entropy", "nats per token", {"entropy": ""})
ERRORS = Panel("Error tokens", "share of tokens", {"error_tokens/frac": ""})
RATIO = Panel("Sequence ratio r", "r", {"ratio/max": "largest", "ratio/neg_q99": "A<0, 99 %", "ratio/min": "smallest"})


def mean_run(name: str, cells: list[dict[str, Any]], panels: tuple[Panel, ...]) -> Run:
    """The mean over seeds, rollout batch by rollout batch, as a run of a report."""
    rows: dict[int, dict[str, Any]] = {}
    for metric in (metric for panel in panels for metric in panel.metrics):
        curves = [cell["log"][metric] for cell in cells if metric in cell["log"]]
        for step, values in enumerate(zip(*curves, strict=True), 1):
            if known := [value for value in values if value is not None]:
                rows.setdefault(step, {"step": step})[metric] = statistics.fmean(known)
    return Run(name, Path(), list(rows.values()))


def draw_arms(regime: str) -> Figure:
    """Reward, mismatch, entropy and error tokens of the arms of a regime; thin lines are seeds."""
    panels, cells = (REWARD, GAP, ENTROPY, ERRORS), [read(regime, arm) for arm in SHOWN]
    runs = [mean_run(f"{arm} ({len(of)} seeds)", of, panels) for arm, of in zip(SHOWN, cells, strict=True)]
    figure = draw_panels(panels, runs)
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


def draw_one(regime: str, arm: str, seed: int) -> Figure:
    """Reward, mismatch and ratios of one run, as docs/metrics.md shows them: the axes are the same in both pictures."""
    panels = (REWARD, GAP, RATIO)
    cell = json.loads(file_of(regime, arm, seed).read_text())
    figure = draw_panels(panels, [mean_run(f"{arm}, seed {seed}", [cell], panels)])
    figure.axes[0].set_ylim(0, 1)
    figure.axes[1].set(yscale="log", ylim=(1e-8, 1))
    for axis in figure.axes:
        axis.set_xlabel("rollout batch")
    return figure


if __name__ == "__main__":
    for name, draw in {
        "results": partial(draw_arms, "hard"),
        "results_hot": partial(draw_arms, "hot"),
        "metrics_healthy": partial(draw_one, "hard", "QaRL TBPO", 0),
        "metrics_collapsed": partial(draw_one, "stale", "rollout-only GRPO", 0),
    }.items():
        (DOCS / f"{name}.png").write_bytes(picture(name, "", "", draw).light)
