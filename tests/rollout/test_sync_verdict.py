"""`qarl_trl.rollout.sync_verdict`: which engine is wrong or stale."""

import math

import pytest
import torch

from qarl_trl.rollout.sync_verdict import GROWTH, LEFT, TENFOLD, USUAL, Anchor, Scores, read_first, read_later
from rollout.sync_cases import NOISE, TOKENS, Case, noise


@pytest.fixture
def case():
    return Case()


# The first sync -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "limit"), [(100, TENFOLD), (40, LEFT * 40), (8, USUAL)])
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


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_log_prob_that_is_nan_or_infinite_is_a_wrong_engine(case, value):
    engine = case.plain.clone()
    engine[3] = value
    anchor = Anchor(case.plain, case.plain, 1.0)

    assert read_first(engine, case.learner, case.before).wrong
    assert read_first(engine, case.learner, None).wrong
    assert read_later(engine, case.learner, anchor).wrong


def test_identical_answers_pass_also_without_any_noise(case):
    silent = Scores(case.plain, case.plain)
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
    faulty = case.plain + noise(2 * TENFOLD)

    assert not read_first(healthy, case.learner, None).wrong
    assert read_first(faulty, case.learner, None).wrong


# Later syncs ----------------------------------------------------------------------------------------------------


def moved(case, size, anchor_noise=1.0):
    """A learner that moved by so many times the noise, and the anchor from before that."""
    new = case.plain + size * NOISE * torch.randn(TOKENS)
    anchor = Anchor(case.plain + noise(anchor_noise), case.plain, 1.0)
    return Scores(new, new + noise()), anchor


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
