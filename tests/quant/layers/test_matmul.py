"""`qarl_trl.quant.layers.matmul`: the straight-through gradients, and what is kept for the backward."""

import pytest
import references
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from qarl_trl.quant import apply_quantization, low_bit_store
from qarl_trl.quant.quantize import dequantize
from quant.schemes import NAMES, relative_error
from quant.toy_layers import (
    OUT,
    make_gradient,
    make_input,
    make_layer,
    multiplied_weight,
    quantized_input,
    record_quantizations,
)


# Gradients ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", NAMES)
def test_gradients_are_the_straight_through_ones(scheme):
    layer = make_layer(scheme, bias=True)
    x = make_input(7)
    grad = make_gradient(7)

    # A leaf, because `x` itself is quantized below.
    leaf = x.clone().requires_grad_()
    (layer(leaf) * grad).sum().backward()

    multiplied_x = quantized_input(scheme, x)
    expected_x, expected_weight = references.straight_through(multiplied_x, multiplied_weight(layer), grad)
    # Measured 1e-7: float32 sums against float64.
    assert relative_error(leaf.grad, expected_x) < 1e-6
    assert relative_error(layer.weight.grad, expected_weight) < 1e-6
    assert torch.allclose(layer.bias.grad, grad.sum(0), rtol=0, atol=1e-5)

    # Control: a gradient through the high-precision weight.
    through_master, _ = references.straight_through(multiplied_x, layer.weight.detach(), grad)
    assert relative_error(through_master, expected_x) > 0.005


def test_gradient_of_the_input_goes_through_the_low_bit_weight_of_the_forward():
    """Also when the master changes between forward and backward."""
    layer = make_layer()
    x = make_input(4).requires_grad_()
    weight_of_forward = dequantize(layer.low_bit(), torch.float32)
    grad = torch.ones(4, OUT)

    y = layer(x)
    with torch.no_grad():
        # As an optimizer step between a forward and its backward would.
        layer.weight.mul_(3.0)
    y.backward(grad)

    assert torch.equal(x.grad, grad @ weight_of_forward)

    # Control: the weight that a forward would take now.
    weight_now = dequantize(layer.low_bit(), torch.float32)
    assert not torch.equal(x.grad, grad @ weight_now)


# Memory -------------------------------------------------------------------------------------------------------------


def bytes_kept_for_backward(module, x):
    """Bytes of the tensors that autograd keeps for the backward of a forward in bfloat16, besides parameters."""
    parameters = {param.untyped_storage().data_ptr() for param in module.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        # By storage, because autograd keeps several views of one tensor.
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = tensor
        return tensor

    def unpack(tensor):
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack), torch.autocast("cpu", torch.bfloat16):
        module(x)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def wide_model(scheme=None):
    """Two linear layers, wide enough that weights outweigh the activations of eight tokens; `None`: high precision."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.SiLU(), nn.Linear(512, 512, bias=False))
    if scheme is None:
        return model
    return apply_quantization(model, scheme)


@pytest.mark.parametrize("scheme", ["W4A16", "FP8_DYNAMIC", "W4A8"])
def test_nothing_of_the_size_of_a_weight_is_kept_for_the_backward(scheme):
    x = torch.randn(8, 512, requires_grad=True)
    bytes_of_weights = 2 * 512 * 512 * 2  # bfloat16, both layers

    low_bit = bytes_kept_for_backward(wide_model(scheme), x)
    plain = bytes_kept_for_backward(wide_model(), x)

    assert low_bit < 0.03 * bytes_of_weights  # the inputs: 24 of 1024 KiB
    # Control: under autocast a plain Linear keeps its weight's bfloat16 cast.
    assert plain > bytes_of_weights


def run_under_autocast(model, forward, x):
    """Output of `forward`, and gradients by input and weights of `model`."""
    model.zero_grad()
    leaf = x.clone().requires_grad_()

    with torch.autocast("cpu", torch.bfloat16):
        y = forward(leaf)
    y.float().square().sum().backward()
    return y, leaf.grad, model[0].weight.grad, model[2].weight.grad


@pytest.mark.parametrize("scheme", ["W4A16", "W8A8"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_equal_gradients_and_quantizes_no_more(scheme, reentrant, monkeypatch):
    calls = record_quantizations(monkeypatch)
    model = wide_model(scheme)
    x = torch.randn(8, 512)
    low_bit_store(model).follow(torch.optim.SGD(model.parameters()))

    plain = run_under_autocast(model, model, x)
    checkpointed = run_under_autocast(model, lambda leaf: checkpoint(model, leaf, use_reentrant=reentrant), x)

    for expected, tensor in zip(plain, checkpointed, strict=True):
        assert torch.equal(tensor, expected)
    # Two layers, once each: the recomputed forward takes what is kept.
    assert len(calls) == 2
