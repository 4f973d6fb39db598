"""`dequantize` of `qarl_trl.quant.quantize`: the numbers that quantized values stand for, and how often they are computed."""

import copy
import weakref

import pytest
import references
import torch
from conftest import make_model
from torch import nn
from torch.utils.checkpoint import checkpoint

from qarl_trl.quant import apply_quantization, quantize_weight, quantized_modules, resolve_scheme
from qarl_trl.quant import quantize as quantize_module
from qarl_trl.quant.gemm import Int4Fp8Gemm
from qarl_trl.quant.quantize import dequantize
from qarl_trl.quant.scheme import DEFAULT_IGNORE
from quant.schemes import (
    ALL_SCHEMES,
    NAMES,
    NVFP4,
    SCHEMES,
    WEIGHT_ONLY,
    decompressed,
    low_bit_of,
    normal,
    relative_error,
    same_bytes,
)


# Numbers ------------------------------------------------------------------------------------------------------------


def rows_of(low_bit):
    """Integer quantized values, scales and zero points (or `None`) as rows of Python numbers, by the definition of the layout."""
    tensors, bits = low_bit.tensors, low_bit.scheme.weights.num_bits
    quantized = low_bit.quantized.tolist()
    if "weight_packed" in tensors:
        width = tensors["weight_shape"][1].item()
        quantized = references.unpack_int(low_bit.quantized, bits, width)
    zero_points = None
    if "weight_zero_point" in tensors:
        columns = references.unpack_int4(tensors["weight_zero_point"].t(), len(quantized))
        zero_points = [list(row) for row in zip(*columns, strict=True)]
    return quantized, low_bit.scale.tolist(), zero_points


@pytest.mark.parametrize(("scheme", "group_size"), ALL_SCHEMES)
def test_dequantize_is_the_decompression_of_compressed_tensors(scheme, group_size):
    low_bit = low_bit_of(scheme, group_size)
    found = dequantize(low_bit)
    assert found.dtype == torch.bfloat16
    assert same_bytes(found, decompressed(low_bit))
    if low_bit.scheme.weights.type == "int":
        assert torch.equal(found, references.dequantize_rows(*rows_of(low_bit)))


@pytest.mark.parametrize(("scheme", "group_size"), SCHEMES)
def test_a_wider_dtype_gets_the_same_numbers(scheme, group_size):
    """Quantized values times scale round to bfloat16 first; the control multiplies in float32 and gets others."""
    low_bit = low_bit_of(scheme, group_size)
    wide = dequantize(low_bit, torch.float32)
    assert wide.dtype == torch.float32
    assert torch.equal(wide, dequantize(low_bit).float())
    unrounded = low_bit.quantized.float()
    if low_bit.scheme.weights.type == "int":
        quantized, _, zero_points = rows_of(low_bit)
        unrounded = torch.tensor(quantized).float()
        if zero_points is not None:
            unrounded -= torch.tensor(zero_points).repeat_interleave(256 // low_bit.scale.shape[1], dim=1)
    scale = low_bit.scale.float()
    for dim in (0, 1):
        scale = scale.repeat_interleave(unrounded.shape[dim] // scale.shape[dim], dim=dim)
    assert not torch.equal(wide, unrounded * scale)
    assert relative_error(wide, unrounded * scale) < 2**-8  # half a step of bfloat16's eight bits


@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM", "W8A16"])
def test_a_padded_width_is_cut_back(scheme):
    low_bit = low_bit_of(scheme, -1, shape=(5, 18))
    assert torch.equal(dequantize(low_bit), references.dequantize_rows(*rows_of(low_bit)))


@pytest.mark.parametrize(("scheme", "group_size"), SCHEMES)
def test_dequantizing_leaves_the_quantized_alone(scheme, group_size):
    low_bit = low_bit_of(scheme, group_size)
    before = {name: tensor.clone() for name, tensor in low_bit.tensors.items()}
    dequantize(low_bit).zero_()
    assert all(same_bytes(tensor, before[name]) for name, tensor in low_bit.tensors.items())


@pytest.mark.parametrize(
    ("scheme", "group_size", "error"),
    [
        # Measured 0.095, 0.111, 0.119, 0.081, 0.0075, 0.0079, 0.027, 0.027, 0.0079, 0.111 on normal weights: a rounding
        # step over the square root of 12.
        ("W4A16", 32, 0.11),
        ("W4A16", 128, 0.13),
        ("W4A16", -1, 0.14),
        ("W4A16_ASYM", 32, 0.10),
        ("W8A16", 128, 0.008),
        ("W8A16", -1, 0.009),
        ("FP8_DYNAMIC", None, 0.03),
        ("FP8_BLOCK", None, 0.03),
        ("W8A8", None, 0.009),
        ("W4A8", 128, 0.13),
    ],
)
def test_the_dequantized_weight_is_near_the_master(scheme, group_size, error):
    weight = normal(128, 256)
    found = relative_error(dequantize(quantize_weight(weight, resolve_scheme(scheme, group_size))), weight)
    assert 0.7 * error < found < error


# How often ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def made(monkeypatch):
    """The shapes of what was dequantized, one for each time."""
    shapes, decoded, table = [], quantize_module._decoded, Int4Fp8Gemm._table
    monkeypatch.setattr(
        quantize_module, "_decoded", lambda weight, dtype: shapes.append(weight.shape) or decoded(weight, dtype)
    )
    monkeypatch.setattr(Int4Fp8Gemm, "_table", lambda self, weight: shapes.append(weight.shape) or table(self, weight))
    return shapes


def layers(scheme, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.SiLU(), nn.Linear(256, 128))
    return apply_quantization(model, scheme, **options)


def batch(model, x, dtype=torch.bfloat16, recomputed=True):
    """One micro-batch: what comes out, and the gradients so far."""
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        y = checkpoint(model, x, use_reentrant=False) if recomputed else model(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scheme", [*NAMES, NVFP4])
def test_a_kept_matrix_is_made_once_a_step_with_the_same_results(made, scheme, dtype):
    x = normal(8, 128)
    fresh, keeping = layers(scheme), layers(scheme, keep_dequantized=True)
    expected = [batch(fresh, x, dtype), batch(fresh, 2 * x, dtype)]
    # Forward, recomputation and backward of two micro-batches; where activations are quantized, mostly the backward's alone.
    times = 6 if scheme in (*WEIGHT_ONLY, NVFP4, "W4AFP8") else 2
    assert len(made) == 2 * times
    made.clear()
    found = [batch(keeping, x, dtype), batch(keeping, 2 * x, dtype)]
    assert sorted(made) == [(128, 256), (256, 128)]
    for a, b in zip(found, expected, strict=True):
        assert all(map(same_bytes, a, b))
    other = layers(scheme, keep_dequantized=True)
    with torch.no_grad():
        other[0].weight.neg_()
    assert not same_bytes(batch(other, x, dtype)[0], expected[0][0])  # control


def test_it_is_kept_in_two_bytes_a_weight_and_freed_with_the_quantized(made):
    model, x = layers("W4A16", keep_dequantized=True), normal(8, 128)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    batch(model, x)
    kept = [layer.last_low_bit.prepared["dequantized"] for _, layer in quantized_modules(model)]
    assert sum(t.nbytes for t in kept) == 2 * sum(layer.weight.numel() for _, layer in quantized_modules(model))
    before, alive = kept[0].clone(), [weakref.ref(t) for t in kept]
    del kept
    assert all(ref() is not None for ref in alive)  # control: for as long as the quantized values live
    optimizer.step()
    for _, layer in quantized_modules(model):
        layer.low_bit()  # as a weight sync does
    assert all(ref() is None for ref in alive)
    made.clear()
    batch(model, x)
    after = model[0].last_low_bit
    assert len(made) == 2
    assert not torch.equal(after.prepared["dequantized"], before)  # control: the step changed it
    assert torch.equal(after.prepared["dequantized"], dequantize(quantize_weight(model[0].weight, model[0].scheme)))


def test_without_it_nothing_is_kept(made):
    model = layers("W4A16")
    batch(model, normal(8, 128))
    assert all(not layer.last_low_bit.prepared for _, layer in quantized_modules(model))
    twin = copy.deepcopy(layers("W4A16", keep_dequantized=True))
    made.clear()
    batch(twin, normal(8, 128))
    assert len(made) == 2  # a copy keeps too


def test_experts_keep_one_matrix_a_parameter(made):
    def model(**options):
        return apply_quantization(make_model("qwen3_moe"), "W4A16", ignore=[*DEFAULT_IGNORE, "re:.*attn.*"], **options)

    tokens = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 3]])
    losses, gradients = [], []
    for options, times in (({}, 2), ({"keep_dequantized": True}, 1)):
        made.clear()
        ours = model(**options)
        logits = ours(tokens).logits
        logits.square().sum().backward()
        losses.append(logits.detach())
        gradients.append([p.grad for p in ours.parameters() if p.grad is not None])
        assert len(made) == times * 2 * sum(1 for _ in quantized_modules(ours))
    assert torch.equal(*losses)
    assert all(map(torch.equal, *gradients))
