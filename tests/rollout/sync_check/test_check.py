"""`qarl_trl.rollout.sync_check`: the scores of a prompt and the schedule."""

import math
from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState
from torch import nn

from qarl_trl.quant import apply_quantization
from qarl_trl.rollout.sync_check.check import SyncCheck
from qarl_trl.rollout.sync_check.engine_logps import engine_logps
from qarl_trl.rollout.sync_check.learner_logps import LearnerLogps, learner_logps
from qarl_trl.rollout.sync_check.prompt import LENGTH, sync_check_tokens
from qarl_trl.rollout.sync_check.rounding_noise import rounding_noise
from rollout.sync_check.cases import NOISE, TOKENS, Case, noise


@pytest.fixture
def case():
    return Case()


# The schedule ---------------------------------------------------------------------------------------------------


def sync_check(monkeypatch, engine, learner, every=1, others=()):
    """
    A sync check, and the list of what it reports.

    Engine and learner answer from the lists given, in turn; `others` are the rows of other processes.
    """
    PartialState(cpu=True)  # its warnings go to the first process
    engine_answers = iter(engine)
    learner_answers = iter(learner)
    reported = []
    rounding = NOISE * torch.randn(TOKENS, generator=torch.Generator().manual_seed(7))

    def score():
        plain = next(learner_answers)
        return LearnerLogps(plain, plain + rounding)

    def gather(row):
        return torch.cat([row, *(torch.tensor([other]) for other in others)])

    def report(name, value):
        reported.append((name, value))

    monkeypatch.setattr("qarl_trl.rollout.sync_check.check.engine_logps", lambda llm, ids: next(engine_answers))
    return SyncCheck([1], every, score, gather, report), reported


def run_checks(check, syncs):
    """Look before the first sync, and check after each."""
    check.look_before(None)
    for number in range(1, syncs + 1):
        check.check(None, number)


@pytest.mark.parametrize(("every", "due"), [("first", [1]), (1, [1, 2, 3, 4, 5, 6, 7]), (3, [1, 4, 7])])
def test_which_syncs_are_checked(monkeypatch, every, due):
    check, _ = sync_check(monkeypatch, [], [], every)

    assert [number for number in range(1, 8) if check.due(number)] == due


def test_the_first_logp_diff_of_the_run_is_what_later_ones_may_grow_from(monkeypatch, case):
    """Kernels eight times as far apart as rounding pass for ever; those that get worse do not."""
    apart = [case.plain + noise(8) for _ in range(4)]
    worse = case.plain + noise(40)
    check, _ = sync_check(monkeypatch, [case.before, *apart, worse], [case.plain] * 5)

    with pytest.raises(RuntimeError, match="After sync 5 "):
        run_checks(check, 5)


def test_small_updates_add_up_until_a_stale_engine_shows(monkeypatch, case):
    """Each step moves a third of the noise: no single one is visible, and the anchor waits."""
    step = torch.randn(TOKENS)
    learner = [case.plain + number * NOISE / 3 * step for number in range(6)]

    # Control: an engine that follows.
    healthy, _ = sync_check(monkeypatch, [case.before, *learner], learner)
    run_checks(healthy, 6)

    stale, _ = sync_check(monkeypatch, [case.before, *[case.plain] * 6], learner)
    with pytest.raises(RuntimeError, match="stale") as error:
        run_checks(stale, 6)
    # The first one cannot show it: there is nothing to compare with yet.
    assert "After sync 1 " not in str(error.value)


def test_what_cannot_be_judged_is_said_once_and_stops_nothing(monkeypatch, caplog, case):
    # As near before the sync as after it.
    before = case.plain + 0.5 * NOISE
    check, reported = sync_check(monkeypatch, [before, *[case.plain] * 3], [case.plain] * 3)

    run_checks(check, 3)

    assert caplog.text.count("verify_sync cannot tell") == 1
    assert all(math.isfinite(value) for _, value in reported)


def test_a_process_stops_for_the_engine_of_another(monkeypatch, case):
    other = [3.0, 0.1, 0.5, math.nan]
    check, reported = sync_check(monkeypatch, [case.before, case.plain], [case.plain], others=[other])

    with pytest.raises(RuntimeError, match="3.0000 nats per token"):
        run_checks(check, 1)

    # What is reported is the worst of all.
    assert reported[0] == ("sync/verify_logp_diff", 3.0)


# The scores -----------------------------------------------------------------------------------------------------


def test_the_prompt_is_fixed_and_ordinary(tiny_tokenizer):
    tokens = sync_check_tokens(tiny_tokenizer, vocab_size=64)

    assert tokens == sync_check_tokens(tiny_tokenizer, vocab_size=64)
    assert len(tokens) == LENGTH
    assert len(sync_check_tokens(tiny_tokenizer, 64, length=9)) == 9

    # 0 and 1 are `<pad>` and `<eos>`.
    assert 1 < min(tokens) <= max(tokens) < len(tiny_tokenizer)
    assert max(sync_check_tokens(tiny_tokenizer, vocab_size=8)) < 8


def test_the_engine_is_read_at_the_tokens_of_the_prompt():
    pytest.importorskip("vllm")
    step = {5: SimpleNamespace(logprob=-1.5), 9: SimpleNamespace(logprob=-0.5)}
    output = SimpleNamespace(prompt_logprobs=[None, step, step])
    llm = SimpleNamespace(generate=lambda prompts, params, use_tqdm: [output])

    assert engine_logps(llm, [9, 5, 9]).tolist() == [-1.5, -0.5]


@pytest.mark.parametrize("quantizes", [True, False])
def test_the_learner_is_read_in_low_bits_and_left_as_it_was(tiny_model, quantizes):
    model = apply_quantization(tiny_model(), "W4A16", quantize_forward=quantizes).train()
    ids = torch.randint(2, 64, (12,)).tolist()

    with torch.autocast("cpu", torch.bfloat16):
        first = learner_logps(model, ids)
        again = learner_logps(model, ids)

    assert torch.equal(first.plain, again.plain)
    assert torch.equal(first.noisy, again.noisy)
    assert not torch.equal(first.plain, first.noisy)
    assert torch.equal(first.plain, logps_in_low_bits(tiny_model(), ids))

    assert model.training
    layers = [module for module in model.modules() if hasattr(module, "quantized_forward")]
    assert all(layer.quantized_forward is quantizes for layer in layers)
    assert not any(module._forward_hooks for module in model.modules())


def logps_in_low_bits(model, ids):
    """The log-probs of the tokens after the first, one at a time, by a model that runs in W4A16."""
    low_bit = apply_quantization(model, "W4A16").eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = low_bit(input_ids=torch.tensor([ids])).logits[0].float()

    return torch.stack([logits[place].log_softmax(-1)[token] for place, token in enumerate(ids[1:])])


@torch.no_grad()
def test_the_noise_is_one_rounding_of_each_output():
    layer = nn.Linear(64, 4096)
    x = torch.randn(2, 64)
    clean = layer(x)

    with rounding_noise(layer):
        noisy = layer(x)

    relative = (noisy / clean - 1).abs()
    assert 0.9 * 2**-8 < relative.max() <= 1.01 * 2**-8
    assert relative.mean().item() == pytest.approx(2**-9, rel=0.1)

    # Control: the layer is left as it was.
    assert torch.equal(layer(x), clean)


@torch.no_grad()
def test_the_noise_reaches_the_router_whose_logits_choose_experts(tiny_model):
    router = tiny_model("qwen3_moe").model.layers[0].mlp.gate
    x = torch.randn(64, router.weight.shape[1])
    clean, *_ = router(x)

    with rounding_noise(router):
        noisy, *_ = router(x)

    relative = (noisy / clean - 1).abs()
    assert 0.9 * 2**-8 < relative.max() <= 1.01 * 2**-8
    # Control: the router is left as it was.
    assert torch.equal(router(x)[0], clean)


@pytest.mark.parametrize("scheme", ["W4A16", None])
@torch.no_grad()
def test_the_noise_reaches_experts(tiny_model, scheme):
    model = tiny_model("qwen3_moe")
    if scheme is not None:
        apply_quantization(model, scheme)
    experts = model.model.layers[0].mlp.experts
    x = torch.randn(64, experts.gate_up_proj.shape[-1])
    choices = torch.arange(128).view(64, 2) % len(experts.gate_up_proj)
    weights = torch.full((64, 2), 0.5)

    clean = experts(x, choices, weights)
    with rounding_noise(experts):
        noisy = experts(x, choices, weights)

    # A factor uniform within one rounding has a root mean square of 0.58 roundings.
    error = (noisy - clean).norm() / clean.norm() / 2**-8
    if scheme is None:
        assert error == pytest.approx(0.58, rel=0.1)
    else:
        # Four of them, 2 x 0.58: of gate, up, down and output.
        assert error == pytest.approx(1.16, rel=0.1)
    # Control: the experts are left as they were.
    assert torch.equal(experts(x, choices, weights), clean)
