"""`qarl_trl.quant.layers.linear`: the numbers of a low-bit layer's forward."""

import pytest
import torch
import torch.nn.functional as F

from qarl_trl.quant import quantize_weight
from qarl_trl.quant.quantize import dequantize
from quant.schemes import NAMES, WEIGHT_ONLY
from quant.toy_layers import make_input, make_layer


@pytest.mark.parametrize("scheme", WEIGHT_ONLY)
@pytest.mark.parametrize("bias", [False, True])
def test_forward_multiplies_by_the_dequantized_weight(scheme, bias):
    layer = make_layer(scheme, bias=bias)
    x = make_input(2, 5)

    y = layer(x)

    # The bias is added afterwards, as the engine adds it.
    expected = F.linear(x, dequantize(layer.low_bit(), torch.float32))
    if bias:
        expected = expected + layer.bias
    assert torch.equal(y, expected)

    # Control: the master weight gives another output.
    assert not torch.equal(y, F.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("scheme", NAMES)
@pytest.mark.parametrize("bias", [False, True])
def test_autocast_computes_in_bfloat16(scheme, bias):
    layer = make_layer(scheme, bias=bias)
    x = make_input(3)

    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)

    assert y.dtype == torch.bfloat16
    cast_bias = None
    if bias:
        cast_bias = layer.bias.bfloat16()
    with torch.no_grad():
        # The products themselves: tests/quant/gemms/test_gemm.py.
        expected, _ = layer.gemm.forward(x.bfloat16(), layer.low_bit(), cast_bias)
    assert torch.equal(y, expected)

    # Control: outside of autocast.
    assert layer(x).dtype == torch.float32


def test_without_a_quantized_forward_the_layer_is_a_plain_linear():
    layer = make_layer(bias=True, quantize_forward=False)
    x = make_input(3)

    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    assert layer.gemm is None

    # Sync and export still have quantized values.
    expected = quantize_weight(layer.weight, layer.scheme)
    assert torch.equal(layer.low_bit().quantized, expected.quantized)
