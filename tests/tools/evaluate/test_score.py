"""avg@k, pass@k and their standard errors, against slow versions and against what the literature gives."""

import math

import pytest
import references

from qarl_trl.tools.evaluate.score import pass_at_k, summarize, table


REWARDS = {
    # By problem, two answers each: suites of unequal lengths, so that the order of the means matters.
    "a": [[1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0]],
    "b": [[1.0, 0.0]] * 10,
}


def by_math(**suites):
    """Suites that one reward function graded."""
    return {name: {"math_reward": rows} for name, rows in suites.items()}


@pytest.mark.parametrize("samples", [1, 4, 7])
def test_pass_at_k_is_the_share_of_draws_with_a_correct_one(samples):
    for correct in range(samples + 1):
        rewards = [1.0] * correct + [0.0] * (samples - correct)
        for k in range(1, samples + 1):
            share = references.pass_at_k(rewards, k)

            # Both divide integers below 100 and subtract once.
            assert pass_at_k(samples, correct, k) == pytest.approx(share, abs=1e-15)


def test_summary_averages_over_problems_and_then_over_suites():
    summary = summarize(by_math(**REWARDS), 2, [1, 2])

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
    # With n - 1, as of a sample.
    variance_a = 0.3 * 0.7 / 99
    variance_b = 0.5 * 0.5 / 99

    summary = summarize(by_math(a=a, b=b), 1, [1])

    stderr_a = summary["suites"]["a"]["avg@1"]["stderr"]
    stderr_b = summary["suites"]["b"]["avg@1"]["stderr"]
    assert stderr_a == pytest.approx(math.sqrt(variance_a))
    assert stderr_b == pytest.approx(math.sqrt(variance_b))
    # Suites are independent, so variances add up.
    assert summary["mean"]["avg@1"]["stderr"] == pytest.approx(math.sqrt(variance_a + variance_b) / 2)


def test_a_single_problem_has_no_standard_error():
    summary = summarize(by_math(a=[[1.0]]), 1, [1])

    assert summary["mean"]["avg@1"] == {"value": 1.0, "stderr": None}


def test_each_reward_function_has_its_metrics():
    """pass@k only where rewards are right or wrong: half a point is no answer."""
    suite = {"math_reward": [[1.0, 0.0], [0.0, 0.0]], "length": [[0.5, 3.0], [0.0, 1.0]]}

    summary = summarize({"a": suite}, 2, [2])

    scores = summary["suites"]["a"]
    assert list(scores) == ["math_reward avg@2", "math_reward pass@2", "length mean@2"]
    assert scores["math_reward avg@2"]["value"] == 0.25
    assert scores["length mean@2"]["value"] == (1.75 + 0.5) / 2
    figures = {"problems": 2, "mean_tokens": 1.0, "cut_off": 0.0}
    line = table({"suites": {"a": scores | figures}, "mean": summary["mean"]}).splitlines()[1]
    assert "25.0 ± 25.0" in line
    assert "1.125 ± 0.625" in line


def test_rewards_of_none_are_not_counted():
    """Not as zero, which would lower the score."""
    rewards = {"a": {"f": [[1.0, None], [None, None], [0.0, 1.0]]}, "b": {"f": [[None, None]]}}

    summary = summarize(rewards, 2, [2])

    assert summary["suites"]["a"]["avg@2"]["value"] == 0.75
    assert summary["suites"]["a"]["pass@2"]["value"] == 1.0
    # A suite without any reward has no score, and with it there is no mean over suites.
    assert summary["suites"]["b"]["avg@2"] == {"value": None, "stderr": None}
    assert summary["mean"]["avg@2"]["value"] is None
