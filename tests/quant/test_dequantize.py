"""`dequantize` of `qarl_trl.quant.quantize`: the numbers that quantized values stand for, and how often they are computed."""

import pytest
import references
import torch

from qarl_trl.quant import quantize_weight, resolve_scheme
from qarl_trl.quant.quantize import dequantize
from quant.schemes import (
    ALL_SCHEMES,
    SCHEMES,
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
