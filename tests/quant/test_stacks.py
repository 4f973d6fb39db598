"""Stacks: the tensors of all experts of a projection in one, as weight syncs send them."""

import fnmatch

import pytest
import torch
from conftest import make_model

from qarl_trl.quant import apply_quantization, iter_low_bit_weights, low_bit_store, quantize_weight, resolve_scheme
from qarl_trl.quant.layers.experts import parts_of_stack, unstacked
from qarl_trl.quant.scheme import DEFAULT_IGNORE
from quant.schemes import NAMES, names_in


SIZES = {"num_key_value_heads": 2}  # blocks of 128 in every layer
WITHOUT_EXPERTS = (*DEFAULT_IGNORE, "re:.*experts.*")


def one_by_one(stream):
    """The tensors of a stream by their names in a checkpoint, those of stacks one by one."""
    tensors = {}
    for name, tensor in stream:
        if parts_of_stack(name) is None:
            tensors[name] = tensor
        else:
            tensors |= dict(unstacked(name, tensor))
    return tensors


def bytes_of(stream):
    return sum(tensor.nbytes for _, tensor in stream)


def assert_stacks_are_the_checkpoint(model):
    expected = dict(iter_low_bit_weights(model))
    stream = list(iter_low_bit_weights(model, stacked=True))
    tensors = one_by_one(stream)

    # Control: there are stacks.
    assert len(stream) < len(expected)
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert bytes_of(stream) == bytes_of(expected.items())


@pytest.mark.parametrize("scheme", NAMES)
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "olmoe"])
def test_stacks_have_the_tensors_of_the_checkpoint(kind, scheme):
    assert_stacks_are_the_checkpoint(apply_quantization(make_model(kind, **SIZES), scheme))


def test_stacks_of_experts_in_high_precision():
    model = apply_quantization(make_model("qwen3_moe"), "W4A16", ignore=WITHOUT_EXPERTS)
    # The premise: without stacks they come one by one.
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in dict(iter_low_bit_weights(model))

    assert_stacks_are_the_checkpoint(model)


def test_names_of_stacks():
    model = apply_quantization(make_model("mixtral", num_hidden_layers=1), "W4A16")

    names = fnmatch.filter(names_in(iter_low_bit_weights(model, stacked=True)), "*.experts.*")

    expected = []
    for projection in ("gate_proj", "up_proj", "down_proj"):
        for tensor in ("weight_packed", "weight_scale", "weight_shape"):
            expected.append(f"model.layers.0.block_sparse_moe.experts.*.{projection}.{tensor}")
    assert names == expected


def test_stacks_of_low_bit_experts_are_no_copies():
    model = apply_quantization(make_model("qwen3_moe", num_hidden_layers=1), "W4A16")

    stream = dict(iter_low_bit_weights(model, stacked=True))

    kept = low_bit_store(model).kept()["model.layers.0.mlp.experts.gate_up_proj"]
    for projection in ("gate_proj", "up_proj"):
        # Gate and up are halves of one parameter, so both must be views of its one low-bit weight.
        stack = stream[f"model.layers.0.mlp.experts.*.{projection}.weight_packed"]
        assert stack.untyped_storage().data_ptr() == kept.quantized.untyped_storage().data_ptr()


def test_a_model_without_low_bits_keeps_the_names_of_transformers():
    model = make_model("qwen3_moe")

    names = names_in(iter_low_bit_weights(model, stacked=True))

    assert names == names_in(iter_low_bit_weights(model))
    assert "model.layers.0.mlp.experts.gate_up_proj" in names


# A block in two experts, a word of eight zero points in two, and one scale above all.
@pytest.mark.parametrize(("scheme", "rows"), [("FP8_BLOCK", 192), ("W4A16_ASYM", 4), ("NVFP4A16", 128)])
def test_experts_that_share_a_scale_are_refused(scheme, rows):
    weight = quantize_weight(torch.randn(4 * rows, 128), resolve_scheme(scheme))

    with pytest.raises(ValueError, match=f"cannot be split into {rows} each"):
        weight.stacks(experts=2, projections=2)
