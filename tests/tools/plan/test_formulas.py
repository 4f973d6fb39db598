"""Every formula against the tensors that it counts. Bytes of tensors are compared exactly."""

from dataclasses import replace

import pytest
import torch
from conftest import make_model
from trl.trainer.utils import add_fused_lm_head

from qarl_trl.learner.attention import use_packed_attention
from qarl_trl.quant import apply_quantization
from qarl_trl.quant.convert import quantized_modules
from qarl_trl.quant.stream import iter_low_bit_weights
from qarl_trl.tools.plan import items
from qarl_trl.tools.plan import model as meta
from tools.plan.runs import example_run, resident


WIDE = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 768}


def nbytes(tensors):
    return sum(t.nbytes for t in tensors)


@pytest.mark.parametrize(("kind", "scheme"), [("qwen2", "W4A16_ASYM"), ("qwen3", "W8A8"), ("qwen3_moe", "W4A16")])
def test_a_model_without_weights_counts_the_tensors_of_the_real_one(kind, scheme):
    model = apply_quantization(make_model(kind), scheme)
    config = model.config
    run = example_run(meta.skeleton(config, torch.float32, plan=scheme), config, False)
    stream = list(iter_low_bit_weights(model))
    assert items.synced_bytes(run) == nbytes(t for _, t in stream)
    real = [w for _, m in quantized_modules(model) for w in m.low_bit_cache.last().values()]
    assert resident(run)["quantized values"] == sum(sum(t.nbytes for t in weight.tensors.values()) for weight in real)
    assert resident(run)["master weights"] == nbytes(model.parameters())


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_a_shard_is_what_fsdp2_keeps(ranks):
    # `FSDPParam._init_sharded_param`: chunks of dimension 0, each padded to the first.
    config = meta.read_config("Qwen/Qwen2.5-Math-1.5B")
    run = example_run(meta.skeleton(config, torch.float32), config, ranks=ranks, fsdp2=True)
    for shape in [(151936, 8), (7, 4, 2), (3,)]:
        chunk = torch.chunk(torch.empty(shape, device="meta"), ranks)[0]
        assert run.own(items.Parameter("", shape, 4, "", "adamw")) == chunk.numel()


# As the model cards count them.
PARAMETERS = {
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "Qwen/Qwen2-0.5B": 494_032_768,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
}


@pytest.mark.parametrize("name", meta.BUNDLED)
def test_bundled_sizes_give_the_parameters_of_the_model_cards(name):
    skeleton = meta.skeleton(meta.read_config(name), torch.float32)
    assert sum(p.entries for p in meta.parameters(skeleton, "adamw_torch")) == PARAMETERS[name]


# Activations --------------------------------------------------------------------------------------------------------


def prepared(kind, layers, dtype, scheme):
    model = make_model(kind, num_hidden_layers=layers, dtype=dtype, **WIDE).train()
    if scheme:
        apply_quantization(model, scheme)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    use_packed_attention(model)
    return model


def forward(model, tokens):
    """One pass of two sequences, as `PackedPasses._forward` makes it."""
    ids, half = torch.randint(2, 64, (1, tokens)), tokens // 2
    with torch.autocast("cpu", torch.bfloat16):
        return model(
            input_ids=ids,
            position_ids=torch.arange(half).repeat(2)[None],
            labels=ids,
            fused_lm_head=True,
            sequence_lengths=(half, half),
        ).log_probs


def peak_bytes(function):
    """Most bytes that torch's CPU allocator had out beyond what it had before, by its own account."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    now = most = 0
    events = (e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]")
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


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
    Within 10 %, for one pass and for two that are kept until one backward. With checkpointing two passes take up to 20 % more
    than the formula, which was not explained. Controls: half the layers; with checkpointing, the formula without it.

    TRL's tile of 32,768 logits a token outweighs a toy's layers; a small one shows these.
    """
    monkeypatch.setattr(items, "TILE", (4096, tile))
    monkeypatch.setattr("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", tile)
    model = prepared(kind, 4, torch.float32, scheme)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    def update(tokens, passes):
        torch.cat([forward(model, tokens) for _ in range(passes)]).sum().backward()

    update(64, 1)  # gradients and quantized values
    for tokens, passes in ((1024, 1), (1024, 2)):
        run = example_run(
            model, model.config, False, rows=passes, tokens=tokens, budget=tokens, checkpointing=checkpointing
        )
        measured = peak_bytes(lambda passes=passes: update(1024, passes))
        expected = items.activations(run) + items.backward_work(run)
        print("peak", kind, scheme, checkpointing, tile, passes, measured, expected)
        assert measured == pytest.approx(expected, rel=0.2 if checkpointing and passes == 2 else 0.1)
    wrong = (
        replace(run, checkpointing=False)
        if checkpointing
        else replace(run, config=prepared(kind, 2, torch.float32, None).config)
    )
    control = items.activations(wrong) + items.backward_work(wrong)
    print("control", control)
    assert measured != pytest.approx(control, rel=0.2 if checkpointing else 0.1)
