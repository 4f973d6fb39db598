"""`qarl_trl.quant.sharding.gathers`: FSDP2 trains by quantized values as by weights, bit for bit, in two processes.

They are real ones, and count the bytes that move.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from collectives import MovedBytes
from conftest import make_model
from peft import LoraConfig, get_peft_model
from slow.isolated import isolated_group
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from qarl_trl.quant import LowBitStore, apply_quantization, iter_low_bit_weights, low_bit_store, quantized_modules
from qarl_trl.quant.layers.layer import multiplying
from qarl_trl.quant.sharding import shards
from qarl_trl.quant.sharding.gathers import GatheredWeight, MasterShard
from qarl_trl.rollout.sync_check.learner_logps import learner_logps
from quant.schemes import same_bytes


WRAPPER = "_checkpoint_wrapped_module."
# Two key heads: as many rows as blocks and words of zero points need.
SIZES = {"num_key_value_heads": 2}


# A sharded model ----------------------------------------------------------------------------------------------------


def sharded_model(kind: str, scheme: str, gather_quantized: bool, **changes: Any) -> nn.Module:
    """A toy as accelerate shards one: on the meta device, then loaded with `assign=True`; layers checkpointed."""
    model = apply_quantization(make_model(kind, **SIZES, **changes), scheme)
    start = model.state_dict()
    buffers = dict(model.named_buffers())
    if gather_quantized:
        low_bit_store(model).prepare_gathers(2, torch.device("cpu"))

    model = model.to("meta")
    mesh = init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = checkpoint_wrapper(fully_shard(layer, mesh=mesh, mp_policy=policy))
    fully_shard(model, mesh=mesh, mp_policy=policy)

    load_shards(model, start)
    # Buffers that no checkpoint has went to the meta device, too.
    for name, buffer in buffers.items():
        parent, _, local = name.rpartition(".")
        model.get_submodule(parent).register_buffer(local, buffer, persistent=False)
    return model


def load_shards(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Give a sharded model on the meta device its shards of whole weights."""
    loaded = {}
    for name, param in model.named_parameters():
        plain_name = name.replace(WRAPPER, "")
        weight = state[plain_name]
        loaded[plain_name] = distribute_tensor(weight, param.device_mesh, param.placements, src_data_rank=None)
    model.load_state_dict(loaded, strict=False, assign=True)


# Training -----------------------------------------------------------------------------------------------------------


@dataclass
class Step:
    """
    What a training step computed, and what it cost.

    Attributes:
        tensors: Logits, loss, gradients, master weights and synced tensors.
        names: The names of the synced tensors.
        gathered: Bytes that all-gathers of forward and backward brought.
        reduced: Bytes of the reduce-scatters.
        quantized: Number of weights that were quantized.
        kept: Bytes of quantized values that this process keeps between steps.
    """

    tensors: list[Tensor]
    names: list[str]
    gathered: int
    reduced: int
    quantized: int
    kept: int


def kept_bytes(model: nn.Module) -> int:
    total = 0
    for low_bit in low_bit_store(model).kept().values():
        for name, tensor in low_bit.tensors.items():
            if name != "weight_shape":
                total += tensor.untyped_storage().nbytes()
    return total


def train(model: nn.Module, steps: int = 3) -> list[Step]:
    """Train with AdamW, two micro-batches a step; gradients accumulate as shards, and in the second step whole."""
    # So large a step that quantized values change in each.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    low_bit_store(model).follow(optimizer)

    # Both ways quantize the rows of a process in `shards`.
    quantized_shapes: list[torch.Size] = []
    quantize_weight = shards.quantize_weight

    def recorded(weight: Tensor, *args: Any) -> Any:
        quantized_shapes.append(weight.shape)
        return quantize_weight(weight, *args)

    trained = []
    with patch.object(shards, "quantize_weight", recorded):
        for step in range(steps):
            trained.append(train_one_step(model, optimizer, step, quantized_shapes))
    return trained


def train_one_step(
    model: Any, optimizer: torch.optim.Optimizer, step: int, quantized_shapes: list[torch.Size]
) -> Step:
    rank = torch.distributed.get_rank()
    quantized_shapes.clear()
    tensors = []

    with MovedBytes() as moved:
        for micro_batch in range(2):
            model.set_requires_gradient_sync(step != 1 or micro_batch == 1)
            # Other tokens in each process, micro-batch and step: a gradient that is not reduced would show.
            tokens = torch.arange(8)[None] + 3 * rank + 5 * micro_batch + step
            output = model(tokens, labels=tokens)
            output.loss.backward()
            tensors += [output.logits.detach(), output.loss.detach()[None]]
    tensors += [param.grad.to_local() for param in model.parameters()]

    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        tensors += [param.to_local().clone() for param in model.parameters()]

    stream = dict(iter_low_bit_weights(model))
    tensors += [tensor.clone() for tensor in stream.values()]
    return Step(
        tensors=tensors,
        names=list(stream),
        gathered=moved.gathered,
        reduced=moved.reduced,
        quantized=len(quantized_shapes),
        kept=kept_bytes(model),
    )


def same_step(one: Step, other: Step) -> bool:
    assert len(one.tensors) == len(other.tensors)
    return all(map(same_bytes, one.tensors, other.tensors))


def check_forwards_without_gradient(by_weights: nn.Module, by_quantized: nn.Module) -> None:
    """The learner of the sync check, and one in high precision."""
    tokens = list(range(9))
    assert torch.equal(learner_logps(by_weights, tokens).plain, learner_logps(by_quantized, tokens).plain)

    logits = []
    for model in (by_weights, by_quantized):
        with multiplying(model, low_bits=False), torch.no_grad():
            logits.append(model(input_ids=torch.tensor([tokens])).logits)
    assert torch.equal(*logits)


def train_with_stale_quantized_values(kind: str, scheme: str) -> list[Step]:
    """Every step gathers the quantized values of the first one."""
    rows_of = LowBitStore.rows_of
    first: dict[Any, Any] = {}

    def stale(store: LowBitStore, layer: Any, name: str) -> Any:
        if (layer, name) not in first:
            first[layer, name] = rows_of(store, layer, name)
        return first[layer, name]

    model = sharded_model(kind, scheme, True)
    with patch.object(LowBitStore, "rows_of", stale):
        return train(model, steps=2)


def low_bit_matrices(model: nn.Module) -> list[Any]:
    matrices = []
    for _, layer in quantized_modules(model):
        module: Any = layer
        for param in module.parameters(recurse=False):
            if param.ndim > 1:
                matrices.append(param)
    return matrices


def train_both_ways(kind: str, scheme: str) -> dict[str, Any]:
    """In one of two processes: train by gathered weights and by gathered quantized values, and compare."""
    torch.distributed.init_process_group("gloo")
    torch.set_num_threads(1)

    model_by_weights = sharded_model(kind, scheme, False)
    model_by_quantized = sharded_model(kind, scheme, True)
    by_weights = train(model_by_weights)
    by_quantized = train(model_by_quantized)

    for one, other in zip(by_weights, by_quantized, strict=True):
        assert one.names == other.names
        assert same_step(one, other)
    check_forwards_without_gradient(model_by_weights, model_by_quantized)

    # Control: quantized values of the step before.
    stale = train_with_stale_quantized_values(kind, scheme)
    assert not same_step(by_quantized[1], stale[1])

    matrices = low_bit_matrices(model_by_quantized)
    assert matrices
    for param in matrices:
        assert type(param.to_local()) is MasterShard
    torch.distributed.destroy_process_group()

    for step in (*by_weights, *by_quantized):
        # Too many to send to the test by a pipe.
        step.tensors = []
    steps = list(zip(by_weights, by_quantized, strict=True))
    return {"steps": steps, "matrices": len(matrices), "entries": sum(param.numel() for param in matrices)}


@pytest.mark.slow
@pytest.mark.parametrize(
    # Bits of an entry: 8 and the scales of channels; 4, the scale of a group (16 / 128) and its zero point (4 / 128).
    ("kind", "scheme", "bits"),
    [("qwen2", "FP8_DYNAMIC", 8.1), ("qwen3_moe", "W4A16_ASYM", 4.15625)],
)
def test_training_by_gathered_quantized_values_is_training_by_gathered_weights(kind, scheme, bits):
    for result in isolated_group(train_both_ways, 2, kind, scheme):
        for by_weights, by_quantized in result["steps"]:
            # Half of each is another's; in forward and backward of two micro-batches.
            saved = (by_weights.gathered - by_quantized.gathered) / 4 * 2
            assert saved == pytest.approx(result["entries"] * (2 - bits / 8), rel=0.01)
            assert by_weights.reduced == by_quantized.reduced
            assert by_quantized.kept * 2 == by_weights.kept

        # The first forward, and the sync after each step, whose quantized values the next forward uses.
        matrices = result["matrices"]
        assert [step.quantized for _, step in result["steps"]] == [2 * matrices, matrices, matrices]


# Shards and gathered weights ----------------------------------------------------------------------------------------


@torch.no_grad()
def check_written_shards(model: nn.Module, layer: Any) -> None:
    """What is written to a shard without an optimizer step is in the next forward, sync and export."""

    def forward() -> Tensor:
        return model(torch.arange(8)[None]).logits

    low_bit_store(model).will_be_told()
    logits = forward()
    low_bit = layer.low_bit()
    assert torch.equal(forward(), logits)

    layer.weight.to_local().mul_(2)
    assert not torch.equal(forward(), logits)

    layer.weight.detach().to_local().mul_(0.5)  # as torch.distributed.checkpoint loads; no version moves
    assert not same_bytes(layer.low_bit().scale, low_bit.scale)  # control
    stream = dict(iter_low_bit_weights(model))
    assert same_bytes(stream["model.layers.0.mlp.down_proj.weight_scale"], low_bit.scale)
    assert torch.equal(forward(), logits)


def read_what_is_no_weight() -> tuple[str, str]:
    """In one of two processes: the errors of a gathered weight that is read, and of one of the wrong size."""
    torch.distributed.init_process_group("gloo")
    model: Any = sharded_model("qwen3", "W4A16", True, num_hidden_layers=1)
    wrapped = model.model.layers[0]._checkpoint_wrapped_module
    layer = model.model.layers[0].mlp.down_proj

    model.unshard()
    wrapped.unshard()
    assert isinstance(layer.weight, GatheredWeight)
    assert layer.weight.shape == (128, 256)
    with pytest.raises(RuntimeError) as read:
        layer.weight + 1

    wrapped.reshard()
    assert isinstance(layer.weight, DTensor)
    model.load_state_dict(model.state_dict(), assign=True)  # shards that are `MasterShard`s already
    assert type(layer.weight.to_local().plain) is torch.Tensor
    check_written_shards(model, layer)

    shard = layer.weight.to_local().detach()
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(RuntimeError) as uneven:
        shard.fsdp_pre_all_gather(mesh, torch.Size((127, 256)), None, layer, None)
    torch.distributed.destroy_process_group()
    return str(read.value), str(uneven.value)


@pytest.mark.slow
def test_what_is_no_weight_says_so():
    read, uneven = isolated_group(read_what_is_no_weight, 2)[0]

    assert "gathered only its quantized values" in read
    assert "(127, 256) cannot be gathered from 2 processes" in uneven


def test_a_master_shard_writes_to_the_tensor_that_it_was_made_of():
    plain = torch.randn(4, 8)
    master = nn.Parameter(MasterShard(plain, "weight"))
    assert type(master) is MasterShard
    assert isinstance(master, nn.Parameter)

    with torch.no_grad():
        master[1:3].mul_(0)
        # As an optimizer writes, to many parameters at once.
        torch._foreach_add_([master], 1)

    assert torch.equal(plain[1:3], torch.ones(2, 8))
    assert master.data_ptr() == plain.data_ptr()


def test_what_is_computed_from_a_master_shard_is_an_ordinary_tensor(tmp_path):
    master = nn.Parameter(MasterShard(torch.randn(4, 8), "weight"))

    assert type(master + 1) is torch.Tensor
    assert type(master.clone()) is torch.Tensor
    assert type(master.to(torch.float64)) is torch.Tensor

    # As torch.distributed.checkpoint also saves, shard by shard.
    torch.save({"weight": master.detach()}, tmp_path / "saved")
    assert type(torch.load(tmp_path / "saved", weights_only=True)["weight"]) is torch.Tensor


def test_a_master_shard_with_other_memory_is_refused():
    master = nn.Parameter(MasterShard(torch.randn(4, 8), "weight"))
    master.data = torch.zeros(4, 8)

    with pytest.raises(RuntimeError, match="given other memory"):
        master + 1


# Where quantized values are gathered --------------------------------------------------------------------------------


def make_dense(**changes):
    return make_model(**SIZES, num_hidden_layers=1, **changes)


def number_of_master_shards(model, ranks=2):
    """How many weights of `model` have their quantized values gathered, if so many processes share it."""
    low_bit_store(model).prepare_gathers(ranks, torch.device("cpu"))
    return sum(type(param) is MasterShard for param in model.parameters())


@pytest.mark.parametrize(
    ("scheme", "ranks", "number"),
    [
        # By all that decides: the number of processes, whether it divides the rows, and what rows share.
        ("W4A16", 2, 7),
        ("W4A16", 1, 0),
        ("W4A16", 3, 0),
        ("W4A16", 64, 7),
        ("FP8_BLOCK", 2, 2),
        ("W4A16_ASYM", 64, 0),
        ("W4A8", 2, 0),  # its kernel prepares the weight
        ("NVFP4A16", 2, 0),  # a global scale
    ],
)
def test_quantized_values_are_gathered_where_each_process_can_make_its_own(scheme, ranks, number):
    assert number_of_master_shards(apply_quantization(make_dense(), scheme), ranks) == number


def test_quantized_values_of_experts_are_gathered():
    model = apply_quantization(make_dense(kind="qwen3_moe"), "W4A16")

    # Four layers of attention, and two parameters of experts.
    assert number_of_master_shards(model) == 4 + 2


def test_whole_weights_are_gathered_where_the_forward_or_an_adapter_needs_them():
    high_precision = apply_quantization(make_dense(), "W4A16", quantize_forward=False)
    assert number_of_master_shards(high_precision) == 0

    bfloat16 = apply_quantization(make_dense(dtype=torch.bfloat16), "W4A16")
    assert number_of_master_shards(bfloat16) == 0

    # Seven layers less the two with an adapter, whose merged weight needs the whole base.
    adapted = get_peft_model(make_dense(), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    assert number_of_master_shards(apply_quantization(adapted, "W4A16")) == 5
