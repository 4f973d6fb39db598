"""`qarl_trl.quant.sharding.shards`: quantized values of sharded weights, in real processes; the bytes they move."""

import math
from unittest.mock import patch

import pytest
import torch
from collectives import MovedBytes
from conftest import make_model
from slow.isolated import isolated_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from qarl_trl.quant import apply_quantization, iter_low_bit_weights, quantize_weight, resolve_scheme
from qarl_trl.quant.sharding.shards import quantize_shards
from quant.schemes import NAMES, normal, same_bytes, same_tensors
from quant.toy_layers import low_bit_parameters_of


pytestmark = pytest.mark.slow
# Uneven shards, a process without rows, rows of a block or of a word of zero points in two processes, experts.
SHAPES = [(512, 128), (7, 128), (1, 128), (20, 128), (24, 128), (128, 128), (384, 128), (3, 128, 128), (4, 4, 128)]
# A weight must have a multiple of so many rows.
ROWS_TOGETHER = {"FP8_BLOCK": 128, "W4A16_ASYM": 8}
# Where rows that depend on each other are in two processes, so that the weight itself is gathered.
GATHERED_AS_WEIGHT = {("W4A16_ASYM", (24, 128)), ("FP8_BLOCK", (128, 128)), ("FP8_BLOCK", (384, 128))}


def sharded(weight, mesh):
    # FSDP2 shards over all processes. HSDP shards over some, and replicates over the others.
    placements = [Shard(0)] if mesh.ndim == 1 else [Replicate(), Shard(0)]
    return distribute_tensor(weight, mesh, placements, src_data_rank=None)


def stored_bytes(tensors):
    """Bytes of the tensors of a checkpoint that are computed from the weight's values."""
    return sum(tensor.nbytes for name, tensor in tensors.items() if not name.endswith("weight_shape"))


def what_was_gathered(scheme, weight, mesh):
    """
    Quantize a sharded weight, and compare it with the whole one.

    Returns "quantized" or "weight", by the bytes that each process received: half of all, with the padding of shards.
    """
    expected = quantize_weight(weight.flatten(0, -2), scheme)
    with MovedBytes() as moved:
        low_bit = quantize_shards(sharded(weight, mesh), scheme)

    assert same_tensors(low_bit.tensors, expected.tensors), tuple(weight.shape)
    for tensor in low_bit.tensors.values():
        assert tensor.nbytes == tensor.untyped_storage().nbytes()  # no part of a larger tensor

    # With an odd number of rows the smaller shard is padded.
    share = math.ceil(len(weight) / 2) / len(weight)
    bytes_of_quantized = share * stored_bytes(expected.tensors)
    bytes_of_weight = share * 2 * weight.numel()  # bfloat16
    return {bytes_of_quantized: "quantized", bytes_of_weight: "weight"}[moved.gathered]


def gathered_by_case(mesh):
    """What was gathered, by scheme and shape."""
    gathered = {}
    for name in NAMES:
        for seed, shape in enumerate(SHAPES):
            rows = math.prod(shape[:-1])
            if rows % ROWS_TOGETHER.get(name, 1) == 0:
                weight = normal(*shape, seed=seed)
                gathered[name, shape] = what_was_gathered(resolve_scheme(name), weight, mesh)
    return gathered


def check_that_misplaced_rows_are_seen(mesh):
    """Control: rows that are one further within the second half."""
    scheme = resolve_scheme("W4A16")
    weight = normal(8, 128)
    from_local = DTensor.from_local

    def misplaced(rows, mesh, *args, **kwargs):
        rank = mesh.get_local_rank(mesh.ndim - 1)
        # By one, and only where `rank` is 1.
        return from_local(rows.roll(rank, 0), mesh, *args, **kwargs)

    with patch.object(DTensor, "from_local", misplaced):
        low_bit = quantize_shards(sharded(weight, mesh), scheme)
    assert not same_tensors(low_bit.tensors, quantize_weight(weight, scheme).tensors)


def quantize_in_processes(processes):
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,) if processes == 2 else (2, 2))

    gathered = gathered_by_case(mesh)
    check_that_misplaced_rows_are_seen(mesh)

    torch.distributed.destroy_process_group()
    return gathered


@pytest.mark.parametrize("processes", [2, 4], ids=["FSDP2", "HSDP"])
def test_quantized_values_of_shards_are_those_of_the_whole_weight(processes):
    for gathered in isolated_group(quantize_in_processes, processes, processes):
        as_weight = {case for case, what in gathered.items() if what == "weight"}
        assert as_weight == GATHERED_AS_WEIGHT
        # Six schemes take all shapes, W4A16_ASYM takes six, and FP8_BLOCK four.
        assert len(gathered) == 6 * len(SHAPES) + 6 + 4


# A whole model ------------------------------------------------------------------------------------------------------


def make_tied_model(scheme):
    return apply_quantization(make_model("qwen3", num_key_value_heads=2, tie_word_embeddings=True), scheme)


def trained_under_fsdp2(scheme):
    """The model after a step, in two processes."""
    mesh = init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    # A tied head is one parameter under two names, and must be gathered once.
    model = make_tied_model(scheme)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)

    tokens = torch.arange(8)[None]
    model(tokens, labels=tokens).loss.backward()
    # After a step, so that shards hold other weights than the model was made with.
    torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    return model


def check_stream(stream, scheme, master_weights):
    """It is the stream of one process with the same master weights."""
    alone = make_tied_model(scheme)
    assert master_weights.keys() == dict(alone.named_parameters()).keys()
    alone.load_state_dict(master_weights, strict=False)

    expected = dict(iter_low_bit_weights(alone))
    assert list(stream) == list(expected)
    for name, tensor in expected.items():
        assert same_bytes(stream[name], tensor), name


def sync_in_processes(scheme):
    """What a sync moves, what gathering all master weights moves, and how large both kinds of weights are."""
    torch.distributed.init_process_group("gloo")
    model = trained_under_fsdp2(scheme)

    with MovedBytes() as by_sync:
        stream = dict(iter_low_bit_weights(model))
    with MovedBytes() as by_weights:
        master_weights = {name: param.full_tensor().detach() for name, param in model.named_parameters()}
    check_stream(stream, scheme, master_weights)
    torch.distributed.destroy_process_group()

    low_bit_names = low_bit_parameters_of(model)
    low_bit_entries = 0
    other_entries = 0
    for name, weight in master_weights.items():
        if name in low_bit_names:
            low_bit_entries += weight.numel()
        else:
            other_entries += weight.numel()
    return {
        "by_sync": by_sync.gathered,
        "by_weights": by_weights.gathered,
        "stream": stored_bytes(stream),
        "low_bit_entries": low_bit_entries,
        "other_entries": other_entries,
    }


@pytest.mark.parametrize(("scheme", "bits"), [("W4A16", 4.125), ("FP8_DYNAMIC", 8.1)])
def test_a_sync_moves_quantized_values(scheme, bits):
    for measured in isolated_group(sync_in_processes, 2, scheme):
        low_bit_entries = measured["low_bit_entries"]
        other_entries = measured["other_entries"]

        # Each process receives the half of the other one.
        assert measured["by_weights"] == (low_bit_entries + other_entries) * 4 / 2
        assert measured["by_sync"] == measured["stream"] / 2

        # All else is bfloat16. With four bits an entry takes 0.52 bytes of 4.
        low_bit_bytes = measured["stream"] - 2 * other_entries
        assert low_bit_bytes / low_bit_entries == pytest.approx(bits / 8, rel=0.002)
