"""`qarl_trl.learner.logps`: log-probs and gradients of packed passes against TRL's padded ones and each sequence alone."""

import contextlib
import logging
from types import SimpleNamespace

import pytest
import references
import torch
from accelerate import PartialState
from peft import LoraConfig, get_peft_model
from transformers.integrations import sdpa_attention
from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from qarl_trl.learner import attention
from qarl_trl.learner.logps import PackedPasses


KEEP = 24
# First and one after the last of 40 columns; the completion of row 3 is empty, rows 1 and 5 have no padding on one side.
SPANS = [(3, 24), (5, 40), (10, 17), (12, 16), (7, 31), (0, 22), (15, 40)]


def make_batch(spans=SPANS, rows=slice(None)):
    ids = torch.randint(2, 64, (len(spans), 40), generator=torch.Generator().manual_seed(0))
    mask = torch.zeros_like(ids)
    for row, (start, end) in enumerate(spans):
        mask[row, start:end] = 1
    return {"input_ids": (ids * mask)[rows], "attention_mask": mask[rows], "logits_to_keep": KEEP}


def padded(model, **given):
    """TRL's method, called on what it reads of a trainer."""
    trainer = SimpleNamespace(accelerator=SimpleNamespace(autocast=contextlib.nullcontext))
    return GRPOTrainer._get_per_token_logps_and_entropies.__wrapped__(trainer, model, **given)


def make_passes(budget=1000, gather=lambda t: t):
    return PackedPasses(budget, contextlib.nullcontext, gather, lambda model: model)


def run(passes, model, order=None, **given):
    attention.use_packed_attention(model)
    return passes.run({"model": model, "compute_entropy": True, **given}, order)


@pytest.fixture(scope="module", autouse=True)
def state_that_the_logger_reads():
    PartialState(cpu=True)


@pytest.fixture
def make(tiny_model):
    def build(kind="qwen3", lora=False, **changes):
        model = tiny_model(kind, initializer_range=0.1, **changes)
        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        if lora:
            torch.manual_seed(1)
            model = get_peft_model(
                model, LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
            )
        return model.train()

    return build


def watch(model, passes):
    """The token ids of each pass from now on."""
    assert passes.packs(model)
    seen = []
    model.register_forward_pre_hook(lambda m, a, k: seen.append(k["input_ids"]), with_kwargs=True)
    return seen


def gradients(model, logps, entropies):
    weights = torch.randn(logps.shape, generator=torch.Generator().manual_seed(5))
    loss = (weights * logps).sum() + 0.1 * (weights * entropies).sum()
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return dict(zip(parameters, torch.autograd.grad(loss, parameters.values()), strict=True))


@pytest.mark.parametrize("budget", [1000, 45])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen3", {}),
        ("qwen3", {"lora": True}),
        ("llama", {}),
        ("qwen2", {}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
        ("qwen3_moe", {}),
    ],
    ids=str,
)
def test_packed_log_probs_and_gradients_are_the_padded_ones(make, kind, changes, budget):
    batch = make_batch()
    model, passes = make(kind, **changes), make_passes(budget)
    expected = padded(model, **batch, compute_entropy=True)
    expected_gradients = gradients(model, *expected[:2])
    assert passes.packs(model)
    found = run(passes, model, **batch)
    mask = batch["attention_mask"][:, -KEEP:].bool()
    for mine, theirs in zip(found[:2], expected[:2], strict=True):
        assert mine.dtype == torch.float32 and mine.shape == (len(SPANS), KEEP)
        # Of the largest, measured 2.5e-7 to 5.3e-7 over the kinds. Number by number 1e-6 would be less than the steps of the
        # logits it is the difference of, where a log-prob is near 0.
        assert (mine - theirs).abs().max() < 1e-6 * theirs.abs().max()
        assert (mine - theirs).abs().max() < 5e-6
        assert (mine[~mask] == 0).all()
    mine = gradients(model, *found[:2])
    assert mine.keys() == expected_gradients.keys()
    norm = torch.stack([g.norm() for g in expected_gradients.values()]).norm()
    for name, grad in mine.items():
        assert (grad - expected_gradients[name]).norm() < 1e-6 * norm, name
    alone = references.logps_of_each_alone(model, batch["input_ids"], batch["attention_mask"], KEEP)
    assert (found[0] - alone).abs().max() < 5e-6


def test_micro_batches_in_any_order_give_the_same_and_are_split_alike(make):
    batch, model = make_batch(), make()
    expected = padded(model, **batch)[0]
    passes, order = make_passes(60), torch.tensor([3, 0, 6, 1, 5, 2, 4])
    seen = watch(model, passes)
    found = run(passes, model, order, **batch, batch_size=3)[0]
    assert (found - expected).abs().max() < 5e-6
    at_once = list(seen)
    assert [ids.shape[1] for ids in seen] == [50, 57, 7, 24]  # 4 + 21 + 25, 35 + 22, 7, 24
    del seen[:]
    for rows in order.split(3):
        run(passes, model, **{k: v[rows] if k != "logits_to_keep" else v for k, v in batch.items()})
    assert len(seen) == 4 and all(map(torch.equal, seen, at_once))


def test_every_process_makes_as_many_passes_as_the_one_with_most(make):
    batch, model = make_batch(), make()
    expected = padded(model, **batch)[0]
    passes = make_passes(gather=lambda t: torch.cat((t, torch.full_like(t, 3))) if t.dtype == torch.long else t)
    seen = watch(model, passes)
    found = run(passes, model, **batch)[0]
    assert len(seen) == 3 and sum(ids.shape[1] for ids in seen) == batch["attention_mask"].sum()
    assert (found - expected).abs().max() < 5e-6


def test_a_sequence_too_long_on_another_process_stops_this_one_before_a_pass(make):
    batch, model = make_batch(), make()
    passes = make_passes(60, gather=lambda t: torch.cat((t, torch.full_like(t, 61))) if t.dtype == torch.long else t)
    seen = watch(model, passes)
    with pytest.raises(ValueError, match="A sequence of 61 tokens does not fit into max_tokens_per_pass=60"):
        run(passes, model, **batch)
    assert not seen


def test_gradient_checkpointing_computes_the_same_attention_again(make):
    batch, model = make_batch(), make()
    passes = make_passes(60)
    plain = gradients(model, *run(passes, model, **batch)[:2])
    model.gradient_checkpointing_enable()
    again = gradients(model, *run(passes, model, **batch)[:2])
    assert all(torch.equal(again[name], grad) for name, grad in plain.items())


# Where rows stay padded ---------------------------------------------------------------------------------------------


def reaching_across(module, query, key, value, attention_mask, sequence_lengths=None, **kwargs):
    """An attention that is not told where sequences begin."""
    return sdpa_attention.sdpa_attention_forward(module, query, key, value, None, **kwargs)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_an_attention_across_sequences_is_caught(make, monkeypatch, caplog, kind):
    batch, model, passes = make_batch(), make(kind), make_passes()
    expected = padded(model, **batch)[0]
    monkeypatch.setitem(attention.AttentionInterface._global_mapping, attention.ATTENTION, reaching_across)
    assert (run(make_passes(), model, **batch)[0] - expected).abs().max() > 0.1  # what is to be caught
    with caplog.at_level(logging.WARNING):
        assert passes.packs(model) is passes.packs(model) is False
    (warning,) = (r.getMessage() for r in caplog.records if "runs on padded rows" in r.getMessage())
    assert "change by" in warning and "with its neighbour" in warning
    assert model.training
