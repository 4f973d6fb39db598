"""`qarl_trl.rollout.sync_check.check`: which syncs are checked, and what several checks say together."""

import math

import pytest
import torch
from accelerate import PartialState

from qarl_trl.rollout.sync_check.check import SyncCheck
from qarl_trl.rollout.sync_check.learner_logps import LearnerLogps
from rollout.sync_check.cases import NOISE, TOKENS, Case, noise


@pytest.fixture
def case():
    return Case()


def sync_check(learner, every=1, others=()):
    """
    A sync check, and the list of what it reports.

    The learner answers from the list, in turn; `others` are the rows of other processes.
    """
    PartialState(cpu=True)  # its warnings go to the first process
    learner_answers = iter(learner)
    reported = []
    # The learner's own noise: the same in each check, as `rounding_noise` draws it.
    rounding = NOISE * torch.randn(TOKENS, generator=torch.Generator().manual_seed(7))

    def score():
        plain = next(learner_answers)
        return LearnerLogps(plain, plain + rounding)

    def gather(row):
        return torch.cat([row, *(torch.tensor([other]) for other in others)])

    def report(name, value):
        reported.append((name, value))

    return SyncCheck([1], every, score, gather, report), reported


def run_checks(check, engine):
    """Look before the first sync, and check after each: the engine answers from the list, in turn."""
    answers = iter(engine)
    check.look_before(lambda ids: next(answers))

    for number in range(1, len(engine)):
        check.check(lambda ids: next(answers), number)


@pytest.mark.parametrize(("every", "due"), [("first", [1]), (1, [1, 2, 3, 4, 5, 6, 7]), (3, [1, 4, 7])])
def test_which_syncs_are_checked(every, due):
    check, _ = sync_check([], every)

    assert [number for number in range(1, 8) if check.due(number)] == due


@pytest.mark.parametrize(
    ("mismatches", "asks"),
    [
        ([0.01, 0.02, 0.029], [False, False, False]),
        ([0.01, 0.031], [False, True]),
        ([0.01, 0.04, 0.05, 0.13], [False, True, False, True]),  # each multiple once
        ([1e-7, 2.9e-4, 4e-4], [False, False, True]),  # rounding alone
        ([0.2, 0.01, 0.1], [False, False, False]),
    ],
)
def test_a_risen_mismatch_of_rollouts_asks_for_a_check(case, mismatches, asks):
    """A fault may show only when weights have moved, and by default only the first sync is checked."""
    check, _ = sync_check([case.plain] * len(asks), "first")

    asked = []
    for number, mismatch in enumerate(mismatches, start=2):
        check.watch(mismatch)
        asked.append(check.due(number))
        if asked[-1]:
            check.check(lambda ids: case.plain, number)
            assert not check.due(number + 1)

    assert asked == asks


@pytest.mark.parametrize(
    ("times", "as_trained", "is_said"),
    [(1, True, False), (3.1, True, True), (3.1, False, False)],
    ids=["near", "far", "far from a learner that is not aligned"],
)
def test_first_answers_farther_than_the_prompt_are_said(case, caplog, times, as_trained, is_said):
    """The check reads a prompt, and an engine may compute what it samples by other kernels."""
    check, _ = sync_check([case.plain], "first")
    check.scores_as_trained = as_trained
    run_checks(check, [case.before, case.plain])

    check.watch(times * check.limit)
    # Only the first answers are compared with the prompt.
    check.watch(check.watched)

    assert caplog.text.count("computes the tokens that it samples differently") == is_said


def test_the_first_logp_diff_of_the_run_is_what_later_ones_may_grow_from(case):
    """Kernels eight times as far apart as rounding pass for ever; those that get worse do not."""
    apart = [case.plain + noise(8) for _ in range(4)]
    worse = case.plain + noise(40)
    check, _ = sync_check([case.plain] * 5)

    with pytest.raises(RuntimeError, match="After sync 5 "):
        run_checks(check, [case.before, *apart, worse])


def test_small_updates_add_up_until_a_stale_engine_shows(case):
    """Each step moves a third of the noise: no single one is visible, and the anchor waits."""
    step = torch.randn(TOKENS)
    learner = [case.plain + number * NOISE / 3 * step for number in range(6)]

    # Control: an engine that follows.
    healthy, _ = sync_check(learner)
    run_checks(healthy, [case.before, *learner])

    stale, _ = sync_check(learner)
    with pytest.raises(RuntimeError, match="stale") as error:
        run_checks(stale, [case.before, *[case.plain] * 6])
    # The first one cannot show it: there is nothing to compare with yet.
    assert "After sync 1 " not in str(error.value)


def test_what_cannot_be_judged_is_said_once_and_stops_nothing(caplog, case):
    # As near before the sync as after it.
    before = case.plain + 0.5 * NOISE
    check, reported = sync_check([case.plain] * 3)

    run_checks(check, [before, *[case.plain] * 3])

    assert caplog.text.count("verify_sync cannot tell") == 1
    # The limit is infinite here, which no log can hold.
    assert all(math.isfinite(value) for _, value in reported)


def test_a_process_stops_for_the_engine_of_another(case):
    # Mismatch, noise floor, limit, and the share that followed: far beyond its limit.
    other = [3.0, 0.1, 0.5, math.nan]
    check, reported = sync_check([case.plain], others=[other])

    with pytest.raises(RuntimeError, match="3.0000 nats per token"):
        run_checks(check, [case.before, case.plain])

    # What is reported is the worst of all.
    assert reported[0] == ("sync/verify_logp_diff", 3.0)
