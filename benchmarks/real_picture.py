"""
README's picture, from the committed cells of real_arms.py: `python benchmarks/real_picture.py` writes docs/real.png.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from matplotlib.figure import Figure
from real_arms import BEFORE
from real_table import accuracy, cells_of

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


if __name__ == "__main__":
    picture().savefig(Path(__file__).resolve().parents[1] / "docs" / "real.png", dpi=100)
