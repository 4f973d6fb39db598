"""`qarl_trl.quant.quantize`: equal, bit for bit, to the definition written out and to llm-compressor's own output."""

from pathlib import Path

import pytest
import references
import torch
from safetensors import safe_open

from qarl_trl.quant import quantize as quantize_module
from qarl_trl.quant import quantize_weight, resolve_scheme
from quant.schemes import (
    ALL_SCHEMES,
    NAMES,
    NVFP4,
    SCHEMES,
    by_definition,
    normal,
    same_bytes,
    same_tensors,
)


GOLDEN = Path(__file__).parents[1] / "golden" / "quantize.safetensors"


def stored(weight, scheme, group_size):
    """The tensors of a quantized weight."""
    return quantize_weight(weight, resolve_scheme(scheme, group_size)).tensors


def shapes_and_dtypes(tensors):
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def address(tensor):
    return tensor.untyped_storage().data_ptr()


@pytest.fixture(scope="module")
def golden():
    with safe_open(GOLDEN, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


# The definition -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scheme", "group_size"), ALL_SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.02, 30.0])
def test_quantized_values_and_scales_are_those_of_the_definition(scheme, group_size, dtype, scale):
    # Rows are slow in pure Python, so a whole block only where one is needed. 24 fill three words of zero points.
    rows = 128 if scheme == "FP8_BLOCK" else 24
    # Off centre, so that asymmetric schemes have zero points other than 0.
    weight = (normal(rows, 256, seed=1) * scale + scale / 3).to(dtype)

    assert same_tensors(stored(weight, scheme, group_size), by_definition(weight, scheme, group_size))


@pytest.mark.parametrize(("scheme", "group_size"), ALL_SCHEMES)
def test_tensors_without_values_are_those_with_values(scheme, group_size):
    # 384 rows are three blocks, so that a scale a block can be told from a scale a row.
    with_values = stored(normal(384, 256), scheme, group_size)

    without = quantize_module.meta_tensors(resolve_scheme(scheme, group_size), 384, 256)

    assert shapes_and_dtypes(without) == shapes_and_dtypes(with_values)


@pytest.mark.parametrize(("scheme", "group_size"), ALL_SCHEMES)
def test_float32_and_bfloat16_master_weights_give_the_same_bytes(scheme, group_size, monkeypatch):
    master = normal(128, 256, seed=3)
    resolved = resolve_scheme(scheme, group_size)

    from_float32 = quantize_weight(master, resolved)
    from_bfloat16 = quantize_weight(master.bfloat16(), resolved)

    assert same_tensors(from_float32.tensors, from_bfloat16.tensors)

    # Control: after another cast some quantized values flip.
    # A cast that keeps three bits more.
    monkeypatch.setattr(quantize_module, "MASTER_CAST_DTYPE", torch.float16)
    assert not same_bytes(quantize_weight(master, resolved).quantized, from_bfloat16.quantized)


@pytest.mark.parametrize(("scheme", "group_size"), ALL_SCHEMES)
def test_tensors_are_sorted_and_whole(scheme, group_size):
    low_bit = quantize_weight(torch.randn(128, 256), resolve_scheme(scheme, group_size))

    assert list(low_bit.tensors) == sorted(low_bit.tensors)
    assert low_bit.shape == (128, 256)
    for name, tensor in low_bit.tensors.items():
        assert tensor.is_contiguous(), name


@pytest.mark.parametrize(("scheme", "group_size"), ALL_SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_master_is_neither_changed_nor_shared(scheme, group_size, dtype):
    weight = normal(128, 256, dtype=dtype)
    before = weight.clone()

    tensors = stored(weight, scheme, group_size)

    assert torch.equal(weight, before)
    for name, tensor in tensors.items():
        # Also of a bfloat16 master, whose cast is no copy.
        assert address(tensor) != address(weight), name
        assert not tensor.requires_grad, name


# Golden vectors -----------------------------------------------------------------------------------------------------


def master_of(golden, scheme):
    """What `tests/golden/make.py` gave to llm-compressor."""
    if scheme in ("FP8_BLOCK", NVFP4):
        # Rows that blocks of 128 divide, and for a global scale rows that one of them does not dwarf.
        return golden["blocks"]
    if scheme in ("W4A16", "FP8_DYNAMIC"):
        return golden["master"]
    return torch.cat((golden["master"], golden["shifted"]))


def golden_tensors(golden, scheme, group_size):
    """What llm-compressor made of it."""
    prefix = f"{scheme}."
    if group_size is not None:
        label = "channel" if group_size == -1 else group_size
        prefix = f"{scheme}-{label}."

    tensors = {}
    for name, tensor in golden.items():
        if name.startswith(prefix):
            tensors[name.removeprefix(prefix)] = tensor
    return tensors


@pytest.mark.parametrize(("scheme", "group_size"), ALL_SCHEMES)
def test_awkward_weights_give_the_bytes_of_llm_compressor(golden, scheme, group_size):
    """`tests/golden/make.py` lists the rows: zeros, outliers, ties, denormals, huge values, values of -8, one sign."""
    weight = master_of(golden, scheme)
    expected = golden_tensors(golden, scheme, group_size)
    # The golden rows are cut out of a larger layer, so their file holds no shape.
    if scheme in ("W4A16", "W4A16_ASYM", "W8A16", "W4AFP8"):
        expected["weight_shape"] = torch.tensor(weight.shape)

    # Control: a prefix that matches nothing would compare nothing.
    assert len(expected) >= 2
    assert same_tensors(stored(weight, scheme, group_size), expected)
    # The reference of the tests agrees.
    assert same_tensors(by_definition(weight, scheme, group_size), expected)


def test_the_golden_rows_are_not_ordinary(golden):
    """The control of the test above."""
    scales = golden["W4A16-128.weight_scale"]
    smallest_normal = torch.finfo(torch.bfloat16).tiny
    # Rows of zeros get the smallest scale, and tiny weights a denormal one.
    assert (scales == torch.finfo(torch.bfloat16).eps).sum() > 1
    assert ((scales > 0) & (scales < smallest_normal)).any()
    assert golden["master"].abs().max() > 1e37

    int4 = torch.tensor(references.unpack_int4(golden["W4A16-128.weight_packed"], 128))
    assert int4.unique().numel() == 16
    zero_points = references.unpack_int4(golden["W4A16_ASYM-128.weight_zero_point"].t(), 24)
    # From rows of one sign to rows of the other.
    assert {-8, 0, 7} < set(zero_points[0])

    float8 = golden["FP8_DYNAMIC.weight"].view(torch.uint8)
    # A negative zero among the stored bytes.
    assert (float8 == 0x80).any()

    octets = golden["NVFP4A16.weight_packed"]
    assert torch.cat((octets & 15, octets >> 4)).unique().numel() == 16
    float4_scales = golden["NVFP4A16.weight_scale"].view(torch.uint8)
    assert (float4_scales == references.FLOAT8_EPS).sum() > 1000


# Refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scheme", "group_size"), SCHEMES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_diverged_weight_is_refused(scheme, group_size, value):
    weight = torch.randn(128, 256)
    # Not in the first group or block of its row.
    weight[2, 200] = value
    resolved = resolve_scheme(scheme, group_size)

    with pytest.raises(ValueError, match=r"must be finite, got NaN or infinity.*checkpoint.*learning rate"):
        quantize_weight(weight, resolved)


@pytest.mark.parametrize("scheme", [*NAMES, NVFP4])
def test_a_weight_without_rows_has_no_quantized_values(scheme):
    tensors = stored(torch.empty(0, 256), scheme, None)

    for name, tensor in tensors.items():
        if name not in ("weight_shape", "weight_global_scale"):
            assert tensor.numel() == 0, name


@pytest.mark.parametrize(
    ("shape", "words"),
    [((128,), "must be a matrix"), ((2, 4, 128), "must be a matrix"), ((4, 132), "in must be a multiple of 8")],
)
def test_what_is_not_a_matrix_of_whole_words_is_refused(shape, words):
    with pytest.raises(ValueError, match=words):
        quantize_weight(torch.randn(shape), resolve_scheme("W4A16"))


# Parts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scheme", "group_size"), SCHEMES)
def test_parts_of_the_rows_are_weights_of_their_own(scheme, group_size):
    resolved = resolve_scheme(scheme, group_size)
    weight = normal(384, 256)

    parts = quantize_weight(weight, resolved).split(128)

    assert len(parts) == 3
    for part, rows in zip(parts, weight.split(128), strict=True):
        assert part.shape == (128, 256)
        assert same_tensors(part.tensors, quantize_weight(rows, resolved).tensors)
    # Control: the parts differ.
    assert not same_tensors(parts[0].tensors, parts[1].tensors)


@pytest.mark.parametrize(
    ("scheme", "out", "rows"),
    [
        # No whole parts, a word of eight zero points in two, a block in two, and a global scale.
        ("W4A16", 12, 5),
        ("W4A16_ASYM", 14, 7),
        ("FP8_BLOCK", 384, 96),
        ("NVFP4A16", 16, 8),
    ],
)
def test_parts_that_share_something_are_refused(scheme, out, rows):
    low_bit = quantize_weight(normal(out, 256), resolve_scheme(scheme))

    with pytest.raises(ValueError, match=rf"{out} rows .* cannot be split into {rows} each"):
        low_bit.split(rows)
