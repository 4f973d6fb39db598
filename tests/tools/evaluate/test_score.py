"""avg@k, pass@k and their intervals, against slow versions and against what the literature gives."""

import math

import numpy as np
import pytest
import references

from qarl_trl.tools.evaluate.score import bootstrap_means, pass_at_k, summarize


@pytest.mark.parametrize("samples", [1, 4, 7])
def test_pass_at_k_is_the_share_of_draws_with_a_correct_one(samples):
    for correct in range(samples + 1):
        for k in range(1, samples + 1):
            rewards = [1.0] * correct + [0.0] * (samples - correct)
            # Both divide integers below 100 and subtract once.
            assert pass_at_k(samples, correct, k) == pytest.approx(references.pass_at_k(rewards, k), abs=1e-15)


def test_bootstrap_of_many_is_the_normal_interval():
    """The outside oracle: for 400 independent answers, a share p has the interval p +- 1.96 sqrt(p (1 - p) / 400)."""
    values = [1.0] * 120 + [0.0] * 280
    low, high = np.percentile(bootstrap_means(values, [0, 0]), [2.5, 97.5])
    half = 1.96 * math.sqrt(0.3 * 0.7 / 400)
    # Steps of 1/400, and 1 % of noise in half.
    assert (low, high) == pytest.approx((0.3 - half, 0.3 + half), abs=0.004)


REWARDS = {"a": [[1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0]], "b": [[1.0, 0.0]] * 10}


def test_summary_averages_over_problems_and_then_over_suites():
    summary = summarize(REWARDS, [1, 2])
    assert summary["suites"]["a"]["avg@2"]["value"] == summary["suites"]["a"]["pass@1"]["value"] == 3 / 8
    assert summary["suites"]["a"]["pass@2"]["value"] == 0.5
    assert summary["suites"]["b"]["pass@2"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert summary["mean"]["avg@2"]["value"] == (3 / 8 + 1 / 2) / 2  # not over 14 problems: 13 / 28
    assert summary["mean"]["pass@2"]["value"] == 0.75


def test_the_mean_over_suites_varies_as_its_suites_do_together():
    a, b = [[1.0]] * 30 + [[0.0]] * 70, [[1.0]] * 50 + [[0.0]] * 50
    mean = summarize({"a": a, "b": b}, [1])["mean"]["avg@1"]
    spread = 1.96 * math.sqrt((0.3 * 0.7 + 0.5 * 0.5) / 100) / 2
    # With one stream of random numbers for both: 1.4 times as wide.
    assert mean["high"] - mean["low"] == pytest.approx(2 * spread, rel=0.06)
