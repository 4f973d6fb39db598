"""`qarl_trl.rollout.canary`: the verdict, the prompt, and the learner's side of the comparison."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from qarl_trl.quant import apply_quantization
from qarl_trl.rollout.canary import (
    ALLOWED,
    LENGTH,
    Canary,
    Reading,
    canary_tokens,
    diagnosis,
    engine_logps,
    learner_logps,
    read,
    rounding_noise,
)


NOISE = 0.01


@pytest.fixture
def logps():
    """Learner log-probs before and after an update of 0.1 nats a token, and the later ones with rounding noise."""
    torch.manual_seed(0)
    old = -5 * torch.rand(LENGTH - 1)
    new = old + 0.1 * torch.randn(LENGTH - 1)
    return SimpleNamespace(old=old, new=new, noisy=new + NOISE * torch.randn(LENGTH - 1))


# The verdict --------------------------------------------------------------------------------------------------------


def test_the_gap_is_the_mean_absolute_difference_and_the_yardstick_the_noise(logps):
    reading = read(logps.old, logps.new, logps.noisy)
    assert reading.gap == pytest.approx((logps.old - logps.new).abs().mean().item(), rel=1e-6)
    assert reading.allowed == pytest.approx(ALLOWED * (logps.noisy - logps.new).abs().mean().item(), rel=1e-5)
    assert math.isnan(reading.followed)


@pytest.mark.parametrize(("size", "corrupted"), [(0.0, False), (1.0, False), (2.0, False), (5.0, True), (50.0, True)])
def test_a_gap_well_above_the_noise_is_a_wrong_engine(logps, size, corrupted):
    engine = logps.new + size * NOISE * torch.randn(LENGTH - 1)
    assert read(engine, logps.new, logps.noisy).corrupted is corrupted


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_log_prob_that_is_no_number_is_a_wrong_engine(logps, value):
    engine = logps.new.clone()
    engine[3] = value
    assert read(engine, logps.new, logps.noisy).corrupted


def test_identical_answers_pass_also_without_any_noise(logps):
    assert not read(logps.new, logps.new, logps.new).corrupted
    assert read(logps.new + 1e-3, logps.new, logps.new).corrupted


def test_an_engine_with_the_old_weights_has_not_followed(logps):
    honest = read(logps.new + NOISE * torch.randn(LENGTH - 1), logps.new, logps.noisy, logps.old)
    assert honest.followed == pytest.approx(1, abs=0.05)
    assert not honest.stale
    stale = read(logps.old + NOISE * torch.randn(LENGTH - 1), logps.new, logps.noisy, logps.old)
    assert stale.followed == pytest.approx(0, abs=0.05)
    assert stale.stale


def test_a_small_update_hides_from_the_gap_but_not_from_the_direction(logps):
    """1.5 times the noise: the gap of the stale engine is honest, its lack of movement is not."""
    new = logps.old + 1.5 * NOISE * torch.randn(LENGTH - 1)
    noisy = new + NOISE * torch.randn(LENGTH - 1)
    stale = read(logps.old + 0.1 * NOISE * torch.randn(LENGTH - 1), new, noisy, logps.old)
    assert stale.stale
    assert not stale.corrupted


def test_a_movement_within_the_noise_gives_no_verdict(logps):
    new = logps.old + 0.3 * NOISE * torch.randn(LENGTH - 1)
    assert math.isnan(read(logps.old, new, new + NOISE * torch.randn(LENGTH - 1), logps.old).followed)


@pytest.mark.parametrize(
    ("reading", "words"), [(Reading(0.5, 0.1), "Some layer of the engine"), (Reading(0.5, 0.1, 0.02), "followed 2 %")]
)
def test_the_diagnosis_tells_stale_from_corrupted(reading, words):
    text = diagnosis(reading, 7, 1, 1)
    assert "After publish 7" in text
    assert "0.5000 nats" in text
    assert words in text
    assert "processes" not in text
    assert "(2 of 8 processes" in diagnosis(reading, 7, 2, 8)


# The schedule -------------------------------------------------------------------------------------------------------


def canary(monkeypatch, engine, learner, every=1, others=()):
    """A canary whose engine and learner answer from the lists given, in turn."""
    engine, learner, reported = iter(engine), iter(learner), []
    monkeypatch.setattr("qarl_trl.rollout.canary.engine_logps", lambda llm, ids: next(engine))
    noise = NOISE * torch.randn(LENGTH - 1, generator=torch.Generator().manual_seed(7))

    def score():
        plain = next(learner)
        return plain, plain + noise

    def gather(row):
        return torch.cat([row, *(torch.tensor([r]) for r in others)])

    return Canary([1], every, score, gather, lambda *value: reported.append(value)), reported


@pytest.mark.parametrize(("every", "due"), [("first", [1]), (1, [1, 2, 3, 4, 5, 6, 7]), (3, [1, 4, 7]), (100, [1])])
def test_which_publishes_are_checked(monkeypatch, every, due):
    assert [n for n in range(1, 8) if canary(monkeypatch, [], [], every)[0].due(n)] == due


def test_a_healthy_engine_is_reported_and_passes(monkeypatch, logps):
    check, reported = canary(monkeypatch, [logps.new], [logps.new])
    check.check(None, 1)
    assert [name for name, _ in reported] == ["publish/verify_gap", "publish/verify_allowed"]


def test_small_updates_add_up_until_a_stale_engine_shows(monkeypatch):
    """Each step moves a third of the noise: no single one is visible, and the anchor waits."""
    torch.manual_seed(3)
    start, step = -5 * torch.rand(LENGTH - 1), torch.randn(LENGTH - 1)
    learner = [start + k * NOISE / 3 * step for k in range(6)]
    healthy, _ = canary(monkeypatch, learner, learner)
    for number in range(6):
        healthy.check(None, number + 1)
    stale, _ = canary(monkeypatch, [start] * 6, learner)
    with pytest.raises(RuntimeError, match="stale") as error:
        for number in range(6):
            stale.check(None, number + 1)
    assert "After publish 1 " not in str(error.value)


def test_a_process_stops_for_the_engine_of_another(monkeypatch, logps):
    check, reported = canary(monkeypatch, [logps.new], [logps.new], others=[[3.0, 0.1, math.nan, 1.0]])
    with pytest.raises(RuntimeError, match=r"3.0000 nats per token.*\(1 of 2 processes"):
        check.check(None, 1)
    assert reported[0] == ("publish/verify_gap", 3.0)


# The two sides ------------------------------------------------------------------------------------------------------


def test_the_prompt_is_fixed_and_ordinary(tiny_tokenizer):
    tokens = canary_tokens(tiny_tokenizer, vocab_size=64)
    assert tokens == canary_tokens(tiny_tokenizer, vocab_size=64)
    assert len(tokens) == LENGTH
    assert 1 < min(tokens) <= max(tokens) < len(tiny_tokenizer)
    assert max(canary_tokens(tiny_tokenizer, vocab_size=8)) < 8
    assert len(canary_tokens(tiny_tokenizer, 64, length=9)) == 9


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
        plain, noisy = learner_logps(model, ids)
        again, again_noisy = learner_logps(model, ids)
    assert torch.equal(plain, again)
    assert torch.equal(noisy, again_noisy)
    assert not torch.equal(plain, noisy)
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
