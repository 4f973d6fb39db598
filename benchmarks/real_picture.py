"""
Pictures from the committed cells of real_arms.py: `python benchmarks/real_picture.py` writes docs/real.png, README's,
and docs/pairs.png, that of docs/results.md.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from real_arms import BEFORE
from real_table import CHOICES, accuracy, cells_of, error_of_problems, mean_and_error, pairs_of_choice

from qarl_trl.tools.report.plots import COLOURS


LINES = {"bf16 GRPO": "bf16", "rollout-only GRPO": "rollout-only", "QaRL GRPO": "QaRL"}
# Label, arm and which of its models is scored.
BARS = (
    ("start", BEFORE, "masters"),
    ("start, 4 bits", BEFORE, "low_bit"),
    ("bf16 GRPO", "bf16 GRPO", "masters"),
    ("bf16 GRPO, then 4 bits", "bf16 GRPO", "low_bit"),
    ("bf16 GRPO, then GPTQ", "bf16 GRPO", "gptq"),
    ("rollout-only GRPO", "rollout-only GRPO", "low_bit"),
    ("rollout-only TBPO", "rollout-only TBPO", "low_bit"),
    ("QaRL GRPO", "QaRL GRPO", "low_bit"),
    ("QaRL TBPO", "QaRL TBPO", "low_bit"),
)


def picture(regime: str = "g64") -> Figure:
    """Mismatch by rollout batch, mean of the seeds; held-out accuracy ± one standard error."""
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.7))
    for colour, (arm, label) in zip(COLOURS, LINES.items(), strict=False):
        columns = zip(*(cell["log"]["mismatch/logp_diff_mean"] for cell in cells_of(regime, arm)), strict=True)
        means = [statistics.fmean(values) for values in columns]
        left.semilogy(range(1, len(means) + 1), means, color=colour, label=label)
    left.set(title="Log-prob mismatch, nats per token", xlabel="rollout batch")
    left.legend(frameon=False)
    found = [(label, *accuracy(cells, model)) for label, arm, model in BARS if (cells := cells_of(regime, arm))]
    labels, means, errors = zip(*found, strict=True)
    right.barh(labels, means, xerr=errors, color=COLOURS[0], ecolor="0.3")
    right.invert_yaxis()
    right.set(title="Held-out answers that are right, %")
    return figure


# The first four contrasts of `CHOICES`, and their names below the axis.
COLUMNS = ("both rounded", "both by GPTQ", "both in bfloat16", "QaRL rounded,\nrollout-only by GPTQ")
MARKS = {"GRPO": "o", "TBPO": "^"}
SETTINGS = {"g64": "groups of 64", "channel": "one scale per channel", "stale": "8 updates a batch", "fp8": "float8"}
WIDTH = 0.6  # of the places of one column's dots


def pairs_picture() -> Figure:
    """
    QaRL less rollout-only, a dot for each pair of equal loss, seed and start: its error is that of the problems. Bars
    are means, with their standard error over problems and pairs.
    """
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    axis = figure.subplots()
    axis.axhline(0, color="0.6", linewidth=1)
    colours = dict(zip(SETTINGS, COLOURS, strict=False))

    for column, (_, first, second) in enumerate(CHOICES[: len(COLUMNS)]):
        pairs = pairs_of_choice(first, second)
        mean, error = mean_and_error([pair.points for pair in pairs])
        axis.bar(column, 2 * error, width=0.8, bottom=mean - error, color="0.9", zorder=0)
        axis.hlines(mean, column - 0.4, column + 0.4, color="0.4")
        for index, pair in enumerate(pairs):
            place = column + WIDTH * ((index + 0.5) / len(pairs) - 0.5)
            axis.errorbar(
                place,
                pair.mean,
                yerr=error_of_problems(pair.points),
                fmt=MARKS[pair.loss],
                color=colours[pair.regime],
                elinewidth=0.8,
            )

    axis.set_xticks(range(len(COLUMNS)), COLUMNS)
    axis.set_ylabel("QaRL less rollout-only, points")
    lines = [Line2D([], [], color="0.3", marker=mark, linestyle="", label=loss) for loss, mark in MARKS.items()]
    for regime, name in SETTINGS.items():
        lines.append(Line2D([], [], color=colours[regime], marker="s", linestyle="", label=name))
    figure.legend(handles=lines, loc="outside upper center", ncols=len(lines), frameon=False)
    return figure


if __name__ == "__main__":
    docs = Path(__file__).resolve().parents[1] / "docs"
    picture().savefig(docs / "real.png", dpi=100)
    pairs_picture().savefig(docs / "pairs.png", dpi=100)
