"""avg@k, pass@k and their standard errors, against slow versions and against what the literature gives."""

import math

import pytest
import references

from qarl_trl.tools.evaluate.score import pass_at_k, summarize


@pytest.mark.parametrize("samples", [1, 4, 7])
def test_pass_at_k_is_the_share_of_draws_with_a_correct_one(samples):
    for correct in range(samples + 1):
        for k in range(1, samples + 1):
            rewards = [1.0] * correct + [0.0] * (samples - correct)
            # Both divide integers below 100 and subtract once.
            assert pass_at_k(samples, correct, k) == pytest.approx(references.pass_at_k(rewards, k), abs=1e-15)


REWARDS = {"a": [[1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0]], "b": [[1.0, 0.0]] * 10}


def test_summary_averages_over_problems_and_then_over_suites():
    summary = summarize(REWARDS, [1, 2])
    assert summary["suites"]["a"]["avg@2"]["value"] == summary["suites"]["a"]["pass@1"]["value"] == 3 / 8
    assert summary["suites"]["a"]["pass@2"]["value"] == 0.5
    assert summary["suites"]["b"]["pass@2"] == {"value": 1.0, "stderr": 0.0}
    assert summary["mean"]["avg@2"]["value"] == (3 / 8 + 1 / 2) / 2  # not over 14 problems: 13 / 28
    assert summary["mean"]["pass@2"]["value"] == 0.75


def test_standard_errors_are_those_of_a_mean():
    """The outside oracle: a share p of n independent answers has the error sqrt(p (1 - p) / (n - 1))."""
    a, b = [[1.0]] * 30 + [[0.0]] * 70, [[1.0]] * 50 + [[0.0]] * 50
    summary = summarize({"a": a, "b": b}, [1])
    variances = 0.3 * 0.7 / 99, 0.5 * 0.5 / 99
    for name, variance in zip("ab", variances, strict=True):
        assert summary["suites"][name]["avg@1"]["stderr"] == pytest.approx(math.sqrt(variance))
    assert summary["mean"]["avg@1"]["stderr"] == pytest.approx(math.sqrt(sum(variances)) / 2)
    assert summarize({"a": a[:1]}, [1])["mean"]["avg@1"] == {"value": 1.0, "stderr": None}
