"""avg@k, pass@k and their standard errors, against slow versions and against what the literature gives."""

import math

import pytest
import references

from qarl_trl.tools.evaluate.score import pass_at_k, summarize


REWARDS = {
    "a": [[1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0]],
    "b": [[1.0, 0.0]] * 10,
}


@pytest.mark.parametrize("samples", [1, 4, 7])
def test_pass_at_k_is_the_share_of_draws_with_a_correct_one(samples):
    for correct in range(samples + 1):
        rewards = [1.0] * correct + [0.0] * (samples - correct)
        for k in range(1, samples + 1):
            share = references.pass_at_k(rewards, k)

            # Both divide integers below 100 and subtract once.
            assert pass_at_k(samples, correct, k) == pytest.approx(share, abs=1e-15)


def test_summary_averages_over_problems_and_then_over_suites():
    summary = summarize(REWARDS, [1, 2])

    # Over the problems of a suite.
    a = summary["suites"]["a"]
    b = summary["suites"]["b"]
    assert a["avg@2"]["value"] == a["pass@1"]["value"] == 3 / 8
    assert a["pass@2"]["value"] == 0.5
    assert b["pass@2"] == {"value": 1.0, "stderr": 0.0}

    # Over suites, and not over all 14 problems, which gives 13 / 28.
    mean = summary["mean"]
    assert mean["avg@2"]["value"] == (3 / 8 + 1 / 2) / 2
    assert mean["pass@2"]["value"] == 0.75


def test_standard_errors_are_those_of_a_mean():
    """The outside oracle: a share p of n independent answers has the error sqrt(p (1 - p) / (n - 1))."""
    a = [[1.0]] * 30 + [[0.0]] * 70
    b = [[1.0]] * 50 + [[0.0]] * 50
    variance_a = 0.3 * 0.7 / 99
    variance_b = 0.5 * 0.5 / 99

    summary = summarize({"a": a, "b": b}, [1])

    stderr_a = summary["suites"]["a"]["avg@1"]["stderr"]
    stderr_b = summary["suites"]["b"]["avg@1"]["stderr"]
    assert stderr_a == pytest.approx(math.sqrt(variance_a))
    assert stderr_b == pytest.approx(math.sqrt(variance_b))
    assert summary["mean"]["avg@1"]["stderr"] == pytest.approx(math.sqrt(variance_a + variance_b) / 2)


def test_a_single_problem_has_no_standard_error():
    summary = summarize({"a": [[1.0]]}, [1])

    assert summary["mean"]["avg@1"] == {"value": 1.0, "stderr": None}
