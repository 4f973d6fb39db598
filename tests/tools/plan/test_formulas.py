"""Every formula against the tensors that it counts. Bytes of tensors are compared exactly."""

from dataclasses import replace

import pytest
import torch
from conftest import make_model
from transformers import AutoConfig
from trl.trainer.utils import add_fused_lm_head

from qarl_trl.learner.attention import use_packed_attention
from qarl_trl.quant import apply_quantization
from qarl_trl.quant.store import iter_low_bit_weights, low_bit_store
from qarl_trl.tools.plan import backward, items
from qarl_trl.tools.plan import model as meta
from qarl_trl.tools.plan.run import Parameter
from tools.plan.runs import example_run, resident


# Wider than other toys, so that layers are not lost beside logits.
WIDE = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 768}


def nbytes(tensors):
    return sum(tensor.nbytes for tensor in tensors)


def quantized_bytes(model):
    """Bytes of the quantized values that the layers of a model keep."""
    total = 0
    for weight in low_bit_store(model).kept().values():
        total += nbytes(weight.tensors.values())
    return total


@pytest.mark.parametrize(("kind", "scheme"), [("qwen2", "W4A16_ASYM"), ("qwen3", "W8A8"), ("qwen3_moe", "W4A16")])
def test_a_model_without_weights_counts_the_tensors_of_the_real_one(kind, scheme):
    model = apply_quantization(make_model(kind), scheme)
    skeleton = meta.planned_model(model.config, torch.float32, plan=scheme)
    run = example_run(skeleton, model.config, muon=False)

    streamed = [tensor for _, tensor in iter_low_bit_weights(model)]  # also makes the quantized values

    assert items.synced_bytes(run) == nbytes(streamed)
    assert resident(run)["quantized values"] == quantized_bytes(model)
    assert resident(run)["master weights"] == nbytes(model.parameters())


@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("shape", [(151936, 8), (7, 4, 2), (3,)])
def test_a_shard_is_what_fsdp2_keeps(ranks, shape):
    config = meta.read_config("Qwen/Qwen2.5-Math-1.5B")
    run = example_run(meta.planned_model(config, torch.float32), config, ranks=ranks, fsdp2=True)

    # `FSDPParam._init_sharded_param`: chunks of dimension 0, each padded to the first.
    first_chunk = torch.chunk(torch.empty(shape, device="meta"), ranks)[0]

    assert run.local_entries(Parameter("", shape, 4, "", "adamw")) == first_chunk.numel()


def test_a_norm_of_whole_queries_counts_once():
    """OLMo2, beside the Llama of its sizes."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 1}

    def saved_in_a_layer(kind):
        config = AutoConfig.for_model(kind, num_key_value_heads=4, **sizes)
        run = example_run(meta.planned_model(config, torch.float32), config, muon=False)
        return backward.layer_saved(run)

    assert saved_in_a_layer("olmo2") == saved_in_a_layer("llama") + 2 * 64 * (4 + 4)


# Activations --------------------------------------------------------------------------------------------------------


def prepared(kind, layers, dtype, scheme):
    """A model as the trainer prepares it."""
    model = make_model(kind, num_hidden_layers=layers, dtype=dtype, **WIDE).train()
    if scheme:
        apply_quantization(model, scheme)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    use_packed_attention(model)
    return model


def forward(model, tokens):
    """One pass of two sequences, as `PackedPasses._forward` makes it."""
    ids = torch.randint(2, 64, (1, tokens))
    half = tokens // 2

    with torch.autocast("cpu", torch.bfloat16):
        return model(
            input_ids=ids,
            position_ids=torch.arange(half).repeat(2)[None],
            labels=ids,
            fused_lm_head=True,
            sequence_lengths=(half, half),
        ).log_probs


def update(model, tokens, passes):
    """One backward of several passes."""
    log_probs = [forward(model, tokens) for _ in range(passes)]
    torch.cat(log_probs).sum().backward()


def peak_bytes(function):
    """Most bytes that torch's CPU allocator had out beyond what it had before, by its own account."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()

    # The profiler's list is not in the order of time, and frees are negative.
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = 0
    most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def planned_peak(run):
    return backward.activations(run) + backward.backward_work(run)


OTHERS = pytest.mark.slow  # of many alike


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
    """
    Within 10 %, for one pass and for two that are kept until one backward. With checkpointing two passes take up to
    20 % more than the formula, which was not explained.

    TRL's tile of 32,768 logits a token outweighs a toy's layers; a small one shows these.
    """
    monkeypatch.setattr(backward, "TILE", (4096, tile))
    monkeypatch.setattr("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", tile)
    model = prepared(kind, 4, torch.float32, scheme)
    low_bit_store(model).will_be_told()  # as a trainer's store: it keeps the quantized values
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    update(model, 64, 1)  # makes gradients and quantized values, which stay

    def run_of(passes):
        return example_run(
            model, model.config, muon=False, rows=passes, tokens=1024, budget=1024, checkpointing=checkpointing
        )

    # Gradients are there from before, so each peak is what the formulas add up to.
    one_pass = peak_bytes(lambda: update(model, 1024, 1))
    two_passes = peak_bytes(lambda: update(model, 1024, 2))

    tolerance = 0.2 if checkpointing else 0.1
    print("peak", kind, scheme, checkpointing, tile, one_pass, planned_peak(run_of(1)))
    print("peak of two passes", two_passes, planned_peak(run_of(2)))
    assert one_pass == pytest.approx(planned_peak(run_of(1)), rel=0.1)
    assert two_passes == pytest.approx(planned_peak(run_of(2)), rel=tolerance)

    # Control: with checkpointing the formula without it, otherwise half the layers.
    if checkpointing:
        wrong = replace(run_of(2), checkpointing=False)
    else:
        wrong = replace(run_of(2), config=prepared(kind, 2, torch.float32, None).config)
    print("control", planned_peak(wrong))
    assert two_passes != pytest.approx(planned_peak(wrong), rel=tolerance)
