"""`qarl_trl.quant.linear`: the forward's numbers, the straight-through gradient, and when quantized values are made anew."""

from functools import partial

import pytest
import references
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from qarl_trl.quant import activations, apply_quantization, low_bit_store, quantize_weight, store
from qarl_trl.quant.gemm import dequantize
from qarl_trl.quant.scheme import support_of
from quant.schemes import NAMES, WEIGHT_ONLY, relative_error


OUT = 128  # a block of FP8_BLOCK


def make_model(scheme="W4A16", bias=False, dtype=torch.float32, seed=0, **options):
    """A model of one low-bit layer, 128 to `OUT`."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(128, OUT, bias=bias).to(dtype))
    return apply_quantization(model, scheme, **options)


@pytest.fixture
def make_layer(request):
    """Makes low-bit layers whose models live until the test ends."""
    models = []

    def make(*args, **options):
        models.append(make_model(*args, **options))
        return models[-1][0]

    return make


def make_input(*shape, dtype=torch.float32, seed=1):
    return torch.randn(*shape, 128, generator=torch.Generator().manual_seed(seed)).to(dtype)


def used_input(scheme, x):
    """What a layer multiplies in the place of `x`, float32."""
    if scheme in WEIGHT_ONLY:
        return x
    flat = x.flatten(0, -2)
    quantize = {
        "FP8_DYNAMIC": activations.quantize_tokens_fp8,
        "W4AFP8": activations.quantize_tokens_fp8,
        "FP8_BLOCK": activations.quantize_groups_fp8,
        "W8A8": activations.quantize_tokens_int8,
        "W4A8": lambda flat: activations.quantize_tokens_int8_asymmetric(flat.bfloat16()),
    }[scheme]
    quantized, scale = quantize(flat)  # of 128 inputs: one group
    return (quantized.float() * scale).view(x.shape)


def used_weight(layer):
    """What a layer multiplies by, float32: the dequantized weight, but in W4AFP8 a table of float8 numbers."""
    low_bit = layer.low_bit()
    if support_of(layer.scheme).name == "W4AFP8":
        table, scale = references.int4_float8_table(
            references.unpack_int4(low_bit.quantized, layer.in_features), low_bit.scale.tolist()
        )
        return table * scale
    return dequantize(low_bit, torch.float32)


# Forward ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", WEIGHT_ONLY)
@pytest.mark.parametrize("bias", [False, True])
def test_forward_multiplies_by_the_dequantized_weight(scheme, bias, make_layer):
    layer, x = make_layer(scheme, bias=bias), make_input(2, 5)
    expected = F.linear(x, dequantize(layer.low_bit(), torch.float32))
    assert torch.equal(layer(x), expected + layer.bias if bias else expected)
    assert not torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))  # control: the master


@pytest.mark.parametrize("scheme", NAMES)
@pytest.mark.parametrize("bias", [False, True])
def test_autocast_computes_in_bfloat16(scheme, bias, make_layer):
    layer, x = make_layer(scheme, bias=bias), make_input(3)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    with torch.no_grad():
        expected, _ = layer.gemm.forward(x.bfloat16(), layer.low_bit(), layer.bias.bfloat16() if bias else None)
    assert torch.equal(y, expected)
    assert layer(x).dtype == torch.float32  # control: outside of autocast


def test_without_a_quantized_forward_the_layer_is_a_plain_linear(make_layer):
    layer, x = make_layer(bias=True, quantize_forward=False), make_input(3)
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    assert layer.gemm is None
    low_bit = quantize_weight(layer.weight, layer.scheme)
    assert torch.equal(layer.low_bit().quantized, low_bit.quantized)  # sync and export still have quantized values


# Gradients ----------------------------------------------------------------------------------------------------------


def gradients(layer, x, grad):
    """Gradients by input, weight and bias of `sum(grad * layer(x))`."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    (layer(x) * grad).sum().backward()
    return x.grad, layer.weight.grad, None if layer.bias is None else layer.bias.grad


@pytest.mark.parametrize("scheme", NAMES)
def test_gradients_are_the_straight_through_ones(scheme, make_layer):
    layer, x = make_layer(scheme, bias=True), make_input(7)
    grad = torch.randn(7, OUT, generator=torch.Generator().manual_seed(2))
    grad_x, grad_weight, grad_bias = gradients(layer, x, grad)
    used, low_bit_weight = used_input(scheme, x), used_weight(layer)
    expected_x, expected_weight = references.straight_through(used, low_bit_weight, grad)
    # Measured 1e-7: float32 sums against float64.
    assert relative_error(grad_x, expected_x) < 1e-6
    assert relative_error(grad_weight, expected_weight) < 1e-6
    assert torch.allclose(grad_bias, grad.sum(0), rtol=0, atol=1e-5)

    # Control: a gradient through the high-precision weight.
    assert relative_error(references.straight_through(used, layer.weight.detach(), grad)[0], expected_x) > 0.005


def test_gradient_of_the_input_goes_through_the_low_bit_weight_of_the_forward(make_layer):
    """Also when the master changes between forward and backward."""
    layer, x = make_layer(), make_input(4).requires_grad_()
    low_bit_weight = dequantize(layer.low_bit(), torch.float32)
    y = layer(x)
    with torch.no_grad():
        layer.weight.mul_(3.0)
    y.backward(torch.ones_like(y))
    assert torch.equal(x.grad, torch.ones(4, OUT) @ low_bit_weight)
    assert not torch.equal(x.grad, torch.ones(4, OUT) @ dequantize(layer.low_bit(), torch.float32))  # control


# When quantized values are made ------------------------------------------------------------------------------------------------


@pytest.fixture
def quantizations(monkeypatch):
    """Counts the calls of the quantizer that the layers make."""
    calls = []
    original = store.quantize_weight
    monkeypatch.setattr(store, "quantize_weight", lambda *args: calls.append(1) or original(*args))
    return calls


def test_a_layer_is_quantized_once_per_optimizer_step(quantizations, make_layer):
    layer = make_layer()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    layer.store.follow(optimizer)
    for step in range(1, 4):
        for _ in range(3):  # accumulation, old log-probs
            layer(make_input(2)).sum().backward()
            layer.low_bit()
        assert layer.low_bit() is layer.store.kept()["0.weight"]
        assert len(quantizations) == step
        optimizer.step()


def test_a_store_that_nobody_tells_of_steps_keeps_nothing_that_is_trained(quantizations, make_layer):
    """An optimizer may write through an alias of the parameter, which leaves no trace."""
    layer = make_layer()
    before = layer.low_bit()
    layer.weight.data.mul_(-1)
    assert not torch.equal(layer.low_bit().quantized, before.quantized)
    assert len(quantizations) == 2

    layer.weight.requires_grad_(False)
    assert layer.low_bit() is layer.low_bit()  # control: what is not trained is kept


def test_sync_and_file_take_the_weights_as_they_are(quantizations, make_layer):
    """Also after a write through `.data`, as averages of weights (EMA) are written."""
    layer = make_layer()
    layer.store.follow(torch.optim.SGD(layer.parameters(), lr=0.1))
    before = layer.low_bit()
    layer.weight.data.mul_(-1)
    assert layer.low_bit() is before  # control: the write leaves no trace

    sent = dict(layer.store.tensors())
    assert torch.equal(sent["0.weight_packed"], quantize_weight(layer.weight, layer.scheme).quantized)
    assert layer.low_bit().quantized is sent["0.weight_packed"]  # the next forward uses what was sent


def changed_by_optimizer(layer, **options):
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1.0, **options)
    layer.store.follow(optimizer)
    layer(make_input(2)).sum().backward()
    optimizer.step()


def changed_in_place(layer):
    with torch.no_grad():
        layer.weight.add_(torch.randn_like(layer.weight))


def changed_to_a_new_parameter_in_the_old_place(layer):
    """As when FSDP gathers the whole parameter where one was that had not been loaded; of equal version, too."""
    old = layer.weight
    layer.weight = nn.Parameter(old.data)
    with torch.no_grad():
        while layer.weight._version < old._version:
            layer.weight.normal_()
    assert (layer.weight.data_ptr(), layer.weight._version) == (old.data_ptr(), old._version) != (old.data_ptr(), 0)


@pytest.mark.parametrize(
    "change",
    [
        changed_to_a_new_parameter_in_the_old_place,
        changed_by_optimizer,
        partial(changed_by_optimizer, fused=True),
        changed_in_place,
        lambda layer: layer.load_state_dict({"weight": torch.randn(OUT, 128)}),
        lambda layer: setattr(layer.weight, "data", torch.randn(OUT, 128)),
        lambda layer: setattr(layer, "weight", nn.Parameter(torch.randn(OUT, 128))),
    ],
)
def test_quantized_follow_the_master(change):
    model = make_model()
    layer = model[0]
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1.0)
    low_bit_store(model).follow(optimizer)
    before = layer.low_bit()
    change(layer)
    assert torch.equal(layer.low_bit().quantized, quantize_weight(layer.weight, layer.scheme).quantized)
    assert not torch.equal(layer.low_bit().quantized, before.quantized)  # control: the change was large enough to see
    expected = F.linear(make_input(2), dequantize(layer.low_bit(), torch.float32))
    assert torch.equal(layer(make_input(2)), expected)


# Memory -------------------------------------------------------------------------------------------------------------


def saved_bytes(module, x):
    """What autograd keeps for the backward besides parameters, in bytes by dtype."""
    kept, parameters = {}, {p.untyped_storage().data_ptr() for p in module.parameters()}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    return sum(t.untyped_storage().nbytes() for t in kept.values()), y


def block(quantized, scheme="W4A16"):
    """Two linear layers, wide enough that their weights outweigh the activations of eight tokens."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.SiLU(), nn.Linear(512, 512, bias=False))
    return apply_quantization(model, scheme) if quantized else model


@pytest.mark.parametrize("scheme", ["W4A16", "FP8_DYNAMIC", "W4A8"])
def test_nothing_of_the_size_of_a_weight_is_kept_for_the_backward(scheme):
    x = torch.randn(8, 512, requires_grad=True)
    one_copy = 2 * 512 * 512 * 2  # bfloat16, both layers
    quantized, _ = saved_bytes(block(True, scheme), x)
    plain, _ = saved_bytes(block(False), x)
    assert quantized < 0.03 * one_copy  # the inputs: 24 of 1024 KiB
    assert plain > one_copy  # control: under autocast a plain Linear keeps its weight's bfloat16 cast


@pytest.mark.parametrize("scheme", ["W4A16", "W8A8"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_equal_gradients_and_quantizes_no_more(quantizations, scheme, reentrant):
    model, x = block(True, scheme), torch.randn(8, 512)
    low_bit_store(model).follow(torch.optim.SGD(model.parameters()))

    def run(forward):
        model.zero_grad()
        start = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = forward(start)
        y.float().square().sum().backward()
        return y, start.grad, model[0].weight.grad, model[2].weight.grad

    plain = run(model)
    again = run(lambda start: checkpoint(model, start, use_reentrant=reentrant))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert len(quantizations) == 2
