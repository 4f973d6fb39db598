"""`qarl_trl.rollout.sync_check`: the verdict and the schedule."""

import math

import pytest
import torch
from accelerate import PartialState

from qarl_trl.rollout.scores import LENGTH, Scores
from qarl_trl.rollout.sync_check import (
    EXPLAINED,
    GROWTH,
    TENFOLD,
    USUAL,
    Anchor,
    Reading,
    SyncCheck,
    diagnosis,
    read_first,
    read_later,
)


NOISE = 0.01


def noise(size=1.0):
    return size * NOISE * torch.randn(LENGTH - 1)


class Case:
    """An engine that answers uniformly before the first sync, and a learner of which three faults are known."""

    def __init__(self):
        torch.manual_seed(0)
        self.before = torch.full((LENGTH - 1,), -4.0)
        self.plain = self.before + torch.randn(LENGTH - 1)
        self.faults = {f"without {name}": self.plain + 0.2 * torch.randn(LENGTH - 1) for name in ("a", "b", "c")}
        self.learner = Scores(self.plain, self.plain + noise(), self.faults)


@pytest.fixture
def case():
    return Case()


# The first sync --------------------------------------------------------------------------------------------------


def test_the_logp_diff_is_the_mean_absolute_difference_and_the_noise_floor_the_noise(case):
    reading = read_first(case.before, case.learner, case.before)
    assert reading.logp_diff == reading.before == pytest.approx((case.before - case.plain).abs().mean().item())
    assert reading.noise_floor == pytest.approx((case.learner.noisy - case.plain).abs().mean().item())
    assert reading.limit == pytest.approx(reading.before / 2)
    assert math.isnan(reading.followed)


@pytest.mark.parametrize(
    ("left", "wrong"), [(0.0, False), (0.02, False), (0.4, False), (0.6, True), (1.0, True), (2.0, True)]
)
def test_a_sync_must_remove_most_of_the_logp_diff(case, left, wrong):
    """The rest has the size given and no direction that a fault would have."""
    rest = (case.before - case.plain).abs() * (2 * torch.randint(2, case.plain.shape) - 1)
    assert read_first(case.plain + left * rest, case.learner, case.before).wrong is wrong


@pytest.mark.parametrize("size", [1, 3, 10])
def test_kernels_ten_times_as_far_apart_are_no_fault(case, size):
    """Also where that is more than half of the first mismatch."""
    flat = Scores(case.plain / 6, case.plain / 6 + noise(), {k: v / 6 for k, v in case.faults.items()})
    for learner, before in ((case.learner, case.before), (flat, case.before / 6)):
        for _ in range(50):
            assert not read_first(learner.plain + noise(size), learner, before).wrong


@pytest.mark.parametrize("size", [1, 10])
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_an_engine_that_answers_like_a_wrong_model_is_wrong_and_named(case, name, size):
    """Its mismatch is far below the limit of size."""
    reading = read_first(case.faults[f"without {name}"] + noise(size), case.learner, case.before)
    assert reading.logp_diff < 0.6 * reading.limit
    assert reading.wrong
    assert list(case.faults)[reading.suspect] == f"without {name}"
    assert reading.explained > (0.9 if size == 1 else 0.5) > EXPLAINED


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("judged", [True, False])
def test_a_log_prob_that_is_no_number_is_a_wrong_engine(case, value, judged):
    engine = case.plain.clone()
    engine[3] = value
    assert read_first(engine, case.learner, case.before if judged else None).wrong
    assert read_later(engine, case.learner, Anchor(case.plain, case.plain)).wrong


def test_identical_answers_pass_also_without_any_noise(case):
    silent = Scores(case.plain, case.plain)
    assert not read_first(case.plain, silent, case.before).wrong
    assert not read_first(case.plain, case.learner, case.before).wrong
    assert not read_later(case.plain, silent, Anchor(case.plain, case.plain)).wrong
    assert read_later(case.plain + 1e-3, silent, Anchor(case.plain, case.plain)).wrong


@pytest.mark.parametrize("before", [None, "nan", "near"])
def test_without_a_visible_first_logp_diff_size_gives_no_verdict(case, before):
    """No look before, an engine that gave no numbers, or a learner as uniform as random weights."""
    answers = {None: None, "nan": case.before * math.nan, "near": case.plain + noise(0.5 * TENFOLD)}[before]
    for engine in (case.plain + noise(), case.plain + noise(40)):
        reading = read_first(engine, case.learner, answers)
        assert reading.limit == math.inf
        assert not reading.wrong
    assert read_first(case.faults["without b"], case.learner, answers).wrong  # a known fault still shows


# Later syncs ----------------------------------------------------------------------------------------------------


def moved(case, size, anchor_noise=1.0):
    """A learner that moved by so many times the noise, and the anchor from before that."""
    new = case.plain + size * NOISE * torch.randn(LENGTH - 1)
    return Scores(new, new + noise()), Anchor(case.plain + noise(anchor_noise), case.plain)


@pytest.mark.parametrize(("ratio", "size", "wrong"), [(1, 2, False), (1, 5, True), (5, 12, False), (5, 20, True)])
def test_a_later_logp_diff_is_compared_with_the_first(case, ratio, size, wrong):
    reading = read_later(case.plain + noise(size), case.learner, Anchor(case.plain, case.plain, ratio))
    assert reading.limit == pytest.approx(GROWTH * ratio * reading.noise_floor)
    assert reading.wrong is wrong


def test_an_engine_with_the_old_weights_has_not_followed(case):
    learner, anchor = moved(case, 10)
    honest = read_later(learner.plain + noise(), learner, anchor)
    assert honest.followed == pytest.approx(1, abs=0.1)
    assert not honest.wrong
    stale = read_later(anchor.engine, learner, anchor)
    assert stale.followed == 0
    assert stale.stale and stale.wrong


def test_a_small_update_hides_from_the_logp_diff_but_not_from_the_direction(case):
    """Within the limit of size, and yet the engine did not move."""
    learner, anchor = moved(case, 2)
    stale = read_later(anchor.engine, learner, anchor)
    assert stale.logp_diff < stale.limit
    assert stale.stale


@pytest.mark.parametrize("anchor_noise", [1, 10])
def test_a_movement_within_the_noise_gives_no_verdict(case, anchor_noise):
    """The noise of the learner's roundings, or that of the engine at the anchor where it is larger."""
    learner, anchor = moved(case, 0.5 * anchor_noise, anchor_noise)
    assert math.isnan(read_later(anchor.engine, learner, anchor).followed)
    learner, anchor = moved(case, 2 * anchor_noise, anchor_noise)
    assert read_later(anchor.engine, learner, anchor).stale
    for _ in range(50):
        assert not read_later(learner.plain + noise(anchor_noise), learner, anchor).stale


# Messages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reading", "suspect", "words"),
    [
        (Reading(0.5, 0.01, 0.1), "", "Judged by the first sync of this run, kernels explain at most 0.1000"),
        (Reading(0.5, 0.01, 0.1, followed=0.02), "", "It followed 2 % of the learner's movement"),
        (
            Reading(0.5, 0.01, 0.4, before=0.8),
            "",
            "with random weights, the mismatch was 0.8000, and at most 0.4000 should be",
        ),
        (
            Reading(0.5, 0.01, 0.9, 1.8, 0.6),
            "the learner without x.mlp",
            "nearer to those of the learner without x.mlp",
        ),
    ],
)
def test_the_diagnosis_tells_the_faults_apart(reading, suspect, words):
    text = diagnosis(reading, suspect, 7, 1, 1)
    assert "After sync 7" in text
    assert "0.5000 nats" in text
    assert words in text
    assert "processes" not in text
    assert "(2 of 8 processes" in diagnosis(reading, suspect, 7, 2, 8)


# The schedule -------------------------------------------------------------------------------------------------------


def sync_check(monkeypatch, engine, learner, every=1, others=(), faults=None):
    """A sync check whose engine and learner answer from the lists given, in turn."""
    PartialState(cpu=True)  # its warnings go to the first process
    engine, learner, reported, asked = iter(engine), iter(learner), [], []
    monkeypatch.setattr("qarl_trl.rollout.sync_check.engine_logps", lambda llm, ids: next(engine))
    rounding = NOISE * torch.randn(LENGTH - 1, generator=torch.Generator().manual_seed(7))

    def score(with_wrong):
        asked.append(with_wrong)
        plain = next(learner)
        return Scores(plain, plain + rounding, (faults or {}) if with_wrong else {})

    def gather(row):
        return torch.cat([row, *(torch.tensor([r]) for r in others)])

    check = SyncCheck([1], every, score, gather, lambda *value: reported.append(value))
    check.asked = asked
    return check, reported


@pytest.mark.parametrize(("every", "due"), [("first", [1]), (1, [1, 2, 3, 4, 5, 6, 7]), (3, [1, 4, 7]), (100, [1])])
def test_which_syncs_are_checked(monkeypatch, every, due):
    assert [n for n in range(1, 8) if sync_check(monkeypatch, [], [], every)[0].due(n)] == due


def test_a_healthy_engine_is_reported_and_passes(monkeypatch, caplog, case):
    check, reported = sync_check(monkeypatch, [case.before, case.plain, case.plain], [case.plain] * 2)
    check.look_before(None)
    first, later = check.check(None, 1), check.check(None, 2)
    assert first.before > 0 and math.isnan(later.before)
    assert [name for name, _ in reported] == [f"sync/verify_{n}" for n in ("logp_diff", "noise_floor", "allowed")] * 2
    assert check.asked == [True, False]  # wrong models are scored for the first sync alone
    assert not caplog.text


def test_an_engine_that_the_first_sync_did_not_reach_stops_the_run(monkeypatch, case):
    """In a resumed run and after an evaluation too: what counts is the engine's first sync, whichever number it has."""
    check, _ = sync_check(monkeypatch, [case.before, case.before], [case.plain])
    check.look_before(None)
    with pytest.raises(RuntimeError, match="After sync 2 .*nearer to those of an engine that nothing was synced to"):
        check.check(None, 2)


def test_a_missing_layer_is_named(monkeypatch, case):
    check, _ = sync_check(monkeypatch, [case.before, case.faults["without b"]], [case.plain], faults=case.faults)
    check.look_before(None)
    with pytest.raises(RuntimeError, match="nearer to those of the learner without b"):
        check.check(None, 1)


def test_the_first_logp_diff_of_the_run_is_what_later_ones_may_grow_from(monkeypatch, case):
    """Kernels eight times as far apart as rounding pass for ever; those that get worse do not."""
    answers = [case.before, *(case.plain + noise(8) for _ in range(4))]
    check, _ = sync_check(monkeypatch, [*answers, case.plain + noise(40)], [case.plain] * 5)
    check.look_before(None)
    for number in range(4):
        check.check(None, number + 1)
    with pytest.raises(RuntimeError, match="Judged by the first sync of this run"):
        check.check(None, 5)


def test_small_updates_add_up_until_a_stale_engine_shows(monkeypatch, case):
    """Each step moves a third of the noise: no single one is visible, and the anchor waits."""
    step = torch.randn(LENGTH - 1)
    learner = [case.plain + k * NOISE / 3 * step for k in range(6)]
    healthy, _ = sync_check(monkeypatch, [case.before, *learner], learner)
    healthy.look_before(None)
    for number in range(6):
        healthy.check(None, number + 1)
    stale, _ = sync_check(monkeypatch, [case.before, *[case.plain] * 6], learner)
    stale.look_before(None)
    with pytest.raises(RuntimeError, match="stale") as error:
        for number in range(6):
            stale.check(None, number + 1)
    assert "After sync 1 " not in str(error.value)


def test_what_cannot_be_judged_is_said_once_and_stops_nothing(monkeypatch, caplog, case):
    check, reported = sync_check(monkeypatch, [case.plain + 0.5 * NOISE, *[case.plain] * 3], [case.plain] * 3)
    check.look_before(None)
    for number in range(3):
        check.check(None, number + 1)
    assert caplog.text.count("verify_sync can tell little about the first sync") == 1
    assert all(math.isfinite(value) for _, value in reported)


def test_an_engine_with_weights_of_an_earlier_run_is_said_to_give_no_verdict_by_size(monkeypatch, caplog, case):
    check, _ = sync_check(monkeypatch, [case.plain], [case.plain])  # nobody looked before the sync
    check.check(None, 1)
    assert "The engine held weights of an earlier run" in caplog.text and "nan" not in caplog.text


@pytest.mark.parametrize(("size", "said"), [(1, False), (5, True)])
def test_an_unusual_logp_diff_is_a_warning(monkeypatch, caplog, case, size, said):
    check, _ = sync_check(monkeypatch, [case.before, case.plain + noise(size)], [case.plain])
    check.look_before(None)
    check.check(None, 1)
    assert (f"{USUAL:g} times is the most expected" in caplog.text) is said


def test_a_process_stops_for_the_engine_of_another(monkeypatch, case):
    other = [3.0, 0.1, 0.5, 1.0, -5.0, 0.0, math.nan]
    check, reported = sync_check(monkeypatch, [case.before, case.plain], [case.plain], others=[other])
    check.look_before(None)
    with pytest.raises(RuntimeError, match=r"3.0000 nats per token.*\(1 of 2 processes"):
        check.check(None, 1)
    assert reported[0] == ("sync/verify_logp_diff", 3.0)
