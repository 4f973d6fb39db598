"""`qarl_trl.metrics.mismatch` against Python floats."""

import math

import pytest
import references
import torch
from configs import config

from qarl_trl.metrics.mismatch import check_mismatch, mismatch_sums, reduce_stats, weight_stats


def random_logp_diff(seed, size):
    """Learner and engine log-probs whose mismatch is of the order of `size`, with NaNs and a mask."""
    rng = torch.Generator().manual_seed(seed)
    old = -torch.rand(6, 40, generator=rng) - 0.1
    sampling = old + size * torch.randn(6, 40, generator=rng)
    sampling[torch.rand(6, 40, generator=rng) < 0.1] = math.nan
    return old, sampling, (torch.rand(6, 40, generator=rng) < 0.8).long()


@pytest.mark.parametrize("size", [1e-3, 0.1, 2.0])
def test_mismatch_sums_are_those_of_python_floats(size):
    old, sampling, mask = random_logp_diff(0, size)
    found = {k: v.item() for k, v in mismatch_sums(old, sampling, mask).items()}
    logp_diffs = [
        o - s
        for o, s, m in zip(*(t.flatten().tolist() for t in (old, sampling, mask)), strict=True)
        if m and not math.isnan(s)
    ]
    k3 = [math.expm1(logp_diff) - logp_diff for logp_diff in logp_diffs]
    assert found["tokens_sum"] == len(logp_diffs) < mask.sum()
    assert found["unscored_max"] == pytest.approx(1 - len(logp_diffs) / mask.sum().item(), abs=1e-6)
    assert found["logp_diff_sum"] == pytest.approx(sum(abs(logp_diff) for logp_diff in logp_diffs), rel=1e-5)
    assert found["logp_diff_max"] == pytest.approx(max(abs(logp_diff) for logp_diff in logp_diffs), rel=1e-5)
    assert found["k3_sum"] == pytest.approx(sum(k3), rel=1e-3)  # measured 2e-4 at 1e-3: d itself is rounded by 6e-8


def test_k3_keeps_its_digits_where_engine_and_learner_agree_best():
    """The control, exp(d) - 1 - d in float32, loses 2 % of the sum at a mismatch of 3e-4."""
    logp_diff = torch.full((1, 1000), 3e-4)
    expected = 1000 * (math.expm1(3e-4) - 3e-4)
    found = mismatch_sums(logp_diff, torch.zeros_like(logp_diff), torch.ones_like(logp_diff))["k3_sum"].item()
    assert found == pytest.approx(expected, rel=1e-3)
    assert (logp_diff.exp() - 1 - logp_diff).sum().item() != pytest.approx(expected, rel=2e-2)


def test_a_batch_without_a_scored_token_counts_nothing():
    old = torch.full((2, 3), -1.0)
    for sampling, mask in ((torch.full((2, 3), math.nan), torch.ones(2, 3)), (old + 1, torch.zeros(2, 3))):
        found = mismatch_sums(old, sampling, mask)
        assert found.pop("unscored_max").item() == float(mask.any())
        assert all(value.item() == 0 for value in found.values())
    nothing = torch.zeros(2, 0)
    assert mismatch_sums(nothing, nothing, nothing)["logp_diff_max"].item() == 0


def test_weight_stats_are_those_of_python_floats():
    old, sampling, mask = random_logp_diff(1, 0.3)
    sampling[0] -= 5.0
    sampling[1] += 5.0
    found = {k: v.item() for k, v in weight_stats(old, sampling, mask, 2.0).items()}
    rows = zip(old.tolist(), sampling.tolist(), mask.tolist(), strict=True)
    weights = [references.mismatch_weight(*row, 2.0) for row in rows]
    assert found["seq_weight_mean"] == pytest.approx(sum(weights) / 6, rel=1e-6)
    assert found["seq_weight_min"] == pytest.approx(min(weights), rel=1e-6) == pytest.approx(0.5)
    assert found["seq_weight_max"] == pytest.approx(max(weights), rel=1e-6) == pytest.approx(2.0)
    assert found["seq_weight_capped_frac"] == pytest.approx(2 / 6)


@pytest.mark.parametrize("cap", [1.001, 2.0, 100.0])
def test_a_weight_just_inside_its_cap_is_not_counted_as_capped(cap):
    old, mask = torch.zeros(2, 1), torch.ones(2, 1)
    inside = torch.tensor([[1.0], [-1.0]]) * math.log(cap) * 0.99
    assert weight_stats(old, inside, mask, cap)["seq_weight_capped_frac"].item() == 0
    assert weight_stats(old, inside / 0.98, mask, cap)["seq_weight_capped_frac"].item() == 1


def test_statistics_of_all_processes_come_in_one_collective():
    calls = []

    def gather(row):
        calls.append(row)
        return torch.cat([row, torch.tensor([[1.0, 2.0, 3.0, 4.0]])])

    stats = {
        "a_sum": torch.tensor(5.0),
        "b_min": torch.tensor(5),
        "c_max": torch.tensor(5.0),
        "d_frac": torch.tensor(5.0),
    }
    assert reduce_stats(stats, gather) == {"a_sum": 6.0, "b_min": 2.0, "c_max": 5.0, "d_frac": 4.5}
    assert len(calls) == 1


@pytest.mark.parametrize(("logp_diff", "stops"), [(0.09, False), (0.1, False), (0.11, True)])
def test_a_logp_diff_above_the_threshold_stops_the_run_with_its_likely_causes(tmp_path, logp_diff, stops):
    args = config(tmp_path, use_vllm=True, mismatch_abort_threshold=0.1, temperature=0.7)
    if not stops:
        return check_mismatch(logp_diff, 0.0, args)
    with pytest.raises(RuntimeError) as error:
        check_mismatch(logp_diff, 0.0, args)
    message = str(error.value)
    for cause in ("stale engine", "wrong scheme", "sampling parameters", "kernels"):
        assert cause in message
    for fact in ("mismatch_abort_threshold=0.1", "must both run 'W4A16'", "temperature=0.7", f"{logp_diff:.4f} nats"):
        assert fact in message
    assert "quantize_learner=False" not in message


def test_the_baseline_is_told_that_its_logp_diff_is_the_point(tmp_path):
    args = config(tmp_path, use_vllm=True, mismatch_abort_threshold=0.1, quantize_learner=False)
    with pytest.raises(RuntimeError, match=r"quantize_learner=False: this mismatch is what the method removes"):
        check_mismatch(1.0, 0.0, args)


def test_without_a_threshold_no_logp_diff_stops(tmp_path):
    check_mismatch(100.0, 0.5, config(tmp_path))


@pytest.mark.parametrize(("logp_diff", "unscored"), [(math.nan, 0.0), (math.inf, 0.0), (0.0, 0.6)])
def test_log_probs_that_are_no_numbers_stop_every_run(tmp_path, logp_diff, unscored):
    with pytest.raises(
        RuntimeError, match=f"the mismatch .* is {logp_diff} nats per token, and the engine gave NaN to {unscored:.0%}"
    ):
        check_mismatch(logp_diff, unscored, config(tmp_path))
