"""What the quickstart shows: a progress bar, the closing table and the picture of the run. Nothing is computed here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import ProgressCallback


class TrainingBar(ProgressCallback):
    """transformers' bar, with the reward and the gap in place of the whole log."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs and "reward" in logs:
            gap = float(logs["mismatch/logp_gap_mean"])
            text = f"reward {float(logs['reward']):.2f}, gap {gap:.0e}"
            self.training_bar.set_postfix_str(text, refresh=False)  # shown with the next step


def column(log: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values at which `name` was logged."""
    rows = [(row["step"], float(row[name])) for row in log if name in row]
    return [step for step, _ in rows], [value for _, value in rows]


def print_summary(summary: dict[str, Any], output: Path) -> None:
    """The closing table."""
    shares = ", ".join(f"{part} {share:.0%}" for part, share in summary["time_shares"].items())
    rows = {
        "held-out problems": f"{summary['held_out_problems']}, answered by the {summary['scheme']} engine",
        "accuracy before RL": f"{summary['accuracy_before']:.1%}",
        "accuracy after RL": f"{summary['accuracy_after']:.1%}",
        "mean log-prob gap": f"{summary['gap']:.1e} nats per token (mean over the run)",
        "bf16 with TRL's learner": f"{summary['gap_bf16_floor']:.1e} (before RL)",
        "time": shares,
        "fresh engine": "identical answers" if summary["fresh_engine_answers_equal"] else "DIFFERENT ANSWERS",
        "checkpoint": output,
        "picture": output / "report.png",
        "took": f"{summary['minutes']:.1f} minutes",
    }
    rule = "-" * 63
    print(rule, *(f"{name:<23}  {value}" for name, value in rows.items()), rule, sep="\n", flush=True)


def save_picture(log: list[dict[str, Any]], before: float, after: float, floor: float, path: Path) -> None:
    """Reward, gap, band and code flips of `trainer.state.log_history` in four panels, as a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10, 6.5), layout="constrained")
    rewards, gaps, bands, flips = axes.flat
    steps, reward = column(log, "reward")
    rewards.plot(steps, reward, marker=".", label="sampled reward, 4-bit rollouts")
    rewards.scatter([0, max(steps)], [before, after], color="black", zorder=3, label="held-out accuracy, greedy")
    rewards.set(title="Accuracy", xlabel="update", ylim=(0, 1.02))
    gaps.plot(*column(log, "mismatch/logp_gap_mean"), marker=".", label="engine against learner")
    gaps.axhline(floor, color="gray", linestyle="--", label="bf16 engine, TRL's learner, before RL")
    gaps.set(title="Mean log-prob gap (nats per token)", xlabel="update", yscale="log")
    bands.plot(*column(log, "ratio/pos_high_frac"), label="A > 0, above 1 + eps_h")
    bands.plot(*column(log, "ratio/neg_low_frac"), label="A < 0, below 1 - d_l")
    bands.plot(*column(log, "ratio/neg_high_frac"), label="A < 0, above 1 + d_h")
    bands.set(title="Share of completions outside the trust band", xlabel="update", ylim=(0, None))
    flips.plot(*column(log, "quant/code_flip_frac"), marker=".", label="codes changed between publishes")
    flips.set(title="Code flips", xlabel="update", ylim=(0, None))
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
