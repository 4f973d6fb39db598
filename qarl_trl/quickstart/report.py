"""What the quickstart shows: a progress bar and the closing table. Nothing is computed here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import ProgressCallback


class TrainingBar(ProgressCallback):
    """transformers' bar, with the reward and the mismatch in place of the whole log."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs and "reward" in logs:
            logp_diff = float(logs["mismatch/logp_diff_mean"])
            text = f"reward {float(logs['reward']):.2f}, mismatch {logp_diff:.0e}"
            self.training_bar.set_postfix_str(text, refresh=False)  # shown with the next step


def logged(log: list[dict[str, Any]], name: str) -> list[float]:
    """All values of `name`."""
    return [float(row[name]) for row in log if name in row]


def print_summary(summary: dict[str, Any], output: Path) -> None:
    """The closing table."""
    rows = {
        "held-out problems": f"{summary['held_out_problems']}, answered by the {summary['scheme']} engine",
        "accuracy before RL": f"{summary['accuracy_before']:.1%}",
        "accuracy after RL": f"{summary['accuracy_after']:.1%}",
        "mean log-prob mismatch": f"{summary['logp_diff']:.1e} nats per token (mean over the run)",
        "bf16 with TRL's learner": f"{summary['logp_diff_bf16_floor']:.1e} (before RL)",
        "time": ", ".join(f"{part} {share:.0%}" for part, share in summary["time_shares"].items()),
        "fresh engine": "identical answers" if summary["fresh_engine_answers_equal"] else "DIFFERENT ANSWERS",
        "checkpoint": output,
        "report": output / "report.html",
        "took": f"{summary['minutes']:.1f} minutes",
    }
    rule = "-" * 63
    print(rule, *(f"{name:<23}  {value}" for name, value in rows.items()), rule, sep="\n", flush=True)
