"""`qarl_trl.learner.logps`: log-probs and gradients of packed passes against TRL's padded ones and each one alone."""

import contextlib
import logging
from types import SimpleNamespace

import pytest
import references
import torch
from accelerate import PartialState
from peft import LoraConfig, get_peft_model
from slow.toys import trained_parameters
from transformers.integrations import sdpa_attention
from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from qarl_trl.learner import attention
from qarl_trl.learner.logps import PackedPasses


KEEP = 24
COLUMNS = 40
# First column and one after the last; the completion of row 3 is empty, rows 1 and 5 have no padding on one side.
SPANS = [(3, 24), (5, 40), (10, 17), (12, 16), (7, 31), (0, 22), (15, 40)]


def make_batch():
    """The arguments of TRL's method for rows whose tokens stand in `SPANS`."""
    mask = torch.zeros(len(SPANS), COLUMNS, dtype=torch.long)
    for row, (start, end) in enumerate(SPANS):
        mask[row, start:end] = 1

    ids = torch.randint(2, 64, mask.shape, generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids * mask, "attention_mask": mask, "logits_to_keep": KEEP}


def padded(model, **arguments):
    """TRL's method, called on what it reads of a trainer."""
    trainer = SimpleNamespace(accelerator=SimpleNamespace(autocast=contextlib.nullcontext))
    return GRPOTrainer._get_per_token_logps_and_entropies.__wrapped__(trainer, model, **arguments)


def make_passes(budget=1000, gather=lambda tensor: tensor):
    return PackedPasses(budget, contextlib.nullcontext, gather, lambda model: model)


def beside_another_process(value):
    """A gather of two processes, of which the other one answers `value` wherever numbers are asked for."""

    def gather(tensor):
        if tensor.dtype != torch.long:
            return tensor
        return torch.cat((tensor, torch.full_like(tensor, value)))

    return gather


def run(passes, model, order=None, **arguments):
    """Log-probs and entropies of packed passes."""
    attention.use_packed_attention(model)
    logps, entropies, _ = passes.run({"model": model, "compute_entropy": True, **arguments}, order)
    return logps, entropies


def record_passes(model, passes):
    """The token ids of each pass from now on."""
    assert passes.packs(model)
    seen = []
    model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True)
    return seen


def tokens_of(passes):
    """The number of tokens of each pass, which is one row."""
    return [ids.shape[1] for ids in passes]


def gradients(model, logps, entropies):
    """Gradients of a random sum of log-probs and entropies, by name."""
    weights = torch.randn(logps.shape, generator=torch.Generator().manual_seed(5))
    loss = (weights * logps).sum() + 0.1 * (weights * entropies).sum()

    parameters = trained_parameters(model)
    return dict(zip(parameters, torch.autograd.grad(loss, parameters.values()), strict=True))


@pytest.fixture(scope="module", autouse=True)
def state_that_the_logger_reads():
    PartialState(cpu=True)


@pytest.fixture
def make(tiny_model):
    """Builds models as TRL prepares them."""

    def build(kind="qwen3", lora=False, **changes):
        model = tiny_model(kind, initializer_range=0.1, **changes)
        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        if lora:
            torch.manual_seed(1)
            config = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
            model = get_peft_model(model, config)
        return model.train()

    return build


# Packed as padded ---------------------------------------------------------------------------------------------------


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
    model = make(kind, **changes)
    logps, entropies, _ = padded(model, **batch, compute_entropy=True)
    padded_gradients = gradients(model, logps, entropies)
    passes = make_passes(budget)
    assert passes.packs(model)

    packed_logps, packed_entropies = run(passes, model, **batch)

    real = batch["attention_mask"][:, -KEEP:].bool()
    for packed, expected in ((packed_logps, logps), (packed_entropies, entropies)):
        assert packed.dtype == torch.float32
        assert packed.shape == (len(SPANS), KEEP)
        # Of the largest, measured 2.5e-7 to 5.3e-7 over the kinds. Number by number 1e-6 would be less than the steps
        # of the logits it is the difference of, where a log-prob is near 0.
        assert (packed - expected).abs().max() < 1e-6 * expected.abs().max()
        assert (packed - expected).abs().max() < 5e-6
        assert (packed[~real] == 0).all()

    packed_gradients = gradients(model, packed_logps, packed_entropies)
    assert packed_gradients.keys() == padded_gradients.keys()
    # Of all gradients together: a small one alone may be mostly rounding.
    norm = torch.nn.utils.get_total_norm(padded_gradients.values())
    for name, gradient in packed_gradients.items():
        assert (gradient - padded_gradients[name]).norm() < 1e-6 * norm, name

    alone = references.logps_of_each_alone(model, batch["input_ids"], batch["attention_mask"], KEEP)
    assert (packed_logps - alone).abs().max() < 5e-6


def test_micro_batches_in_any_order_give_the_same_and_are_split_alike(make):
    batch = make_batch()
    model = make()
    expected = padded(model, **batch)[0]
    passes = make_passes(60)
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    seen = record_passes(model, passes)

    logps, _ = run(passes, model, order, **batch, batch_size=3)

    assert (logps - expected).abs().max() < 5e-6
    at_once = list(seen)
    # Tokens of the rows: 4 + 21 + 25, 35 + 22, 7, 24.
    assert tokens_of(at_once) == [50, 57, 7, 24]

    # The loss gets the micro-batches one by one.
    del seen[:]
    for rows in order.split(3):
        micro_batch = {"input_ids": batch["input_ids"][rows], "attention_mask": batch["attention_mask"][rows]}
        run(passes, model, **micro_batch, logits_to_keep=KEEP)
    # In the same passes the two have the same kernels, so that the first ratio is exactly 1.
    assert len(seen) == 4
    assert all(map(torch.equal, seen, at_once))


def test_every_process_makes_as_many_passes_as_the_one_with_most(make):
    batch = make_batch()
    model = make()
    expected = padded(model, **batch)[0]
    # All rows fit into one pass here, and the other process needs three.
    passes = make_passes(gather=beside_another_process(3))
    seen = record_passes(model, passes)

    logps, _ = run(passes, model, **batch)

    # One alone would do; under FSDP2 a process with fewer passes leaves the others waiting.
    assert len(seen) == 3
    assert sum(tokens_of(seen)) == batch["attention_mask"].sum()
    assert (logps - expected).abs().max() < 5e-6


def test_a_sequence_too_long_on_another_process_stops_this_one_before_a_pass(make):
    model = make()
    passes = make_passes(60, gather=beside_another_process(61))
    seen = record_passes(model, passes)

    with pytest.raises(ValueError, match="A sequence of 61 tokens does not fit into max_tokens_per_pass=60"):
        run(passes, model, **make_batch())

    assert not seen


def test_gradient_checkpointing_computes_the_same_attention_again(make):
    batch = make_batch()
    model = make()
    passes = make_passes(60)
    plain = gradients(model, *run(passes, model, **batch))

    model.gradient_checkpointing_enable()
    again = gradients(model, *run(passes, model, **batch))

    for name, gradient in plain.items():
        assert torch.equal(again[name], gradient), name


# Where rows stay padded ---------------------------------------------------------------------------------------------


def reaching_across(module, query, key, value, attention_mask, sequence_lengths=None, **kwargs):
    """An attention that is not told where sequences begin."""
    return sdpa_attention.sdpa_attention_forward(module, query, key, value, None, **kwargs)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_an_attention_across_sequences_is_caught(make, monkeypatch, caplog, kind):
    batch = make_batch()
    model = make(kind)
    passes = make_passes()
    expected = padded(model, **batch)[0]
    monkeypatch.setitem(attention.AttentionInterface._global_mapping, attention.ATTENTION, reaching_across)
    mixed, _ = run(make_passes(), model, **batch)
    # Control: there is something to be caught.
    assert (mixed - expected).abs().max() > 0.1

    with caplog.at_level(logging.WARNING):
        answers = [passes.packs(model), passes.packs(model)]

    assert answers == [False, False]
    # One warning, although the question was asked twice.
    (warning,) = filter(lambda message: "runs on padded rows" in message, caplog.messages)
    assert "change by" in warning
    assert "with its neighbour" in warning
    assert model.training
