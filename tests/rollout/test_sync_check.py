"""`qarl_trl.rollout.sync_check`: the scores of a prompt, the verdict and the schedule."""

import math
from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState
from torch import nn

from qarl_trl.quant import apply_quantization
from qarl_trl.rollout.sync_check import (
    GROWTH,
    LEFT,
    LENGTH,
    TENFOLD,
    USUAL,
    Anchor,
    Scores,
    SyncCheck,
    engine_logps,
    learner_logps,
    read_first,
    read_later,
    rounding_noise,
    sync_check_tokens,
)


NOISE = 0.01


def noise(size=1.0):
    """Of exactly this mean absolute size, in noise floors."""
    return size * NOISE * (2.0 * torch.randint(2, (LENGTH - 1,)) - 1)


class Case:
    """An engine that answers uniformly before the first sync, and a learner that does not."""

    def __init__(self):
        torch.manual_seed(0)
        self.before = torch.full((LENGTH - 1,), -4.0)
        self.plain = self.before + torch.randn(LENGTH - 1)
        self.learner = Scores(self.plain, self.plain + noise())


@pytest.fixture
def case():
    return Case()


# The first sync --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "limit"), [(100, TENFOLD), (40, LEFT * 40), (8, USUAL)])
def test_a_sync_must_leave_a_mismatch_that_rounding_explains(case, before, limit):
    """All in noise floors: the lower the mismatch before, the less of them may be left."""
    answers = case.plain + noise(before)
    reading = read_first(answers, case.learner, answers)
    assert reading.limit == pytest.approx(limit * NOISE, rel=1e-3) and math.isnan(reading.followed)
    assert (reading.logp_diff, reading.noise_floor) == pytest.approx((before * NOISE, NOISE), rel=1e-3)
    for size, wrong in ((1, False), (0.95 * limit, False), (1.05 * limit, True), (before, True)):
        assert read_first(case.plain + noise(size), case.learner, answers).wrong is wrong


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_log_prob_that_is_nan_or_infinite_is_a_wrong_engine(case, value):
    engine = case.plain.clone()
    engine[3] = value
    assert all(read_first(engine, case.learner, before).wrong for before in (case.before, None))
    assert read_later(engine, case.learner, Anchor(case.plain, case.plain, 1.0)).wrong


def test_identical_answers_pass_also_without_any_noise(case):
    silent, anchor = Scores(case.plain, case.plain), Anchor(case.plain, case.plain, 1.0)
    assert not read_first(case.plain, silent, case.before).wrong and not read_later(case.plain, silent, anchor).wrong
    assert read_later(case.plain + 1e-3, silent, anchor).wrong


def test_a_learner_that_answers_as_random_weights_do_gives_no_verdict(case):
    before = case.plain + noise(0.8 * USUAL)
    for engine in (case.plain + noise(), case.plain + noise(40)):
        reading = read_first(engine, case.learner, before)
        assert reading.limit == math.inf
        assert not reading.wrong


def test_an_engine_with_weights_of_an_earlier_run_is_judged_by_the_noise_floor(case):
    assert not read_first(case.plain + noise(), case.learner, None).wrong
    assert read_first(case.plain + noise(2 * TENFOLD), case.learner, None).wrong


# Later syncs ----------------------------------------------------------------------------------------------------


def moved(case, size, anchor_noise=1.0):
    """A learner that moved by so many times the noise, and the anchor from before that."""
    new = case.plain + size * NOISE * torch.randn(LENGTH - 1)
    return Scores(new, new + noise()), Anchor(case.plain + noise(anchor_noise), case.plain, 1.0)


@pytest.mark.parametrize(("ratio", "size", "wrong"), [(1, 2, False), (1, 5, True), (5, 12, False), (5, 20, True)])
def test_a_later_logp_diff_is_compared_with_the_first(case, ratio, size, wrong):
    reading = read_later(case.plain + noise(size), case.learner, Anchor(case.plain, case.plain, ratio))
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
    assert stale.stale and stale.wrong
    assert (stale.logp_diff < stale.limit) is (size == 2)


@pytest.mark.parametrize("anchor_noise", [1, 10])
def test_a_movement_within_the_noise_gives_no_verdict(case, anchor_noise):
    """The noise of the learner's roundings, or that of the engine at the anchor where it is larger."""
    learner, anchor = moved(case, 0.5 * anchor_noise, anchor_noise)
    assert math.isnan(read_later(anchor.engine, learner, anchor).followed)
    learner, anchor = moved(case, 2 * anchor_noise, anchor_noise)
    assert read_later(anchor.engine, learner, anchor).stale
    for _ in range(50):
        assert not read_later(learner.plain + noise(anchor_noise), learner, anchor).stale


# The schedule -------------------------------------------------------------------------------------------------------


def sync_check(monkeypatch, engine, learner, every=1, others=()):
    """A sync check whose engine and learner answer from the lists given, in turn."""
    PartialState(cpu=True)  # its warnings go to the first process
    engine, learner, reported = iter(engine), iter(learner), []
    monkeypatch.setattr("qarl_trl.rollout.sync_check.engine_logps", lambda llm, ids: next(engine))
    rounding = NOISE * torch.randn(LENGTH - 1, generator=torch.Generator().manual_seed(7))

    def score():
        plain = next(learner)
        return Scores(plain, plain + rounding)

    def gather(row):
        return torch.cat([row, *(torch.tensor([r]) for r in others)])

    return SyncCheck([1], every, score, gather, lambda *value: reported.append(value)), reported


def ran(check, syncs):
    """The check of so many syncs from the first on."""
    check.look_before(None)
    for number in range(syncs):
        check.check(None, number + 1)


@pytest.mark.parametrize(("every", "due"), [("first", [1]), (1, [1, 2, 3, 4, 5, 6, 7]), (3, [1, 4, 7])])
def test_which_syncs_are_checked(monkeypatch, every, due):
    assert [n for n in range(1, 8) if sync_check(monkeypatch, [], [], every)[0].due(n)] == due


def test_the_first_logp_diff_of_the_run_is_what_later_ones_may_grow_from(monkeypatch, case):
    """Kernels eight times as far apart as rounding pass for ever; those that get worse do not."""
    answers = [case.before, *(case.plain + noise(8) for _ in range(4))]
    check, _ = sync_check(monkeypatch, [*answers, case.plain + noise(40)], [case.plain] * 5)
    with pytest.raises(RuntimeError, match="After sync 5 "):
        ran(check, 5)


def test_small_updates_add_up_until_a_stale_engine_shows(monkeypatch, case):
    """Each step moves a third of the noise: no single one is visible, and the anchor waits."""
    step = torch.randn(LENGTH - 1)
    learner = [case.plain + k * NOISE / 3 * step for k in range(6)]
    healthy, _ = sync_check(monkeypatch, [case.before, *learner], learner)
    ran(healthy, 6)
    stale, _ = sync_check(monkeypatch, [case.before, *[case.plain] * 6], learner)
    with pytest.raises(RuntimeError, match="stale") as error:
        ran(stale, 6)
    assert "After sync 1 " not in str(error.value)


def test_what_cannot_be_judged_is_said_once_and_stops_nothing(monkeypatch, caplog, case):
    check, reported = sync_check(monkeypatch, [case.plain + 0.5 * NOISE, *[case.plain] * 3], [case.plain] * 3)
    ran(check, 3)
    assert caplog.text.count("verify_sync cannot tell") == 1
    assert all(math.isfinite(value) for _, value in reported)


def test_a_process_stops_for_the_engine_of_another(monkeypatch, case):
    other = [3.0, 0.1, 0.5, math.nan]
    check, reported = sync_check(monkeypatch, [case.before, case.plain], [case.plain], others=[other])
    with pytest.raises(RuntimeError, match="3.0000 nats per token"):
        ran(check, 1)
    assert reported[0] == ("sync/verify_logp_diff", 3.0)


# The scores -----------------------------------------------------------------------------------------------------------


def test_the_prompt_is_fixed_and_ordinary(tiny_tokenizer):
    tokens = sync_check_tokens(tiny_tokenizer, vocab_size=64)
    assert tokens == sync_check_tokens(tiny_tokenizer, vocab_size=64)
    assert len(tokens) == LENGTH
    assert 1 < min(tokens) <= max(tokens) < len(tiny_tokenizer)
    assert max(sync_check_tokens(tiny_tokenizer, vocab_size=8)) < 8
    assert len(sync_check_tokens(tiny_tokenizer, 64, length=9)) == 9


def test_the_engine_is_read_at_the_tokens_of_the_prompt():
    step = {5: SimpleNamespace(logprob=-1.5), 9: SimpleNamespace(logprob=-0.5)}
    llm = SimpleNamespace(
        generate=lambda prompts, params, use_tqdm: [SimpleNamespace(prompt_logprobs=[None, step, step])]
    )
    pytest.importorskip("vllm")
    assert engine_logps(llm, [9, 5, 9]).tolist() == [-1.5, -0.5]


@pytest.mark.parametrize("learner", [True, False])
def test_the_learner_is_read_in_low_bits_and_left_as_it_was(tiny_model, learner):
    model = apply_quantization(tiny_model(), "W4A16", quantize_forward=learner).train()
    ids = torch.randint(2, 64, (12,)).tolist()
    with torch.autocast("cpu", torch.bfloat16):
        first = learner_logps(model, ids)
        again = learner_logps(model, ids)
    plain = first.plain
    assert torch.equal(plain, again.plain)
    assert torch.equal(first.noisy, again.noisy)
    assert not torch.equal(plain, first.noisy)
    assert model.training
    assert all(m.quantized_forward is learner for _, m in model.named_modules() if hasattr(m, "quantized_forward"))
    assert not any(m._forward_hooks for m in model.modules())

    low_bit = apply_quantization(tiny_model(), "W4A16").eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = low_bit(input_ids=torch.tensor([ids])).logits[0].float()
    expected = torch.stack([logits[t].log_softmax(-1)[ids[t + 1]] for t in range(11)])
    torch.testing.assert_close(plain, expected, rtol=0, atol=0)


def test_the_noise_is_one_rounding_of_each_output():
    layer = nn.Linear(64, 4096)
    x = torch.randn(2, 64)
    with torch.no_grad():
        clean = layer(x)
        with rounding_noise(layer):
            relative = (layer(x) / clean - 1).abs()
        assert torch.equal(layer(x), clean)
    assert 0.9 * 2**-8 < relative.max() <= 1.01 * 2**-8
    assert relative.mean().item() == pytest.approx(2**-9, rel=0.1)
