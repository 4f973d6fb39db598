"""What the quickstart shows: a progress bar, the closing table and the picture of the run.

Invariant: nothing here computes a result; it only shows what was logged.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from transformers import TrainerCallback


class Bar:
    """A progress bar of one line, or of a few lines where the output is not a terminal."""

    def __init__(self, total: int) -> None:
        self._total, self._shown = total, 0
        self._live = sys.stdout.isatty()

    def update(self, step: int, text: str) -> None:
        filled = 30 * step // self._total
        line = f"  [{'#' * filled}{'.' * (30 - filled)}] {step}/{self._total}  {text}"
        if self._live:
            print(f"\r{line:<100}", end="", flush=True)
        elif 8 * step // self._total > self._shown:
            self._shown = 8 * step // self._total
            print(line, flush=True)

    def close(self) -> None:
        if self._live:
            print(flush=True)


class TrainingBar(TrainerCallback):
    """The bar of the RL phase, fed from the trainer's log."""

    def __init__(self, total: int) -> None:
        self._bar, self._text = Bar(total), ""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        logs = logs or {}
        if "reward" in logs:
            self._text = f"reward {float(logs['reward']):.2f}  gap {float(logs['mismatch/logp_gap_mean']):.0e}"
        self._bar.update(state.global_step, self._text)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._bar.close()


def column(log: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values at which `name` was logged."""
    rows = [(row["step"], float(row[name])) for row in log if name in row]
    return [step for step, _ in rows], [value for _, value in rows]


def time_shares(log: list[dict[str, Any]]) -> dict[str, float]:
    """Share of the training time in rollout, publish and update."""
    seconds = {part: sum(column(log, f"time/{part}")[1]) for part in ("rollout", "publish", "update")}
    total = sum(seconds.values())
    return {part: value / total for part, value in seconds.items()}


def print_table(rows: list[tuple[str, str]]) -> None:
    """Two columns between two rules."""
    width = max(len(name) for name, _ in rows)
    print("-" * (width + 40))
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    print("-" * (width + 40), flush=True)


def save_picture(log: list[dict[str, Any]], before: float, after: float, floor: float, path: Path) -> None:
    """
    Reward, gap, band and code flips of a run in four panels.

    Args:
        log (`list[dict]`): `trainer.state.log_history`.
        before (`float`): Held-out accuracy before RL.
        after (`float`): Held-out accuracy after RL.
        floor (`float`): Mean log-prob gap with quantization off.
        path (`Path`): PNG file.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10, 6.5), layout="constrained")
    steps, reward = column(log, "reward")
    axes[0, 0].plot(steps, reward, marker=".", label="sampled reward, 4-bit rollouts")
    axes[0, 0].scatter([0, max(steps)], [before, after], color="black", zorder=3, label="held-out accuracy, greedy")
    axes[0, 0].set(title="Accuracy", xlabel="update", ylim=(0, 1.02))
    axes[0, 1].plot(*column(log, "mismatch/logp_gap_mean"), marker=".", label="engine against learner")
    axes[0, 1].axhline(floor, color="gray", linestyle="--", label="bf16 engine, TRL's learner, before RL")
    axes[0, 1].set(title="Mean log-prob gap (nats per token)", xlabel="update", yscale="log")
    for name, label in (
        ("pos_high_frac", "A > 0, above 1 + eps_h"),
        ("neg_low_frac", "A < 0, below 1 - d_l"),
        ("neg_high_frac", "A < 0, above 1 + d_h"),
    ):
        axes[1, 0].plot(*column(log, f"tbpo/{name}"), label=label)
    axes[1, 0].set(title="Share of completions outside the trust band", xlabel="update", ylim=(0, None))
    axes[1, 1].plot(*column(log, "quant/code_flip_frac"), marker=".", label="codes changed between publishes")
    axes[1, 1].set(title="Code flips", xlabel="update", ylim=(0, None))
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
