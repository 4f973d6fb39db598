"""`qarl_trl.quant.gathers`: FSDP2 trains by quantized values as by weights, bit for bit, in two real processes that count what moves."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from collectives import MovedBytes
from conftest import make_model
from peft import LoraConfig, get_peft_model
from slow.isolated import isolated_group
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from qarl_trl.quant import (
    LowBitStore,
    apply_quantization,
    iter_low_bit_weights,
    low_bit_store,
    quantized_modules,
    shards,
)
from qarl_trl.quant.gathers import GatheredWeight, MasterShard
from qarl_trl.rollout.sync_check import learner_logps, low_bit_forward
from quant.schemes import same_bytes


def cut_model(kind: str, scheme: str, packed: bool, **changes: Any) -> torch.nn.Module:
    """A toy as accelerate shards one: on the meta device, then loaded with `assign=True`; layers checkpointed."""
    model = apply_quantization(make_model(kind, num_key_value_heads=2, **changes), scheme)
    start = model.state_dict()
    if packed:
        low_bit_store(model).gather_quantized(2, torch.device("cpu"))
    mesh, buffers = init_device_mesh("cpu", (2,)), dict(model.named_buffers())
    model = model.to("meta")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = checkpoint_wrapper(fully_shard(layer, mesh=mesh, mp_policy=policy))
    fully_shard(model, mesh=mesh, mp_policy=policy)
    cut = {name: (p.device_mesh, p.placements) for name, p in model.named_parameters()}
    plain = {name: name.replace("_checkpoint_wrapped_module.", "") for name in cut}
    whole = {name: distribute_tensor(start[plain[name]], *cut[name], src_data_rank=None) for name in cut}
    model.load_state_dict({plain[name]: tensor for name, tensor in whole.items()}, strict=False, assign=True)
    for name, buffer in buffers.items():
        parent, _, local = name.rpartition(".")
        model.get_submodule(parent).register_buffer(local, buffer, persistent=False)
    return model


def held(model: torch.nn.Module) -> int:
    """Bytes of quantized values that this process keeps between steps."""
    weights = low_bit_store(model).kept().values()
    return sum(
        t.untyped_storage().nbytes() for w in weights for name, t in w.tensors.items() if name != "weight_shape"
    )


def trained(model: torch.nn.Module, steps: int = 3) -> list[Any]:
    """Logits, loss, gradients, master weights, synced tensors, bytes moved, weights quantized and quantized values held of every step."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    low_bit_store(model).follow(optimizer)
    quantize, calls = shards.quantize_weight, []
    counted = lambda weight, *rest: calls.append(weight.shape) or quantize(weight, *rest)  # noqa: E731
    rank = torch.distributed.get_rank()
    with patch.object(shards, "quantize_weight", counted):
        for step in range(steps):
            calls.clear()
            tensors = []
            with MovedBytes() as moved:
                for part in range(2):  # accumulated: sharded, and in the second step whole
                    model.set_requires_gradient_sync(step != 1 or part == 1)
                    tokens = torch.arange(8)[None] + 3 * rank + 5 * part + step
                    output = model(tokens, labels=tokens)
                    output.loss.backward()
                    tensors += [output.logits.detach(), output.loss.detach()[None]]
            tensors += [p.grad.to_local() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                tensors += [p.to_local().clone() for p in model.parameters()]
            stream = dict(iter_low_bit_weights(model))
            tensors += [tensor.clone() for tensor in stream.values()]
            found.append((tensors, moved.gathered, moved.reduced, len(calls), held(model), list(stream)))
    return found


def both_forms(kind: str, scheme: str) -> dict[str, Any]:
    torch.distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    models = [cut_model(kind, scheme, packed) for packed in (False, True)]
    weights, quantized = (trained(model) for model in models)
    for before, after in zip(weights, quantized, strict=True):
        assert before[-1] == after[-1]
        assert len(before[0]) == len(after[0])
        assert all(same_bytes(a, b) for a, b in zip(before[0], after[0], strict=True))
    # The learner of the sync check, and one in high precision.
    tokens = list(range(9))
    plain, packed = (learner_logps(model, tokens).plain for model in models)
    assert torch.equal(plain, packed)
    high = []
    for model in models:
        with low_bit_forward(model, False), torch.no_grad():
            high.append(model(input_ids=torch.tensor([tokens])).logits)
    assert torch.equal(*high)
    # Control: quantized values of the step before.
    stale, old = cut_model(kind, scheme, True), {}
    original = LowBitStore.rows_of
    first = lambda store, layer, name: old.setdefault((layer, name), original(store, layer, name))  # noqa: E731
    with patch.object(LowBitStore, "rows_of", first):
        found = trained(stale, steps=2)
    same = [same_bytes(a, b) for a, b in zip(quantized[1][0], found[1][0], strict=True)]
    parameters = [
        p for _, layer in quantized_modules(models[1]) for p in layer.parameters(recurse=False) if p.ndim > 1
    ]
    kinds = {type(p.to_local()) for p in parameters}
    torch.distributed.destroy_process_group()
    return {
        "stale": all(same),
        "master_weights": {MasterShard: "packed"}.get(*kinds) if len(kinds) == 1 else None,
        "parameters": len(parameters),
        "entries": sum(p.numel() for p in parameters),
        "moved": [(a[1], b[1], a[2], b[2]) for a, b in zip(weights, quantized, strict=True)],
        "quantized": [(a[3], b[3]) for a, b in zip(weights, quantized, strict=True)],
        "held": [(a[4], b[4]) for a, b in zip(weights, quantized, strict=True)],
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "scheme", "bits"), [("qwen2", "FP8_DYNAMIC", 8.1), ("qwen3_moe", "W4A16_ASYM", 4.15625)]
)
def test_training_by_gathered_quantized_is_training_by_gathered_weights(kind, scheme, bits):
    for found in isolated_group(both_forms, 2, kind, scheme):
        assert not found["stale"] and found["master_weights"] == "packed"
        for weights, quantized, reduced, reduced_too in found["moved"]:
            # Half of each is another's; in forward and backward of two micro-batches.
            assert (weights - quantized) / 4 * 2 == pytest.approx(found["entries"] * (2 - bits / 8), rel=0.01)
            assert reduced == reduced_too
        assert [after for _, after in found["quantized"]] == [2 * found["parameters"]] + [found["parameters"]] * 2
        assert all(after * 2 == before for before, after in found["held"])


def written_shards(model: torch.nn.Module, layer: torch.nn.Module) -> None:
    """What is written to a shard without an optimizer step is in the next forward, sync and export."""
    low_bit_store(model).will_be_told()
    forward = lambda: model(torch.arange(8)[None]).logits  # noqa: E731
    with torch.no_grad():
        before, quantized = forward(), layer.low_bit()
        assert torch.equal(forward(), before)
        layer.weight.to_local().mul_(2)
        assert not torch.equal(forward(), before)
        layer.weight.detach().to_local().mul_(0.5)  # as torch.distributed.checkpoint loads; no version moves
        assert not same_bytes(layer.low_bit().scale, quantized.scale)  # control
        sent = dict(iter_low_bit_weights(model))
        assert same_bytes(sent["model.layers.0.mlp.down_proj.weight_scale"], quantized.scale)
        assert torch.equal(forward(), before)


def refusals() -> list[str]:
    torch.distributed.init_process_group("gloo")
    model = cut_model("qwen3", "W4A16", True, num_hidden_layers=1)
    layer = model.model.layers[0].mlp.down_proj
    model.unshard()
    model.model.layers[0]._checkpoint_wrapped_module.unshard()
    assert isinstance(layer.weight, GatheredWeight) and layer.weight.shape == (128, 256)
    with pytest.raises(RuntimeError) as error:
        layer.weight + 1
    model.model.layers[0]._checkpoint_wrapped_module.reshard()
    assert isinstance(layer.weight, DTensor)
    model.load_state_dict(model.state_dict(), assign=True)  # shards that are coded already
    assert type(layer.weight.to_local().plain) is torch.Tensor
    written_shards(model, layer)
    with pytest.raises(RuntimeError) as unlike:
        own = layer.weight.to_local().detach()
        own.fsdp_pre_all_gather(init_device_mesh("cpu", (2,)), torch.Size((127, 256)), None, layer, None)
    torch.distributed.destroy_process_group()
    return [str(error.value), str(unlike.value)]


@pytest.mark.slow
def test_what_is_no_weight_says_so():
    read, unlike = isolated_group(refusals, 2)[0]
    assert "gathered only its quantized values" in read
    assert "(127, 256) cannot be gathered from 2 processes" in unlike


def test_a_coded_master_is_the_tensor_it_was_made_of(tmp_path):
    plain = torch.randn(4, 8)
    master = torch.nn.Parameter(MasterShard(plain, "weight"))
    assert type(master) is MasterShard and isinstance(master, torch.nn.Parameter)
    with torch.no_grad():
        master[1:3].mul_(0)
        torch._foreach_add_([master], 1)
    assert torch.equal(plain[1:3], torch.ones(2, 8)) and master.data_ptr() == plain.data_ptr()
    assert type(master + 1) is type(master.clone()) is type(master.to(torch.float64)) is torch.Tensor
    other = torch.nn.Parameter(MasterShard(plain.clone(), "weight"))
    other.data = torch.zeros(4, 8)
    with pytest.raises(RuntimeError, match="given other memory"):
        other + 1
    torch.save({"weight": master.detach()}, tmp_path / "saved")
    assert (
        type(torch.load(tmp_path / "saved", weights_only=True)["weight"]) is torch.Tensor
    )  # also by DCP, shard by shard


def packed(model, ranks=2):
    low_bit_store(model).gather_quantized(ranks, torch.device("cpu"))
    return sum(type(p) is MasterShard for p in model.parameters())


def test_quantized_are_gathered_where_each_process_can_make_its_own():
    dense = {"num_hidden_layers": 1, "num_key_value_heads": 2}
    assert packed(apply_quantization(make_model(**dense), "W4A16")) == 7
    assert packed(apply_quantization(make_model("qwen3_moe", **dense), "W4A16")) == 4 + 2
    for scheme, ranks, count in (
        ("W4A16", 1, 0),
        ("W4A16", 3, 0),
        ("FP8_BLOCK", 2, 2),
        ("W4A16_ASYM", 64, 0),
        ("W4A16", 64, 7),
    ):
        assert packed(apply_quantization(make_model(**dense), scheme), ranks) == count, (scheme, ranks)
    for scheme in ("W4A8", "NVFP4A16"):  # prepared by its kernel; a global scale
        assert packed(apply_quantization(make_model(**dense), scheme)) == 0
    assert packed(apply_quantization(make_model(**dense), "W4A16", quantize_forward=False)) == 0
    assert packed(apply_quantization(make_model(dtype=torch.bfloat16, **dense), "W4A16")) == 0
    adapted = get_peft_model(make_model(**dense), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    assert packed(apply_quantization(adapted, "W4A16")) == 5
