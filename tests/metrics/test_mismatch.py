"""`qarl_trl.metrics.mismatch` against Python floats."""

import math

import pytest
import references
import torch

from qarl_trl.metrics.mismatch import check_mismatch, mismatch_metrics


ROWS = 6
CAP = 2.0


def random_logps(seed, size):
    """Learner and engine log-probs whose mismatch is of the order of `size`, with NaNs, and a mask."""
    generator = torch.Generator().manual_seed(seed)
    shape = (ROWS, 40)

    old = -torch.rand(shape, generator=generator) - 0.1
    sampling = old + size * torch.randn(shape, generator=generator)
    unscored = torch.rand(shape, generator=generator) < 0.1
    sampling[unscored] = math.nan
    mask = (torch.rand(shape, generator=generator) < 0.8).long()
    return old, sampling, mask


def measured(old, sampling, mask, gather=lambda rows: rows):
    return mismatch_metrics(old, sampling, mask, CAP, gather)


def scored_differences(old, sampling, mask):
    """Learner minus engine of the tokens that count, as Python floats."""
    differences = []
    tokens = zip(old.flatten().tolist(), sampling.flatten().tolist(), mask.flatten().tolist(), strict=True)
    for of_learner, of_engine, counts in tokens:
        # NaN: the engine gave no log-prob.
        if counts and not math.isnan(of_engine):
            differences.append(of_learner - of_engine)
    return differences


@pytest.mark.parametrize("size", [1e-3, 0.1, 2.0])
def test_log_prob_metrics_are_those_of_python_floats(size):
    # Two completions far apart, one to each side.
    old, sampling, mask = random_logps(0, size)
    sampling[0] -= 5.0
    sampling[1] += 5.0

    metrics = measured(old, sampling, mask)

    apart = scored_differences(old, sampling, mask)
    k3 = 0.0
    for difference in apart:
        k3 += math.expm1(difference) - difference
    assert metrics["unscored_max"] == pytest.approx(1 - len(apart) / mask.sum().item(), abs=1e-6)
    assert metrics["logp_diff_mean"] == pytest.approx(sum(map(abs, apart)) / len(apart), rel=1e-5)
    assert metrics["logp_diff_max"] == pytest.approx(max(map(abs, apart)), rel=1e-5)
    # A small difference of float32 numbers, whose square this is.
    assert metrics["kl_k3"] == pytest.approx(k3 / len(apart), rel=1e-3)


@pytest.mark.parametrize("size", [1e-3, 0.1, 2.0])
def test_weights_are_those_of_python_floats(size):
    # So far apart that the first two weights reach the cap on either side, whatever the size.
    old, sampling, mask = random_logps(0, size)
    sampling[0] -= 5.0
    sampling[1] += 5.0
    # Left out of the loss: of no tokens the weight is 1.
    mask[2] = 0

    metrics = measured(old, sampling, mask)

    weights = []
    capped = 0
    for row in zip(old.tolist(), sampling.tolist(), mask.tolist(), strict=True):
        if not any(row[2]):
            continue
        weight = references.mismatch_weight(*row, CAP)
        weights.append(weight)
        capped += weight < 0.501 or weight > 1.999
    assert metrics["seq_weight_mean"] == pytest.approx(sum(weights) / (ROWS - 1), rel=1e-6)
    assert metrics["seq_weight_min"] == pytest.approx(min(weights), rel=1e-6) == pytest.approx(1 / CAP)
    assert metrics["seq_weight_max"] == pytest.approx(max(weights), rel=1e-6) == pytest.approx(CAP)
    assert 0 < metrics["seq_weight_capped_frac"] == pytest.approx(capped / (ROWS - 1))


def test_k3_keeps_its_digits_where_engine_and_learner_agree_best():
    """The control, exp(d) - 1 - d in float32, loses 2 % of the sum at a mismatch of 3e-4."""
    apart = torch.full((1, 1000), 3e-4)
    expected = math.expm1(3e-4) - 3e-4

    metrics = measured(apart, torch.zeros(1, 1000), torch.ones(1, 1000))

    assert metrics["kl_k3"] == pytest.approx(expected, rel=1e-3)
    assert (apart.exp() - 1 - apart).mean().item() != pytest.approx(expected, rel=2e-2)


def test_a_batch_without_a_scored_token_counts_nothing():
    metrics = measured(torch.full((2, 3), -1.0), torch.full((2, 3), math.nan), torch.ones(2, 3))

    assert metrics["unscored_max"] == 1
    assert metrics["logp_diff_mean"] == metrics["logp_diff_max"] == metrics["kl_k3"] == 0


def test_processes_are_measured_in_one_collective_as_one_but_for_what_the_worst_could_not_score():
    old, sampling, mask = random_logps(2, 0.1)
    # The second process could score one token.
    sampling[3:] = math.nan
    sampling[5, 7] = old[5, 7] + 1
    calls = []

    def gather_alone(rows):
        calls.append(rows)
        return rows

    def gather_both(rows):
        calls.append(rows)
        return torch.cat([rows, calls[0]])

    # The second one first: then what it gathers is there when the first one asks.
    measured(old[3:], sampling[3:], mask[3:], gather_alone)
    metrics = measured(old[:3], sampling[:3], mask[:3], gather_both)

    expected = measured(old, sampling, mask)
    # One collective of each process.
    assert len(calls) == 2
    # The share of the worst process, where half of all would look like an engine that works.
    assert metrics.pop("unscored_max") > 0.95 > 0.6 > expected.pop("unscored_max")
    assert metrics == expected


@pytest.mark.parametrize("logp_diff", [0.09, 0.1])
def test_a_mismatch_up_to_the_threshold_is_let_pass(logp_diff):
    check_mismatch(logp_diff, 0.0, 0.1)


def test_a_mismatch_above_the_threshold_stops_the_run():
    with pytest.raises(RuntimeError, match="0.1100 nats per token, above mismatch_abort_threshold=0.1"):
        check_mismatch(0.11, 0.0, 0.1)


@pytest.mark.parametrize(("logp_diff", "unscored"), [(math.nan, 0.0), (math.inf, 0.0), (0.0, 0.6)])
def test_log_probs_that_are_no_numbers_stop_every_run(logp_diff, unscored):
    # Control: the worst that is let pass.
    # `None`: without a threshold.
    check_mismatch(100.0, 0.5, None)

    with pytest.raises(RuntimeError, match="Log-probs hold NaN or infinity"):
        check_mismatch(logp_diff, unscored, None)
