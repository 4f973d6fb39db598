"""
Pictures from committed figures: `python benchmarks/real_picture.py` writes docs/first.png, README's, and
docs/pairs.png, that of docs/results.md.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from real_table import CHOICES, cells_of, error_of_problems, mean_and_error, pairs_of_choice

from qarl_trl.tools.report.plots import COLOURS


ROOT = Path(__file__).resolve().parents[1]
# The arms of README's picture: its names, those of real_arms.py, and those of bench_gpu_step.py in one shape.
ARMS = {
    "bf16 rollouts": ("bf16 GRPO", "bf16"),
    "rollout-only": ("rollout-only GRPO", "rollout-only W4A16"),
    "QaRL": ("QaRL GRPO", "QaRL W4A16"),
}
STEPS = ROOT / "benchmarks" / "results" / "h200" / "bench_gpu_step.jsonl"
SHAPE = "qwen2.5-1.5b"
RECIPE = "recipes/one_gpu/qwen2.5-7b_frozen.yaml"
# Its arms as `qarl-trl plan` prints them, from the estimated GiB of a 4090.
MEMORY = {
    "bf16 rollouts": r"^bf16: needs ([\d.]+)",
    "rollout-only": r"^rollout-only W4A16: needs ([\d.]+)",
    "QaRL, frozen base": r"^It fits: ([\d.]+)",
}
CARD = 23.5  # GiB of a 4090 that a process can use
# Contrasts of `CHOICES`, and their names below the axis.
COLUMNS = {
    "QaRL minus rollout-only, rounded": "both\nrounded",
    "QaRL minus rollout-only, both by GPTQ": "both by\nGPTQ",
    "QaRL minus rollout-only, both in bfloat16": "both in\nbfloat16",
    "QaRL rounded minus rollout-only by GPTQ": "QaRL rounded,\nrollout-only\nby GPTQ",
}
MARKS = {"GRPO": "o", "TBPO": "^"}
SETTINGS = {
    "g64": "groups of 64",
    "channel": "one scale per channel",
    "channel_portable": "the same, no AVX-512",
    "stale": "8 updates a batch",
    "fp8": "float8",
    "undistilled": "64, another start",
}
WIDTH = 0.6  # of the places of one column's dots


# README's ------------------------------------------------------------------------------------------------------------


def first_picture() -> Figure:
    """README's: mismatch measured on a CPU and on a GPU, and estimated memory of a 7B model on one GPU."""
    figure = Figure(figsize=(10, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_mismatch(left)
    draw_memory(right)
    return figure


def draw_mismatch(axis: Axes) -> None:
    """Two bars for each arm: a small model on a CPU, and a larger one on a GPU in a lighter shade."""
    height = 0.38
    measured = ((gaps_of_smollm2(), 1.0), (gaps_of_h200(), 0.5))
    for number, (gaps, shade) in enumerate(measured):
        places = [index + number * height for index in range(len(ARMS))]
        bars = axis.barh(places, gaps, height=height, color=COLOURS[: len(ARMS)], alpha=shade)
        axis.bar_label(bars, labels=[f"{gap:.2g}" for gap in gaps], padding=4)

    shades = [Patch(color="0.3", alpha=shade) for shade in (1.0, 0.5)]
    axis.legend(shades, ["135M, CPU", "1.5B, H200"], frameon=False, loc="lower right")
    axis.set(title="Mismatch, measured", xlim=(0, 0.72), xlabel="nats per token", xticks=[0, 0.2, 0.4, 0.6])
    between_bars = [index + height / 2 for index in range(len(ARMS))]
    axis.set_yticks(between_bars, ["bf16\nrollouts", "rollout-\nonly", "QaRL"])
    axis.invert_yaxis()


def draw_memory(axis: Axes) -> None:
    """A bar for each arm, and a line where a card is full."""
    memory = estimated_memory()
    bars = axis.barh(list(memory), list(memory.values()), color=COLOURS[: len(memory)])
    axis.bar_label(bars, fmt="%.1f", label_type="center", color="white")
    axis.axvline(CARD, color="0.3", linestyle="--")
    axis.text(CARD, -0.7, " 24 GB card", color="0.3", va="center")
    axis.set(title="7B with LoRA, estimated", xlim=(0, 44), xlabel="GiB")
    axis.set_yticks(range(len(memory)), ["bf16\nrollouts", "rollout-\nonly", "QaRL,\nfrozen\nbase"])
    axis.set_ylim(len(memory) - 0.5, -1.0)


def gaps_of_smollm2() -> list[float]:
    """Mean mismatch of the arms over their runs in groups of 64, in nats per token."""
    gaps = []
    for arm, _ in ARMS.values():
        means = [statistics.fmean(cell["log"]["mismatch/logp_diff_mean"]) for cell in cells_of("g64", arm)]
        gaps.append(statistics.fmean(means))
    return gaps


def gaps_of_h200() -> list[float]:
    """Mean mismatch of the arms in one shape, in nats per token."""
    gaps = {}
    for line in STEPS.read_text().splitlines():
        run = json.loads(line)
        if run["shape"] == SHAPE:
            gaps[run["arm"]] = statistics.fmean(run["mismatch"])
    return [gaps[arm] for _, arm in ARMS.values()]


def estimated_memory() -> dict[str, float]:
    """GiB of the arms of `RECIPE`, as `qarl-trl plan` estimates them."""
    command = [sys.executable, "-m", "qarl_trl.cli", "plan", "--config", RECIPE, "--gpu", "4090"]
    said = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout

    memory = {}
    for arm, line in MEMORY.items():
        match = re.search(line, said, re.MULTILINE)
        if match is None:
            raise RuntimeError(f"plan must print {line!r}, got:\n{said}")
        memory[arm] = float(match[1])
    return memory


# That of docs/results.md ---------------------------------------------------------------------------------------------


def pairs_picture() -> Figure:
    """
    QaRL minus rollout-only, a dot for each pair of equal loss, seed and start: its error is that of the problems. Bars
    are means, with their standard error over problems and pairs.
    """
    figure = Figure(figsize=(10, 5.6), layout="constrained")
    axis = figure.subplots()
    axis.axhline(0, color="0.6", linewidth=1)
    colours = dict(zip(SETTINGS, COLOURS, strict=False))

    contrasts = {what: (first, second) for what, first, second in CHOICES}
    for column, what in enumerate(COLUMNS):
        pairs = pairs_of_choice(*contrasts[what])
        mean, error = mean_and_error([pair.points for pair in pairs])
        axis.bar(column, 2 * error, width=0.8, bottom=mean - error, color="0.9", zorder=0)
        axis.hlines(mean, column - 0.4, column + 0.4, color="0.4")
        for index, pair in enumerate(pairs):
            # Beside each other, around the middle of the column.
            place = column + WIDTH * ((index + 0.5) / len(pairs) - 0.5)
            axis.errorbar(
                place,
                pair.mean,
                yerr=error_of_problems(pair.points),
                fmt=MARKS[pair.loss],
                color=colours[pair.regime],
                elinewidth=0.8,
            )

    axis.set_xticks(range(len(COLUMNS)), list(COLUMNS.values()))
    axis.set_ylabel("QaRL less\nrollout-only, points")

    lines = []
    for loss, mark in MARKS.items():
        lines.append(Line2D([], [], color="0.3", marker=mark, linestyle="", label=loss))
    for regime, name in SETTINGS.items():
        lines.append(Line2D([], [], color=colours[regime], marker="s", linestyle="", label=name))
    figure.legend(handles=lines, loc="outside upper center", ncols=3, frameon=False, columnspacing=1)
    return figure


def main() -> None:
    docs = ROOT / "docs"
    # Letters of 6 points on a phone.
    with matplotlib.rc_context({"font.size": 15}):
        first_picture().savefig(docs / "first.png", dpi=100)
        pairs_picture().savefig(docs / "pairs.png", dpi=100)


if __name__ == "__main__":
    main()
