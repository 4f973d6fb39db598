"""`qarl_trl.quant.shards`: quantized values of cut weights, in real processes, with the bytes they move."""

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

from qarl_trl.quant import apply_quantization, iter_low_bit_weights, quantize_weight, quantized_modules, resolve_scheme
from qarl_trl.quant.shards import quantize_shards
from quant.schemes import NAMES, normal, same_bytes


pytestmark = pytest.mark.slow
# Uneven shards, a process without rows, rows of a block or of a word of zero points in two processes, experts.
SHAPES = [(512, 128), (7, 128), (1, 128), (20, 128), (24, 128), (128, 128), (384, 128), (3, 128, 128), (4, 4, 128)]
NEEDS = {"FP8_BLOCK": 128, "W4A16_ASYM": 8}


def same(found, expected):
    return found.tensors.keys() == expected.tensors.keys() and all(
        same_bytes(found.tensors[name], tensor) for name, tensor in expected.tensors.items()
    )


def cut(weight, mesh):
    placements = [Shard(0)] if mesh.ndim == 1 else [Replicate(), Shard(0)]
    return distribute_tensor(weight, mesh, placements, src_data_rank=None)


def each_scheme_and_shape(mesh):
    """Whether quantized values were gathered or the weight; in bytes an entry, of which half comes from the other process."""
    way = {}
    for name in NAMES:
        scheme = resolve_scheme(name)
        for seed, shape in enumerate(SHAPES):
            rows = math.prod(shape[:-1])
            if rows % NEEDS.get(name, 1):
                continue
            whole = normal(*shape, seed=seed)
            expected = quantize_weight(whole.flatten(0, -2), scheme)
            with MovedBytes() as moved:
                found = quantize_shards(cut(whole, mesh), scheme)
            assert same(found, expected), (name, shape)
            assert all(t.nbytes == t.untyped_storage().nbytes() for t in found.tensors.values())
            chunk = math.ceil(shape[0] / 2) / shape[0]  # what is padded moves too
            quantized = chunk * sum(t.nbytes for n, t in expected.tensors.items() if n != "weight_shape")
            way[name, shape] = {quantized: "quantized", chunk * 2 * whole.numel(): "weight"}[moved.gathered]
    return way


def sharded_weights(processes):
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,) if processes == 2 else (2, 2))
    way = each_scheme_and_shape(mesh)
    scheme, weight = resolve_scheme("W4A16"), normal(8, 128)
    original = DTensor.from_local
    # Control: rows one further within the second half.
    rolled = lambda rows, mesh, *rest, **more: original(  # noqa: E731
        rows.roll(mesh.get_local_rank(mesh.ndim - 1), 0), mesh, *rest, **more
    )
    with patch.object(DTensor, "from_local", rolled):
        assert not same(quantize_shards(cut(weight, mesh), scheme), quantize_weight(weight, scheme))
    torch.distributed.destroy_process_group()
    return way


@pytest.mark.parametrize("processes", [2, 4], ids=["FSDP2", "HSDP"])
def test_quantized_of_shards_are_those_of_the_whole_weight(processes):
    found = isolated_group(sharded_weights, processes, processes)
    for way in found:
        assert {case for case, moved in way.items() if moved == "weight"} == {
            *(("W4A16_ASYM", (24, 128)), ("FP8_BLOCK", (128, 128)), ("FP8_BLOCK", (384, 128)))
        }
        assert len(way) == 6 * len(SHAPES) + 6 + 4


def sharded_sync(name):
    """Bytes a weight sync moves, and bytes of all master weights gathered; under FSDP2 after a step."""
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    model = apply_quantization(make_model("qwen3", num_key_value_heads=2, tie_word_embeddings=True), name)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    tokens = torch.arange(8)[None]
    model(tokens, labels=tokens).loss.backward()
    torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    with MovedBytes() as moved:
        stream = dict(iter_low_bit_weights(model))
    with MovedBytes() as master_weights:
        whole = {name: param.full_tensor().detach() for name, param in model.named_parameters()}
    alone = apply_quantization(make_model("qwen3", num_key_value_heads=2, tie_word_embeddings=True), name)
    assert whole.keys() == dict(alone.named_parameters()).keys()
    alone.load_state_dict(whole, strict=False)
    expected = dict(iter_low_bit_weights(alone))
    assert list(stream) == list(expected)
    assert all(same_bytes(stream[name], tensor) for name, tensor in expected.items())
    torch.distributed.destroy_process_group()
    quantized = {f"{name}.weight" for name, _ in quantized_modules(model)}
    entries = [sum(p.numel() for name, p in whole.items() if (name in quantized) == low) for low in (True, False)]
    sent = sum(tensor.nbytes for name, tensor in stream.items() if not name.endswith("weight_shape"))
    return moved.gathered, master_weights.gathered, sent, *entries


@pytest.mark.parametrize(("name", "bits"), [("W4A16", 4.125), ("FP8_DYNAMIC", 8.1)])
def test_a_sync_moves_quantized(name, bits):
    for moved, master_weights, sent, linear, rest in isolated_group(sharded_sync, 2, name):
        assert master_weights == (linear + rest) * 4 / 2
        assert moved == sent / 2
        assert (sent - 2 * rest) / linear == pytest.approx(bits / 8, rel=0.002)  # 0.52 of 4 bytes with 4 bits
