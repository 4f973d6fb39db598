"""`qarl_trl.rollout.sync_check.verdict`: which engine is wrong or stale."""

import math

import pytest
import torch

from qarl_trl.rollout.sync_check.learner_logps import LearnerLogps
from qarl_trl.rollout.sync_check.verdict import (
    GROWTH,
    LEFT,
    MOST_FIRST,
    USUAL,
    USUAL_OF_WEIGHT_ONLY_EXPERTS,
    Anchor,
    read_first,
    read_later,
)
from rollout.sync_check.cases import NOISE, TOKENS, Case, noise


@pytest.fixture
def case():
    return Case()


# The first sync -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "limit"), [(100, MOST_FIRST), (40, LEFT * 40), (8, USUAL)])
def test_a_sync_must_leave_a_mismatch_that_rounding_explains(case, before, limit):
    """All in noise floors: the lower the mismatch before, the less of them may be left."""
    answers = case.plain + noise(before)

    reading = read_first(answers, case.learner, answers)

    assert reading.limit == pytest.approx(limit * NOISE, rel=1e-3)
    assert reading.logp_diff == pytest.approx(before * NOISE, rel=1e-3)
    assert reading.noise_floor == pytest.approx(NOISE, rel=1e-3)
    assert math.isnan(reading.followed)

    # Engines on both sides of the limit.
    for size, wrong in ((1, False), (0.95 * limit, False), (1.05 * limit, True), (before, True)):
        after = case.plain + noise(size)
        assert read_first(after, case.learner, answers).wrong is wrong


# Mismatch and noise floor of first syncs that were bit for bit right (A, B, A), on an H200 with vLLM 0.26:
# benchmarks/results/h200. Those of experts are of a noise floor without the noise of routers and experts.
# (In toys both floors are the same to 6 %.)
H200 = {
    "W4A16": (0.01033, 0.007506, USUAL),
    "W4A16, graphs": (0.006516, 0.005462, USUAL),
    "FP8_DYNAMIC, graphs": (0.06615, 0.0566, USUAL),
    "adapter, W4A16": (0.009274, 0.00991, USUAL),
    "W4A16, 1.5B": (0.01441, 0.0144, USUAL),
    "W4A16, experts": (0.04672, 0.01168, USUAL_OF_WEIGHT_ONLY_EXPERTS),
    "FP8_DYNAMIC, experts": (0.03914, 0.03003, USUAL),
}


@pytest.mark.parametrize("run", H200)
@pytest.mark.parametrize("before", [20, 100])
def test_the_kernels_of_a_gpu_pass_with_room_and_an_unsynced_engine_does_not(case, run, before):
    """The sync passes, too, if it is 1.4 times worse, and whatever the engine answered before it."""
    logp_diff, noise_floor, usual = H200[run]
    floors = logp_diff / noise_floor
    answers = case.plain + noise(before)

    healthy = read_first(case.plain + noise(1.4 * floors), case.learner, answers, usual)
    unsynced = read_first(answers, case.learner, answers, usual)

    assert healthy.limit < math.inf
    assert not healthy.wrong
    assert unsynced.wrong


def test_the_limit_of_dense_models_would_stop_experts_on_an_h200(case):
    """Control: with an engine whose random weights were not far away."""
    logp_diff, noise_floor, usual = H200["W4A16, experts"]
    engine = case.plain + noise(logp_diff / noise_floor)
    answers = case.plain + noise(15)

    assert read_first(engine, case.learner, answers).wrong
    assert not read_first(engine, case.learner, answers, usual).wrong


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_log_prob_that_is_nan_or_infinite_is_a_wrong_engine(case, value):
    engine = case.plain.clone()
    engine[3] = value
    anchor = Anchor(case.plain, case.plain, 1.0)

    assert read_first(engine, case.learner, case.before).wrong
    assert read_first(engine, case.learner, None).wrong
    assert read_later(engine, case.learner, anchor).wrong


def test_identical_answers_pass_also_without_any_noise(case):
    silent = LearnerLogps(case.plain, case.plain)
    anchor = Anchor(case.plain, case.plain, 1.0)

    assert not read_first(case.plain, silent, case.before).wrong
    assert not read_later(case.plain, silent, anchor).wrong

    # Control: an engine that is a little off.
    assert read_later(case.plain + 1e-3, silent, anchor).wrong


def test_a_learner_that_answers_as_random_weights_do_gives_no_verdict(case):
    before = case.plain + noise(0.8 * USUAL)

    # Neither an engine that came near nor one that did not.
    for size in (1, 40):
        reading = read_first(case.plain + noise(size), case.learner, before)
        assert reading.limit == math.inf
        assert not reading.wrong


def test_an_engine_with_weights_of_an_earlier_run_is_judged_by_the_noise_floor(case):
    healthy = case.plain + noise()
    faulty = case.plain + noise(2 * MOST_FIRST)

    assert not read_first(healthy, case.learner, None).wrong
    assert read_first(faulty, case.learner, None).wrong


# Later syncs ----------------------------------------------------------------------------------------------------


def moved(case, size, anchor_noise=1.0):
    """A learner that moved by so many times the noise, and the anchor from before that."""
    new = case.plain + size * NOISE * torch.randn(TOKENS)
    anchor = Anchor(case.plain + noise(anchor_noise), case.plain, 1.0)
    return LearnerLogps(new, new + noise()), anchor


@pytest.mark.parametrize(("ratio", "size", "wrong"), [(1, 2, False), (1, 5, True), (5, 12, False), (5, 20, True)])
def test_a_later_logp_diff_is_compared_with_the_first(case, ratio, size, wrong):
    anchor = Anchor(case.plain, case.plain, ratio)

    reading = read_later(case.plain + noise(size), case.learner, anchor)

    assert reading.limit == pytest.approx(GROWTH * ratio * reading.noise_floor)
    assert reading.wrong is wrong


@pytest.mark.parametrize("size", [2, 10])
def test_an_engine_with_the_old_weights_has_not_followed(case, size):
    """A small update hides from the size of the mismatch, but not from the direction."""
    learner, anchor = moved(case, size)

    honest = read_later(learner.plain + noise(), learner, anchor)
    assert honest.followed == pytest.approx(1, abs=0.25)
    assert not honest.wrong

    stale = read_later(anchor.engine, learner, anchor)
    assert stale.followed == 0
    assert stale.stale
    assert stale.wrong
    # Only the large update shows in the mismatch, too.
    assert (stale.logp_diff < stale.limit) is (size == 2)


@pytest.mark.parametrize("anchor_noise", [1, 10])
def test_a_movement_within_the_noise_gives_no_verdict(case, anchor_noise):
    """The noise of the learner's roundings, or that of the engine at the anchor where it is larger."""
    learner, anchor = moved(case, 0.5 * anchor_noise, anchor_noise)
    assert math.isnan(read_later(anchor.engine, learner, anchor).followed)

    # Control: a movement that is visible.
    learner, anchor = moved(case, 2 * anchor_noise, anchor_noise)
    assert read_later(anchor.engine, learner, anchor).stale

    # No noise of an engine that followed makes it look stale.
    for _ in range(50):
        assert not read_later(learner.plain + noise(anchor_noise), learner, anchor).stale
