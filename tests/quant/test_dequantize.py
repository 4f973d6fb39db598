"""`dequantize` of `qarl_trl.quant.quantize`: the numbers that quantized values stand for."""

import pytest
import references
import torch

from qarl_trl.quant.quantize import dequantize
from quant.schemes import ALL_SCHEMES, SCHEMES, copies, decompressed, low_bit_of, same_bytes, same_tensors


def rows_of(low_bit):
    """Integers, scales and zero points (or `None`) as rows of Python numbers, by the definition of the layout."""
    tensors = low_bit.tensors

    # By `references`, which share no code with the package.
    quantized = low_bit.quantized.tolist()
    if "weight_packed" in tensors:
        width = tensors["weight_shape"][1].item()
        quantized = references.unpack_int(low_bit.quantized, low_bit.scheme.weights.num_bits, width)

    zero_points = None
    if "weight_zero_point" in tensors:
        # Zero points are packed along the rows, eight rows to a word, so they come out by column.
        columns = references.unpack_int4(tensors["weight_zero_point"].t(), len(quantized))
        zero_points = [list(row) for row in zip(*columns, strict=True)]
    return quantized, low_bit.scale.tolist(), zero_points


@pytest.mark.parametrize(("scheme", "group_size"), ALL_SCHEMES)
def test_dequantize_is_the_decompression_of_compressed_tensors(scheme, group_size):
    low_bit = low_bit_of(scheme, group_size)

    matrix = dequantize(low_bit)

    assert matrix.dtype == torch.bfloat16
    assert same_bytes(matrix, decompressed(low_bit))
    # A second oracle, which the library has no part in.
    if low_bit.scheme.weights.type == "int":
        assert torch.equal(matrix, references.dequantize_rows(*rows_of(low_bit)))


@pytest.mark.parametrize(("scheme", "group_size"), SCHEMES)
def test_a_wider_dtype_gets_the_same_numbers_in_new_storage(scheme, group_size):
    """Quantized values times scale round to bfloat16 first."""
    low_bit = low_bit_of(scheme, group_size)
    before = copies(low_bit.tensors.items())

    wide = dequantize(low_bit, torch.float32)

    assert wide.dtype == torch.float32
    assert torch.equal(wide, dequantize(low_bit).float())
    # New storage: a write to the matrix reaches no stored tensor.
    wide.zero_()
    assert same_tensors(low_bit.tensors, before)
