"""The memory of a backward against what torch's allocator gives out."""

from dataclasses import replace

import pytest
import torch
from conftest import make_model
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig
from trl.trainer.utils import add_fused_lm_head

from qarl_trl.learner.attention import use_packed_attention
from qarl_trl.quant import apply_quantization
from qarl_trl.quant.store import low_bit_store
from qarl_trl.tools.plan import model as meta
from qarl_trl.tools.plan.memory import backward
from tools.plan.runs import example_run, peak_bytes


# Wider than other toys, so that layers are not lost beside logits.
WIDE = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 768}


def test_a_norm_of_whole_queries_counts_once():
    """OLMo2, beside the Llama of its sizes."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 1}

    def saved_in_a_layer(kind):
        config = AutoConfig.for_model(kind, num_key_value_heads=4, **sizes)
        run = example_run(meta.model_without_weights(config, torch.float32), config, muon=False)
        return backward.layer_saved(run)

    # The norms of queries and of keys each save 64 float32 inputs and as many results.
    assert saved_in_a_layer("olmo2") == saved_in_a_layer("llama") + 2 * 64 * (4 + 4)


# Activations --------------------------------------------------------------------------------------------------------


def prepared(kind, layers, dtype, scheme, **sizes):
    """A model as the trainer prepares it."""
    model = make_model(kind, num_hidden_layers=layers, dtype=dtype, **WIDE, **sizes).train()
    if scheme:
        apply_quantization(model, scheme)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    use_packed_attention(model)
    return model


def forward(model, tokens, autocast=True):
    """One pass of two sequences, as `PackedPasses._forward` makes it."""
    ids = torch.randint(2, 64, (1, tokens))
    half = tokens // 2

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return model(
            input_ids=ids,
            position_ids=torch.arange(half).repeat(2)[None],
            labels=ids,
            fused_lm_head=True,
            sequence_lengths=(half, half),
        ).log_probs


def update(model, tokens, passes, autocast=True):
    """One backward of several passes."""
    log_probs = [forward(model, tokens, autocast) for _ in range(passes)]
    torch.cat(log_probs).sum().backward()


def estimated_peak(run):
    return backward.activations(run) + backward.backward_work(run) + backward.gradients_between_passes(run)


def small_tiles(monkeypatch, tile=64):
    """TRL's tile of 32,768 logits a token outweighs a toy's layers; a small one shows these."""
    monkeypatch.setattr(backward, "TILE", (4096, tile))
    monkeypatch.setattr("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", tile)


# Of many alike.
OTHERS = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "scheme", "checkpointing", "tile"),
    [
        ("qwen3", "W4A16", True, 32768),
        ("qwen3", "W4A16", False, 64),
        pytest.param("qwen3", "FP8_DYNAMIC", True, 64, marks=OTHERS),
        pytest.param("qwen3_moe", "W4A16", True, 64, marks=OTHERS),
    ],
)
def test_peak_of_a_backward(monkeypatch, kind, scheme, checkpointing, tile):
    """Within 10 %, for one pass and for two that are kept until one backward."""
    small_tiles(monkeypatch, tile)
    model = prepared(kind, 4, torch.float32, scheme)
    # As a trainer's store: it keeps the quantized values.
    low_bit_store(model).will_be_told()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    # Makes gradients and quantized values, which stay.
    update(model, 64, 1)

    def run_of(passes):
        changes = {"rows": passes, "tokens": 1024, "budget": 1024, "accumulation": 2}
        return example_run(model, model.config, muon=False, checkpointing=checkpointing, **changes)

    # Gradients are there from before, so each peak is what the formulas add up to.
    one_pass = peak_bytes(lambda: update(model, 1024, 1))
    two_passes = peak_bytes(lambda: update(model, 1024, 2))

    assert one_pass == pytest.approx(estimated_peak(run_of(1)), rel=0.1)
    assert two_passes == pytest.approx(estimated_peak(run_of(2)), rel=0.1)

    # Control: with checkpointing the formula without it, otherwise half the layers.
    if checkpointing:
        wrong = replace(run_of(2), checkpointing=False)
    else:
        wrong = replace(run_of(2), config=prepared(kind, 2, torch.float32, None).config)
    assert two_passes != pytest.approx(estimated_peak(wrong), rel=0.1)


@pytest.mark.parametrize("scheme", ["W4A16", None])
def test_what_is_frozen_has_no_gradient(monkeypatch, scheme):
    """Within 10 %, of short rows, whose weights outweigh activations; norms alone are trained."""
    small_tiles(monkeypatch)
    # A vocabulary whose weight outweighs a layer, as in a real model.
    model = prepared("qwen3", 2, torch.float32, scheme, vocab_size=8192)
    for name, param in model.named_parameters():
        param.requires_grad_("norm" in name)
    if scheme:
        low_bit_store(model).will_be_told()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    # Makes gradients and quantized values, which stay.
    update(model, 64, 1)

    changes = {"rows": 1, "tokens": 256, "budget": 256, "low_bit_forward": scheme is not None}
    run = example_run(model, model.config, muon=False, accumulation=2, **changes)
    peak = peak_bytes(lambda: update(model, 256, 1))

    assert peak == pytest.approx(estimated_peak(run), rel=0.1)

    # Control: the formulas of a model that is trained, whose head makes a gradient of its weight.
    trained = replace(run, parameters=tuple(replace(one, optimizer="adamw_torch") for one in run.parameters))
    assert estimated_peak(trained) > 1.5 * peak


def test_products_change_no_peak(monkeypatch):
    """What is measured here leaves them out, to be quick."""
    small_tiles(monkeypatch)
    model = prepared("qwen3", 1, torch.float32, "W4A16")
    low_bit_store(model).will_be_told()
    update(model, 64, 1)

    peaks = [peak_bytes(lambda: update(model, 128, 2), products=products) for products in (True, False)]

    assert peaks[0] == peaks[1]


# Gradients between passes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("passes", [2, 3])
@pytest.mark.parametrize("scheme", ["W4A16", None])
def test_several_short_passes_keep_whole_gradients(monkeypatch, scheme, passes):
    """Rows are so short that gradients outweigh activations, as in a large model."""
    small_tiles(monkeypatch)
    model = prepared("qwen3", 4, torch.float32, scheme)
    if scheme:
        low_bit_store(model).will_be_told()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    # Makes gradients, as an earlier micro-batch does.
    update(model, 64, 1)

    changes = {"rows": passes, "tokens": 256, "budget": 256, "low_bit_forward": scheme is not None}
    run = example_run(model, model.config, muon=False, accumulation=2, **changes)
    peak = peak_bytes(lambda: update(model, 256, passes))

    assert peak == pytest.approx(estimated_peak(run), rel=0.1)

    # Control: without these gradients the formulas say half of it.
    assert estimated_peak(run) - backward.gradients_between_passes(run) < 0.6 * peak


@pytest.fixture
def eight_ranks():
    """The first of eight processes, whose collectives move nothing."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield init_device_mesh("cpu", (8,))
    distributed.destroy_process_group()


@pytest.mark.parametrize(("tokens", "passes"), [(256, 2), (256, 4), (1024, 3)])
def test_several_passes_of_fsdp2_keep_gradients_that_are_not_sharded(monkeypatch, eight_ranks, tokens, passes):
    small_tiles(monkeypatch)
    model = prepared("qwen3", 8, torch.float32, None)
    parameters = meta.parameters(model, "adamw_torch")
    model.gradient_checkpointing_enable({"use_reentrant": False})

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=eight_ranks, mp_policy=policy)
    fully_shard(model, mesh=eight_ranks, mp_policy=policy)
    # Makes sharded gradients, as an earlier micro-batch does.
    update(model, 64, 1, autocast=False)

    def run_of(passes):
        changes = {"rows": passes, "tokens": tokens, "budget": tokens, "low_bit_forward": False}
        return example_run(model, model.config, parameters=parameters, ranks=8, fsdp2=True, accumulation=2, **changes)

    one_pass = peak_bytes(lambda: update(model, tokens, 1, autocast=False))
    several = peak_bytes(lambda: update(model, tokens, passes, autocast=False))

    added = several - one_pass
    estimated = estimated_peak(run_of(passes)) - estimated_peak(run_of(1))
    assert added == pytest.approx(estimated, rel=0.1)

    # Control: short passes add more gradients than activations, long ones do not.
    of_activations = backward.activations(run_of(passes)) - backward.activations(run_of(1))
    assert (added > 2 * of_activations) == (tokens == 256)


def test_gradients_are_kept_only_between_passes():
    config = meta.read_config("Qwen/Qwen3-8B-Base")
    skeleton = meta.model_without_weights(config, torch.float32)
    several = example_run(skeleton, config, ranks=8, fsdp2=True, accumulation=16)
    one_row = replace(several, rows=1)
    larger_budget = replace(several, budget=4 * 18432)

    assert backward.passes_of_micro_batch(several) == 4
    assert backward.gradients_between_passes(several) > 0
    for run in (one_row, larger_budget, replace(several, budget=None)):
        assert backward.passes_of_micro_batch(run) == 1
        assert backward.gradients_between_passes(run) == 0


def test_an_update_of_one_micro_batch_keeps_no_second_gradients_on_one_gpu():
    """What autograd adds up becomes the gradients."""
    config = meta.read_config("Qwen/Qwen3-8B-Base")
    run = example_run(meta.model_without_weights(config, torch.float32), config, accumulation=1)

    assert backward.passes_of_micro_batch(run) == 4
    assert backward.gradients_between_passes(run) == 0
    # Control: the second micro-batch finds the gradients of the first.
    assert backward.gradients_between_passes(replace(run, accumulation=2)) > 0
