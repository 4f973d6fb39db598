"""Pictures of docs/results.md and docs/metrics.md from the committed cells."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib
from arms import file_of
from arms_table import read


matplotlib.use("Agg")
from matplotlib import pyplot as plt  # after the backend


DOCS = Path(__file__).resolve().parents[1] / "docs"
# Colours of Okabe and Ito, which stay apart for colour-blind readers.
SHOWN = {
    "bf16 GRPO": "black",
    "QaRL TBPO": "#0072B2",
    "QaRL GSPO": "#009E73",
    "rollout-only TBPO": "#E69F00",
    "rollout-only GRPO": "#D55E00",
}


def mean_curve(cells: list[dict[str, Any]], name: str) -> list[float]:
    """Mean over seeds, rollout batch by rollout batch."""
    return [statistics.fmean(values) for values in zip(*(cell["log"][name] for cell in cells), strict=True)]


def compare(path: Path) -> None:
    """Reward, gap and entropy of the arms of the hard regime; thin lines are seeds."""
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    panels = {"reward": "Sampled reward", "mismatch/logp_gap_mean": "Mean log-prob gap (nats per token)"}
    panels["entropy"] = "Entropy (nats per token)"
    for axis, (name, title) in zip(axes, panels.items(), strict=True):
        for arm, colour in SHOWN.items():
            cells = [cell for cell in read("hard", arm) if name in cell["log"]]
            for cell in cells:
                axis.plot(range(1, len(cell["log"][name]) + 1), cell["log"][name], color=colour, lw=0.5, alpha=0.4)
            if cells:
                curve = mean_curve(cells, name)
                axis.plot(range(1, len(curve) + 1), curve, color=colour, lw=2, label=f"{arm} ({len(cells)} seeds)")
        axis.set(title=title, xlabel="rollout batch (8 updates each)")
        axis.grid(alpha=0.3)
    axes[1].set_yscale("log")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def one_run(regime: str, arm: str, seed: int, path: Path) -> None:
    """Reward, gap and ratios of one run, as docs/metrics.md shows them."""
    log = json.loads(file_of(regime, arm, seed).read_text())["log"]
    figure, (reward, gap, ratio) = plt.subplots(1, 3, figsize=(10, 2.8), layout="constrained")
    steps = range(1, len(log["reward"]) + 1)
    reward.plot(steps, log["reward"], color="black")
    reward.set(title="reward", ylim=(0, 1))
    gap.plot(steps, log["mismatch/logp_gap_mean"], color="black")
    gap.set(title="mismatch/logp_gap_mean", yscale="log", ylim=(1e-8, 1))
    for name, colour, style in (
        *(("ratio/max", "#D55E00", "-"), ("ratio/neg_q99", "#D55E00", "--"), ("ratio/pos_q99", "#0072B2", "--")),
        ("ratio/min", "#0072B2", "-"),
    ):
        ratio.plot(steps, log[name], color=colour, linestyle=style, label=name)
    ratio.set(title="sequence ratio r")
    ratio.legend(fontsize=7, frameon=False)
    for axis in (reward, gap, ratio):
        axis.set_xlabel("rollout batch")
        axis.grid(alpha=0.3)
    figure.suptitle(f"{arm}, seed {seed}", fontsize=10)
    figure.savefig(path, dpi=90)
    plt.close(figure)


if __name__ == "__main__":
    compare(DOCS / "results.png")
    one_run("hard", "QaRL TBPO", 0, DOCS / "metrics_healthy.png")
    one_run("hot", "rollout-only GRPO", 0, DOCS / "metrics_collapsed.png")
