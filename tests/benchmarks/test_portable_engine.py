"""The engine's kernel of the long toy multiplies by the weights that a sync sends."""

import pytest
import torch
from torch import nn

from qarl_trl.quant.quantize import dequantize, quantize_weight
from qarl_trl.quant.scheme import resolve_scheme


portable_engine = pytest.importorskip("portable_engine", reason="needs vLLM")


def layer_of(tensors):
    """A layer as vLLM has it after loading: packed values along the inputs, and a scale for each group."""
    layer = nn.Module()
    layer.weight_packed = nn.Parameter(tensors["weight_packed"], requires_grad=False)
    layer.weight_packed.packed_dim = 1
    layer.weight_scale = nn.Parameter(tensors["weight_scale"], requires_grad=False)
    return layer


def kernel_of(group_size, out_features, in_features):
    """The kernel as vLLM makes it for such a layer."""
    config = portable_engine.MPLinearLayerConfig(
        full_weight_shape=(in_features, out_features),
        partition_weight_shape=(in_features, out_features),
        weight_type=portable_engine.scalar_types.uint4b8,
        act_type=torch.bfloat16,
        group_size=group_size,
        zero_points=False,
    )
    return portable_engine.Float32LinearKernel(config, "weight_packed", "weight_scale")


@pytest.mark.parametrize("group_size", [-1, 32])
def test_it_multiplies_by_the_dequantized_weight(group_size):
    torch.manual_seed(0)
    weight = quantize_weight(torch.randn(48, 64), resolve_scheme("W4A16", group_size))
    layer = layer_of(weight.tensors)
    kernel = kernel_of(group_size, 48, 64)
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    bias = torch.randn(48, dtype=torch.bfloat16)

    kernel.process_weights_after_loading(layer)
    y = kernel.apply_weights(layer, x, bias)

    product = x.float() @ dequantize(weight, torch.float32).t()
    expected = (product + bias).to(torch.bfloat16)
    assert torch.equal(y, expected)

    # Control: one other value of the weight is another result.
    layer.weight_packed[0, 0] += 1
    kernel.process_weights_after_loading(layer)
    assert not torch.equal(kernel.apply_weights(layer, x, bias), expected)


def test_it_refuses_weights_of_eight_bits():
    eight_bits = portable_engine.MPLinearLayerConfig(
        (64, 48), (64, 48), portable_engine.scalar_types.uint8b128, torch.bfloat16, -1, False
    )

    can, reason = portable_engine.Float32LinearKernel.can_implement(eight_bits)

    assert not can
    assert "of 4 bits" in reason
