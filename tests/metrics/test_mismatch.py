"""`qarl_trl.metrics.mismatch` against Python floats."""

import math

import pytest
import references
import torch

from qarl_trl.metrics.mismatch import check_mismatch, mismatch_metrics


def random_logps(seed, size):
    """Learner and engine log-probs whose mismatch is of the order of `size`, with NaNs and a mask."""
    rng = torch.Generator().manual_seed(seed)
    old = -torch.rand(6, 40, generator=rng) - 0.1
    sampling = old + size * torch.randn(6, 40, generator=rng)
    sampling[torch.rand(6, 40, generator=rng) < 0.1] = math.nan
    return old, sampling, (torch.rand(6, 40, generator=rng) < 0.8).long()


def measured(old, sampling, mask, cap=2.0, gather=lambda rows: rows):
    return mismatch_metrics(old, sampling, mask, cap, gather)


@pytest.mark.parametrize("size", [1e-3, 0.1, 2.0])
def test_metrics_are_those_of_python_floats(size):
    old, sampling, mask = random_logps(0, size)
    sampling[0] -= 5.0
    sampling[1] += 5.0
    found = measured(old, sampling, mask)
    tokens = zip(*(t.flatten().tolist() for t in (old, sampling, mask)), strict=True)
    apart = [o - s for o, s, m in tokens if m and not math.isnan(s)]
    assert found["unscored_max"] == pytest.approx(1 - len(apart) / mask.sum().item(), abs=1e-6)
    assert found["logp_diff_mean"] == pytest.approx(sum(map(abs, apart)) / len(apart), rel=1e-5)
    assert found["logp_diff_max"] == pytest.approx(max(map(abs, apart)), rel=1e-5)
    assert found["kl_k3"] == pytest.approx(sum(math.expm1(d) - d for d in apart) / len(apart), rel=1e-3)
    rows = zip(old.tolist(), sampling.tolist(), mask.tolist(), strict=True)
    weights = [references.mismatch_weight(*row, 2.0) for row in rows]
    assert found["seq_weight_mean"] == pytest.approx(sum(weights) / 6, rel=1e-6)
    assert found["seq_weight_min"] == pytest.approx(min(weights), rel=1e-6) == pytest.approx(0.5)
    assert found["seq_weight_max"] == pytest.approx(max(weights), rel=1e-6) == pytest.approx(2.0)
    assert 0 < found["seq_weight_capped_frac"] == pytest.approx(sum(w < 0.501 or w > 1.999 for w in weights) / 6)


def test_k3_keeps_its_digits_where_engine_and_learner_agree_best():
    """The control, exp(d) - 1 - d in float32, loses 2 % of the sum at a mismatch of 3e-4."""
    apart = torch.full((1, 1000), 3e-4)
    expected = math.expm1(3e-4) - 3e-4
    assert measured(apart, torch.zeros(1, 1000), torch.ones(1, 1000))["kl_k3"] == pytest.approx(expected, rel=1e-3)
    assert (apart.exp() - 1 - apart).mean().item() != pytest.approx(expected, rel=2e-2)


def test_a_batch_without_a_scored_token_counts_nothing():
    old = torch.full((2, 3), -1.0)
    for sampling, mask in ((torch.full((2, 3), math.nan), torch.ones(2, 3)), (old + 1, torch.zeros(2, 3))):
        found = measured(old, sampling, mask)
        assert found["unscored_max"] == float(mask.any())
        assert found["logp_diff_mean"] == found["logp_diff_max"] == found["kl_k3"] == 0


def test_processes_are_measured_in_one_collective_as_one_but_for_what_the_worst_could_not_score():
    whole, calls = random_logps(2, 0.1), []
    whole[1][3:] = math.nan
    whole[1][5, 7] = whole[0][5, 7] + 1
    halves = [[part[i : i + 3] for part in whole] for i in (0, 3)]
    measured(*halves[1], gather=lambda rows: calls.append(rows) or rows)
    found = measured(*halves[0], gather=lambda rows: calls.append(rows) or torch.cat([rows, calls[0]]))
    expected = measured(*whole)
    assert len(calls) == 2
    assert found.pop("unscored_max") > 0.95 > 0.6 > expected.pop("unscored_max")
    assert found == expected


@pytest.mark.parametrize(("logp_diff", "stops"), [(0.09, False), (0.1, False), (0.11, True)])
def test_a_mismatch_above_the_threshold_stops_the_run(logp_diff, stops):
    if not stops:
        return check_mismatch(logp_diff, 0.0, 0.1)
    with pytest.raises(RuntimeError, match="0.1100 nats per token, above mismatch_abort_threshold=0.1"):
        check_mismatch(logp_diff, 0.0, 0.1)


@pytest.mark.parametrize(("logp_diff", "unscored"), [(math.nan, 0.0), (math.inf, 0.0), (0.0, 0.6)])
def test_log_probs_that_are_no_numbers_stop_every_run(logp_diff, unscored):
    check_mismatch(100.0, 0.5, None)  # control
    with pytest.raises(RuntimeError, match="Log-probs hold NaN or infinity"):
        check_mismatch(logp_diff, unscored, None)
