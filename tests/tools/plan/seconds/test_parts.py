"""The formulas of the estimated seconds: sums by hand, the figures of an H200, and what must be slower than what."""

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from configs import field_names
from peft import LoraConfig
from transformers import PretrainedConfig

from qarl_trl.tools.plan import model as meta
from qarl_trl.tools.plan.gpus import GPUS, Gpu
from qarl_trl.tools.plan.memory.engine import cache_tokens, engine_weights, token_bytes
from qarl_trl.tools.plan.run import GIB
from qarl_trl.tools.plan.seconds.batch import Batch, answer_lengths
from qarl_trl.tools.plan.seconds.costs import COSTS, Costs
from qarl_trl.tools.plan.seconds.parts import batch_seconds
from qarl_trl.tools.plan.seconds.rollout import rollout_seconds, sequences_at_once
from qarl_trl.tools.plan.seconds.sync import sync_seconds
from qarl_trl.tools.plan.seconds.update import Learner, update_seconds
from tools.plan.runs import example_run


H200 = GPUS["h200"]
# A GPU of round numbers, on which kernels reach all of them and nothing else takes time.
ROUND = Gpu(memory=79, capability=(9, 0), bandwidth=1e12, bf16=1e14, eight_bits=2e14, link=1e11)


def free_costs():
    """The constants of such a GPU: 0 for what is added, 1 for what is divided by."""
    costs = dict.fromkeys(field_names(Costs), 0.0)
    for name in costs:
        if name.endswith(("share", "paging")):
            costs[name] = 1.0
    return Costs(**costs)


FREE = free_costs()
PARTS = ("rollout", "sync", "update")

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Qwen3-8B: 36 layers of hidden size 4096, keys and values of size 1024, an MLP of 12288; untied, 151936 words.
MATRICES = 36 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 12288)
NORMS = 36 * (2 * 4096 + 2 * 128)
HEAD = 151936 * 4096


def run_of(name, scheme=None, learner=True, lora=False, **changes):
    """The run of a model on one H200, as `benchmarks/bench_gpu_step.py` sets it."""
    config = meta.read_config(name)
    adapter = LoraConfig(task_type="CAUSAL_LM", r=32, lora_alpha=64, target_modules=LAYERS) if lora else None
    skeleton = meta.model_without_weights(config, torch.bfloat16 if lora else torch.float32, adapter, scheme)

    frozen = changes.get("frozen", False)
    settings = {
        "parameters": meta.parameters(skeleton, "adamw_torch", 1, frozen),
        "low_bit_forward": learner and scheme is not None,
        "memory": 139 * GIB,
        "rows": 8,
        "tokens": 576,
        "utilization": 0.4,
        "sleep": False,
    }
    return example_run(skeleton, config, **settings | changes)


def with_optimizer(run, optimizer, trains=None):
    """A run with another optimizer for the parameters of which `trains` is true, without it for all."""
    parameters = []
    for parameter in run.parameters:
        taken = trains is None or trains(parameter)
        parameters.append(replace(parameter, optimizer=optimizer) if taken else parameter)
    return replace(run, parameters=tuple(parameters))


def batch_of(answers=64, tokens=512, prompt=40, **changes):
    """Answers of one length, trained once in micro-batches of 8."""
    fields = {"answers": answers, "prompts": answers // 8, "prompt_tokens": prompt, "answer_tokens": tokens}
    return Batch(**fields | {"longest": tokens, "micro_batches": answers // 8} | changes)


# Lengths ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mean", "longest"), [(700, 1024), (4000, 16384), (30, 4096)])
def test_answers_have_their_mean_and_none_is_too_long(mean, longest):
    lengths = answer_lengths(512, mean, longest)

    assert statistics.mean(lengths) == pytest.approx(mean, rel=0.02)
    assert max(lengths) <= longest
    # Control: they are not all alike.
    assert min(lengths) < mean / 3
    # They are quantiles, not samples: an estimate must not change from call to call.
    assert lengths == answer_lengths(512, mean, longest)


def test_answers_whose_mean_is_the_longest_all_have_that_length():
    assert answer_lengths(3, 512, 512) == [512, 512, 512]


# Rollout, by hand ---------------------------------------------------------------------------------------------------


def test_a_bf16_engine_reads_its_weights_and_its_cache_in_each_step():
    run = run_of("Qwen/Qwen3-8B")
    batch = Batch(answers=1, prompts=1, prompt_tokens=10, answer_tokens=100, longest=100, micro_batches=1)

    weights = 2 * (MATRICES + NORMS + HEAD)
    # Keys and values in bfloat16, of 8 heads of 128, in the mean of 100 steps.
    cached = (10 + 50) * 2 * 2 * 36 * 8 * 128
    # Four float32 copies of the logits.
    sampled = 16 * 151936
    prompt = 10 * 2 * MATRICES / 1e14

    assert rollout_seconds(run, batch, ROUND, FREE) == pytest.approx(
        100 * (weights + cached + sampled) / 1e12 + prompt
    )


def test_latent_attention_has_one_vector_of_a_token_on_each_rank():
    """DeepSeek-V2-Lite: 27 layers, 512 numbers of the latent vector and 64 rotated ones, 2 bytes each."""
    sizes = {"num_hidden_layers": 27, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 16}
    run = replace(run_of("Qwen/Qwen3-8B"), config=PretrainedConfig(**sizes))

    assert token_bytes(run) == 2 * 27 * (512 + 64)
    assert token_bytes(replace(run, engine_ranks=8)) == token_bytes(run)


def test_a_large_batch_is_bound_by_its_products():
    run = run_of("Qwen/Qwen3-8B", utilization=0.9)
    batch = batch_of(answers=512, tokens=10, prompt=0)

    products = 512 * 2 * MATRICES / 1e14
    cached = 512 * 5 * token_bytes(run) / 1e12
    rest = (2 * HEAD + 512 * 16 * 151936) / 1e12

    # Control: else it would be the weights' bytes.
    assert products > 2 * MATRICES / 1e12
    assert rollout_seconds(run, batch, ROUND, FREE) == pytest.approx(10 * (products + cached + rest))


def test_half_a_cache_takes_two_waves():
    """Of answers of one length; where a step takes the same time whatever is in it."""
    costs = replace(FREE, engine_step=1.0)
    slow = replace(ROUND, bandwidth=1e30, bf16=1e30)
    run = run_of("Qwen/Qwen3-8B")
    batch = batch_of(answers=64, tokens=500, prompt=0)
    # A sequence holds 250 tokens in the mean: 32 of them, and the longest row.
    half = replace(run, utilization=(engine_weights(run) + 3 * GIB + 8000 * token_bytes(run)) / run.memory)

    assert sequences_at_once(run, batch) == 64
    assert sequences_at_once(half, batch) in (31, 32)
    whole_s = rollout_seconds(run, batch, slow, costs)
    assert whole_s == pytest.approx(500)
    assert rollout_seconds(half, batch, slow, costs) == pytest.approx(500 * -(-64 // sequences_at_once(half, batch)))


def test_a_cache_without_room_for_a_row_holds_no_sequence():
    run = run_of("Qwen/Qwen3-8B", utilization=0.13)

    assert cache_tokens(run) < run.tokens
    assert sequences_at_once(run, batch_of()) == 0
    # Control: the batch and the model are not the reason.
    assert sequences_at_once(replace(run, utilization=0.2), batch_of()) > 0


def test_a_step_reads_the_experts_that_some_token_uses():
    """Qwen3-30B-A3B: 8 of 128 experts a token."""
    run = run_of("Qwen/Qwen3-30B-A3B", utilization=0.6)
    experts = 48 * 128 * 3 * 2048 * 768

    def step(answers):
        batch = batch_of(answers, tokens=2, prompt=0, prompts=1)
        return rollout_seconds(run, batch, ROUND, FREE) / 2

    cached = token_bytes(run) / 1e12
    sampled = 16 * 151936 / 1e12
    two = step(2) - step(1) - cached - sampled

    # A second token uses 8 experts, of which 1/16 were read for the first.
    assert two == pytest.approx(2 * experts * (1 / 16) * (15 / 16) / 1e12, rel=1e-6)


def test_a_server_overlaps_processor_and_gpu():
    costs = replace(FREE, engine_step=1.0)
    run = run_of("Qwen/Qwen3-8B")
    colocated = rollout_seconds(run, batch_of(), ROUND, costs)
    server = rollout_seconds(replace(run, engine="server"), batch_of(), ROUND, costs)

    # A second of processor time in each of 512 steps; the prompts are the rest.
    assert server == pytest.approx(512, rel=0.01)
    # The GPU's seconds come on top.
    assert colocated > server + 5


# Update, by hand ----------------------------------------------------------------------------------------------------


def test_an_update_is_five_products_of_layers_and_of_the_head():
    """Log-probs before the update, the loss, the same again for the backward, and there two gradients."""
    run = run_of("Qwen/Qwen3-8B")
    tokens = 64 * 552

    products = 5 * 2 * (MATRICES + HEAD)
    # Of three forwards; the backward's costs nothing here.
    attention = 3 * 2 * 552 * 32 * 128 * 36
    # Reads float32 and writes bfloat16, 6 bytes an entry, in three forwards of 8 micro-batches.
    casts = 8 * 3 * 6 * (MATRICES + NORMS) / 1e12

    expected = tokens * (products + attention) / 1e14 + casts
    assert update_seconds(run, batch_of(), ROUND, FREE) == pytest.approx(expected)
    # Without checkpointing the forward runs once less; without a correction there are no log-probs before it.
    saved = tokens * (2 * MATRICES + attention / 3) / 1e14 + casts / 3
    assert update_seconds(replace(run, checkpointing=False), batch_of(), ROUND, FREE) == pytest.approx(
        expected - saved
    )
    saved += tokens * 2 * HEAD / 1e14
    assert update_seconds(run, batch_of(has_old=False), ROUND, FREE) == pytest.approx(expected - saved)


def test_latent_attention_multiplies_by_keys_of_two_parts_and_by_smaller_values():
    run = run_of("Qwen/Qwen3-8B")
    assert run.attended == 2 * 128

    sizes = {"head_dim": 64, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    assert replace(run, config=PretrainedConfig(**sizes)).attended == 128 + 64 + 128


def test_an_adapter_has_no_gradients_of_the_matrices():
    full = update_seconds(run_of("Qwen/Qwen3-8B"), batch_of(), ROUND, FREE)
    adapter = update_seconds(run_of("Qwen/Qwen3-8B", lora=True), batch_of(), ROUND, FREE)

    # Its own products are small: rank 32 beside 1024 and more. And a bfloat16 base needs no casts.
    casts = 8 * 3 * 6 * (MATRICES + NORMS) / 1e12
    saved = 64 * 552 * 2 * (MATRICES + HEAD) / 1e14 + casts
    assert adapter == pytest.approx(full - saved, rel=0.03)


@pytest.mark.parametrize(("scheme", "lora"), [("W4A16", False), ("W4A16", True), ("FP8_DYNAMIC", False)])
def test_a_reference_model_takes_one_forward_more(scheme, lora):
    run = run_of("Qwen/Qwen3-8B", scheme, lora=lora)
    # A second model is in high precision; an adapter is left out of the low-bit one.
    of_reference = run if lora else replace(run, low_bit_forward=False)
    forward = Learner(of_reference, batch_of(), H200, COSTS).forward_per_micro_batch()

    more = update_seconds(run, batch_of(has_reference=True), H200) - update_seconds(run, batch_of(), H200)

    assert more == pytest.approx(8 * forward)


def test_launching_hides_computing_except_for_a_share():
    costs = replace(FREE, launch_layer=1.0, launch_backward=1.5, not_hidden=0.2)
    run = run_of("Qwen/Qwen3-8B")
    computing = update_seconds(run, batch_of(), ROUND, FREE)

    # 36 layers: old, forward, forward again and 1.5 of a backward, in 8 micro-batches.
    assert update_seconds(run, batch_of(), ROUND, costs) == pytest.approx(8 * 36 * 4.5 + 0.2 * computing)


def test_passes_over_the_budget_launch_again():
    costs = replace(FREE, launch_layer=1.0)
    run = run_of("Qwen/Qwen3-8B")
    slow = replace(ROUND, bf16=1e30, bandwidth=1e30)

    one = update_seconds(run, batch_of(), slow, costs)
    four = update_seconds(replace(run, budget=2 * 552), batch_of(), slow, costs)
    assert four == pytest.approx(4 * one)


def test_muon_orthogonalizes_each_matrix():
    """X X^T of 2 n^2 m, its square, and their product with X, five times."""
    run = run_of("Qwen/Qwen3-8B")
    muon = with_optimizer(run, "muon", lambda parameter: parameter.layer and len(parameter.shape) == 2)

    def products(narrow, wide):
        return 5 * (2 * 2 * narrow**2 * wide + 2 * narrow**3)

    flops = 36 * (2 * products(4096, 4096) + 2 * products(1024, 4096) + 3 * products(4096, 12288))
    seconds_of_muon = update_seconds(muon, batch_of(), ROUND, FREE) - update_seconds(run, batch_of(), ROUND, FREE)
    assert seconds_of_muon == pytest.approx(flops / 1e14)


def test_fsdp2_waits_for_its_link_where_that_takes_longer():
    run = replace(run_of("Qwen/Qwen3-8B"), ranks=8, fsdp2=True)
    narrow = replace(ROUND, link=1e9)

    # bfloat16 weights: before the update, forward, backward; float32 gradients with the last. All but the head's norm.
    entries = MATRICES + NORMS + 2 * HEAD + 4096
    expected = 8 * (3 * 2 + 4) * entries / 1e9
    assert update_seconds(run, batch_of(), narrow, FREE) == pytest.approx(expected)
    # Control: a link of 100 GB/s is hidden behind the products.
    assert update_seconds(run, batch_of(), ROUND, FREE) < expected / 10


# Weight sync, by hand -----------------------------------------------------------------------------------------------


def test_a_sync_counts_tensors():
    costs = replace(FREE, sync_tensor=1.0, sync_packed=100.0, wake=1e6)
    plain = run_of("Qwen/Qwen3-8B")
    packed = run_of("Qwen/Qwen3-8B", "W4A16")

    # In each layer 7 matrices and 4 norms; embedding, head and the last norm.
    assert sync_seconds(plain, ROUND, costs) == 36 * 11 + 3
    assert sync_seconds(packed, ROUND, costs) == 36 * 4 + 3 + 36 * 7 * 100
    assert sync_seconds(replace(plain, sleep=True), ROUND, costs) == 36 * 11 + 3 + 1e6


def test_a_frozen_base_is_synced_only_to_an_engine_that_lost_it():
    costs = replace(FREE, sync_adapter=1.0, sync_packed=100.0)
    frozen = run_of("Qwen/Qwen3-8B", "W4A16", lora=True, frozen=True)

    # Two factors for each of 7 matrices in 36 layers.
    assert sync_seconds(frozen, ROUND, costs) == 2 * 36 * 7
    # A sleeping engine has thrown its weights away.
    assert sync_seconds(replace(frozen, sleep=True), ROUND, costs) == 2 * 36 * 7 + 36 * 7 * 100


def test_a_sync_of_experts_counts_matrices_or_stacks_of_them():
    costs = replace(FREE, sync_expert=1.0, sync_packed_stack=100.0, sync_stack=10.0)

    assert sync_seconds(run_of("Qwen/Qwen3-30B-A3B"), ROUND, costs) == 48 * 128 * 3
    assert sync_seconds(run_of("Qwen/Qwen3-30B-A3B", "W4A16"), ROUND, costs) == 48 * 3 * 100
    assert sync_seconds(run_of("Qwen/Qwen3-30B-A3B", "FP8_DYNAMIC"), ROUND, costs) == 48 * 3 * 10


# Measured on an H200 ------------------------------------------------------------------------------------------------

RESULTS = Path(__file__).parents[4] / "benchmarks" / "results" / "h200" / "bench_gpu_step.jsonl"
ARMS = {
    ("qwen2.5-1.5b", "bf16"): {"name": "Qwen/Qwen2.5-1.5B"},
    ("qwen2.5-1.5b", "rollout-only W4A16"): {"name": "Qwen/Qwen2.5-1.5B", "scheme": "W4A16", "learner": False},
    ("qwen2.5-1.5b", "QaRL W4A16"): {"name": "Qwen/Qwen2.5-1.5B", "scheme": "W4A16"},
    ("qwen2.5-1.5b", "QaRL FP8"): {"name": "Qwen/Qwen2.5-1.5B", "scheme": "FP8_DYNAMIC"},
    ("qwen3-8b", "bf16, LoRA"): {"name": "Qwen/Qwen3-8B", "lora": True},
    ("qwen3-8b", "QaRL W4A16, frozen LoRA"): {
        "name": "Qwen/Qwen3-8B",
        "scheme": "W4A16",
        "lora": True,
        "frozen": True,
    },
}


def measured_steps():
    """Mean seconds of each part by shape and arm, without the first step."""
    steps = {}
    for line in RESULTS.read_text().splitlines():
        row = json.loads(line)
        means = {}
        for part in PARTS:
            # Kernels compile in the first.
            means[part] = statistics.mean(row[f"{part} s"][1:])
        steps[row["shape"], row["arm"]] = means
    return steps


def base_of(shape):
    """The arm that the others of a shape are compared with: the first one, in bfloat16."""
    return next(key for key in ARMS if key[0] == shape)


def estimated_steps(costs=COSTS):
    return {key: batch_seconds(run_of(**arm), batch_of(), H200, costs) for key, arm in ARMS.items()}


def test_parts_and_sums_are_near_those_of_an_h200():
    """Within 1.25 and 1.15: the largest deviations are 1.21 (a learner of equal arms took 3.3 and 3.9 s) and 1.11."""
    measured = measured_steps()
    estimated = estimated_steps()

    for key in ARMS:
        for part, of_h200 in measured[key].items():
            assert 1 / 1.25 < getattr(estimated[key], part) / of_h200 < 1.25, (key, part)
        assert 1 / 1.15 < estimated[key].sum / sum(measured[key].values()) < 1.15, key

    # Control: bytes and products alone are far from it.
    ideal = {}
    for name in field_names(Costs):
        if name.startswith(("launch", "engine", "micro")):
            ideal[name] = 0.0
    without_processor = estimated_steps(replace(COSTS, **ideal))

    for key in ARMS:
        # Of 8B the products take most of the time.
        if "1.5b" in key[0]:
            assert without_processor[key].sum < sum(measured[key].values()) / 1.5, key


@pytest.mark.parametrize("shape", ["qwen2.5-1.5b", "qwen3-8b"])
def test_the_order_of_arms_and_their_ratios_are_those_of_an_h200(shape):
    estimates = estimated_steps()
    measured = {}
    estimated = {}
    for key, parts in measured_steps().items():
        if key[0] == shape:
            measured[key] = sum(parts.values())
            estimated[key] = estimates[key].sum

    base = base_of(shape)
    for key in measured:
        assert estimated[base] / estimated[key] == pytest.approx(measured[base] / measured[key], rel=0.1)
        for other in measured:
            # Steps of one arm differ by as much.
            if measured[other] > 1.1 * measured[key]:
                assert estimated[other] > estimated[key]


# Milliseconds of forward and backward without the head, and the range of what was measured (learner.txt).
LEARNER = {
    (8, "bf16"): (213, 219),
    (8, "W4A16"): (332, 406),
    (8, "kept"): (220, 220),
    (32, "bf16"): (514, 520),
    (32, "W4A16"): (560, 622),
    (32, "kept"): (527, 534),
}


@pytest.mark.parametrize(("rows", "learner"), LEARNER)
def test_a_learner_takes_the_milliseconds_of_an_h200(rows, learner):
    """Within 5 %."""
    scheme = None if learner == "bf16" else "W4A16"
    run = run_of("Qwen/Qwen2.5-1.5B", scheme, rows=rows, keeps_matrices=learner == "kept")
    body = Learner(_without_head(run), batch_of(), H200, COSTS)

    low, high = LEARNER[rows, learner]
    assert 0.95 * low < 1000 * (body.forward_per_micro_batch() + body.backward_per_micro_batch()) < 1.05 * high


def _without_head(run):
    config = type(run.config)(**run.config.to_dict() | {"vocab_size": 0})
    return replace(run, config=config)


# What is slower than what -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["bandwidth", "bf16", "eight_bits"])
@pytest.mark.parametrize("scheme", [None, "W4A16", "FP8_DYNAMIC"])
def test_a_better_gpu_is_never_slower(field, scheme):
    run = run_of("Qwen/Qwen3-8B", scheme)
    better = replace(H200, **{field: 2 * getattr(H200, field)})
    before = batch_seconds(run, batch_of(), H200)
    after = batch_seconds(run, batch_of(), better)

    for part in PARTS:
        assert getattr(after, part) <= getattr(before, part)


# Sorted, because the processes of pytest-xdist must collect the same order.
@pytest.mark.parametrize("field", sorted(field_names(Costs)))
def test_every_constant_counts_in_some_run(field):
    """Control of the constants: one that no formula reads would change nothing."""
    dense = run_of("Qwen/Qwen2.5-1.5B", "W4A16", sleep=True)
    experts = run_of("Qwen/Qwen3-30B-A3B", utilization=0.6, engine_ranks=2, ranks=2, fsdp2=True)
    # Muon for the stacks of experts, and no AdamW beside it.
    muon = with_optimizer(with_optimizer(experts, ""), "experts", lambda parameter: len(parameter.shape) == 3)
    # No single run has all that costs something.
    runs = [
        dense,
        with_optimizer(dense, "paged_adamw_8bit"),
        replace(dense, eager=True),
        run_of("Qwen/Qwen2.5-1.5B", "FP8_DYNAMIC"),
        run_of("Qwen/Qwen2.5-1.5B", "W4A16", lora=True, frozen=True),
        muon,
        run_of("Qwen/Qwen3-30B-A3B", "W4A16", utilization=0.6),
        run_of("Qwen/Qwen3-30B-A3B", "FP8_DYNAMIC", utilization=0.6),
    ]
    slower = replace(COSTS, **{field: getattr(COSTS, field) * 3})
    batch = batch_of(updates=2)

    changed = []
    for run in runs:
        changed.append(batch_seconds(run, batch, H200, slower).sum != batch_seconds(run, batch, H200).sum)
    assert any(changed)


def test_more_answers_and_longer_ones_take_longer():
    run = run_of("Qwen/Qwen3-8B", "W4A16")
    base = batch_seconds(run, batch_of(), H200)

    assert batch_seconds(run, batch_of(answers=128), H200).sum > base.sum
    assert batch_seconds(run, batch_of(tokens=530), H200).sum > base.sum
    # A batch that is twice as large does not sample for twice as long.
    assert batch_seconds(run, batch_of(answers=128), H200).rollout < 1.9 * base.rollout


def test_long_answers_of_a_large_model_gain_by_4_bits_and_a_small_model_does_not():
    large = {scheme: run_of("Qwen/Qwen3-8B", scheme, utilization=0.5) for scheme in (None, "W4A16")}
    small = {scheme: run_of("Qwen/Qwen2.5-1.5B", scheme) for scheme in (None, "W4A16")}
    # With few sequences in a step, reading the weights is what takes the time.
    few = batch_of(answers=8, tokens=512)

    def speed(runs):
        return rollout_seconds(runs[None], few, GPUS["l4"]) / rollout_seconds(runs["W4A16"], few, GPUS["l4"])

    assert speed(large) > 2
    assert 1 < speed(small) < speed(large)
    # On a card whose memory is sixteen times as fast the processor decides.
    assert rollout_seconds(small[None], few, H200) < rollout_seconds(small["W4A16"], few, H200)


def rows_of_the_page():
    """The table of dev/plan.md: estimated / measured seconds, and times as fast as bf16."""
    measured = measured_steps()
    estimated = estimated_steps()
    for key, of_h200 in measured.items():
        base = base_of(key[0])
        pairs = []
        for part in PARTS:
            pairs.append((getattr(estimated[key], part), of_h200[part]))
        pairs.append((estimated[key].sum, sum(of_h200.values())))
        pairs.append((estimated[base].sum / estimated[key].sum, sum(measured[base].values()) / sum(of_h200.values())))

        cells = [f"{of_model:.2f} / {of_gpu:.2f}" for of_model, of_gpu in pairs]
        yield f"| {key[0]} | {key[1]} | {' | '.join(cells)} |"


def test_the_page_has_the_estimates_beside_what_was_measured():
    page = (Path(__file__).parents[4] / "dev" / "plan.md").read_text()

    rows = [*rows_of_the_page()]
    assert len(rows) == 6
    for row in rows:
        assert row in page.splitlines(), row
