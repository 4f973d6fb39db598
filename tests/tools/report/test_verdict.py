"""The verdict on made-up and on committed runs: healthy ones and collapsed ones are told apart."""

import json
from pathlib import Path

import pytest

from qarl_trl.tools.report.runs import Run
from qarl_trl.tools.report.verdict import headline, judge as verdict

from .folders import log


ARMS = Path(__file__).parents[3] / "benchmarks" / "results" / "arms"


def levels(rows):
    return {finding.level: finding for finding in verdict(Run("a", rows))}


def test_a_healthy_run():
    findings = verdict(Run("a", log()))
    assert headline(findings) == "healthy" and [finding.level for finding in findings] == ["good"] * 3
    assert any("rounding alone moves" in finding.text for finding in findings)
    assert (
        "6% of the answers are clipped (A < 0, below)" in findings[-1].text
    )  # what is within bounds, with its figure


@pytest.mark.parametrize(
    ("changes", "level", "text"),
    [
        ({"mismatch/logp_diff_mean": 0.2, "mismatch/kl_k3": 0.02}, "bad", "a KL of 0.02"),
        ({"mismatch/logp_diff_mean": 0.2, "sync/verify_noise_floor": 0.02}, "look", "10.0 noise floors"),
        ({"quant/flip_frac": 0.0}, "bad", "no sync changes"),
        ({"quant/flip_frac": 0.4}, "bad", "changes 40.00%"),
        ({"ratio/neg_low_frac": 0.4}, "look", "40% of the answers are clipped (A < 0, below)"),
        ({"ratio/pos_high_frac": 0.9}, "bad", "90% of the answers are clipped (A > 0, above)"),
        ({"frac_reward_zero_std": 0.9}, "look", "90% of the prompts have equal rewards"),
    ],
)
def test_what_is_wrong_is_said_with_what_to_do(changes, level, text):
    finding = levels(log(**changes))[level]
    assert text in finding.text and finding.advice and finding.page


def test_trends_are_of_quarters_and_not_of_short_runs():
    rows = log(batches=12)
    for row in rows:
        batch = (row["step"] - 1) // 4
        if "reward" in row:
            row |= {"reward": 0.1 * batch if batch < 8 else 0.0, "mismatch/logp_diff_mean": 0.02 * (batch + 1)}
    texts = [finding.text for finding in verdict(Run("a", rows)) if finding.level == "bad"]
    assert any("it fell" in text for text in texts) and any("it grows" in text for text in texts)
    assert "bad" not in levels(rows[:28])  # control: 7 batches


def test_without_a_log_of_it_nothing_is_claimed():
    found = verdict(Run("a", [{"step": 1, "reward": 0.5}]))
    assert [finding.level for finding in found] == ["unknown", "unknown"]
    assert "too few for a trend" in found[0].text


def test_a_run_of_plain_trl_has_its_mismatch():
    rows = [
        row | {"sampling/sampling_logp_difference/mean": row.pop("mismatch/logp_diff_mean", 0) + 0.2} for row in log()
    ]
    rows = [
        {name: value for name, value in row.items() if not name.startswith(("mismatch/", "sync/"))} for row in rows
    ]
    run = Run("a", rows)
    assert run.values("mismatch/logp_diff_mean") == pytest.approx([0.2] * 8, rel=1e-4)
    assert any("mismatch 0.2 nats" in finding.text for finding in verdict(run))


@pytest.mark.parametrize(("arm", "wrong"), [("qarl_tbpo", False), ("rollout-only_grpo", True)])
def test_committed_runs(arm, wrong):
    """Regime "stale": the rollout-only arm collapses (docs/results.md)."""
    cell = json.loads((ARMS / "stale" / f"{arm}.0.json").read_text())["log"]
    rows = [
        {"step": step} | {name: values[step] for name, values in cell.items() if values[step] is not None}
        for step in range(len(cell["reward"]))
    ]
    assert headline(verdict(Run(arm, rows))) == ("something is wrong" if wrong else "healthy")
