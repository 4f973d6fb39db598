"""`qarl_trl.quant.quantize`: equal, bit for bit, to the definition written out and to llm-compressor's own output."""

from pathlib import Path

import pytest
import references
import torch
from safetensors import safe_open
from torch import nn

from qarl_trl.quant import apply_quantization, iter_low_bit_weights, quantize_weight, resolve_scheme
from qarl_trl.quant import quantize as quantize_module


GOLDEN = Path(__file__).parents[1] / "golden" / "quantize.safetensors"
SCHEMES = [("W4A16", 32), ("W4A16", 64), ("W4A16", 128), ("W4A16", -1), ("FP8_DYNAMIC", None)]


def same_bytes(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def by_definition(weight, scheme, group_size):
    """Codes as stored, and scales."""
    if scheme == "FP8_DYNAMIC":
        return references.quantize_float8(weight)
    codes, scales = references.quantize_int4(weight, None if group_size == -1 else group_size)
    return references.pack_int4(codes), torch.tensor(scales, dtype=torch.bfloat16)


def stored(low_bit):
    """Codes and scales of a `LowBitWeight`, float8 as bytes."""
    codes = low_bit.codes
    return codes.view(torch.uint8) if codes.dtype == torch.float8_e4m3fn else codes, low_bit.scale


@pytest.fixture(scope="module")
def golden():
    with safe_open(GOLDEN, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


# The definition -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scheme", "group_size"), SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.02, 1.0, 30.0])
def test_codes_and_scales_are_those_of_the_definition(scheme, group_size, dtype, scale):
    weight = (scale * torch.randn(24, 256, generator=torch.Generator().manual_seed(1))).to(dtype)
    codes, scales = stored(quantize_weight(weight, resolve_scheme(scheme, group_size)))
    expected_codes, expected_scales = by_definition(weight, scheme, group_size)
    assert torch.equal(codes, expected_codes)
    assert same_bytes(scales, expected_scales)


def flipped(weight, scheme, group_size, divide):
    """Share of int4 codes that another arithmetic gives otherwise."""
    low_bit = quantize_weight(weight, resolve_scheme(scheme, group_size))
    codes = torch.tensor(references.unpack_int4(low_bit.codes, weight.shape[1]))
    grouped = weight.unflatten(-1, (-1, group_size))
    return (divide(grouped).round().clamp(-8, 7).flatten(-2) != codes).float().mean().item()


@pytest.mark.parametrize(
    ("divide", "share"),
    [
        # Controls: each of these plausible shortcuts rounds some codes to their neighbour.
        (lambda w: w.float() / (w.abs().amax(-1, keepdim=True) / 7.5).float(), 0.005),  # the division in float32
        (lambda w: w / (w.abs().amax(-1, keepdim=True) / 7), 0.05),  # amax / 7, the other convention
        (lambda w: (w / (w.abs().amax(-1, keepdim=True) / 7.5)).clamp(min=-7), 0.005),  # no code -8
    ],
)
def test_another_arithmetic_gives_other_codes(divide, share):
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(2)).bfloat16()
    assert flipped(weight, "W4A16", 32, lambda w: w / (w.abs().amax(-1, keepdim=True) / 7.5)) == 0
    assert flipped(weight, "W4A16", 32, divide) > share


@pytest.mark.parametrize(("scheme", "group_size"), SCHEMES)
def test_float32_and_bfloat16_masters_give_the_same_bytes(scheme, group_size, monkeypatch):
    master = torch.randn(32, 256, generator=torch.Generator().manual_seed(3))
    resolved = resolve_scheme(scheme, group_size)
    from_float32 = quantize_weight(master, resolved)
    from_bfloat16 = quantize_weight(master.bfloat16(), resolved)
    assert from_float32.tensors.keys() == from_bfloat16.tensors.keys()
    assert all(same_bytes(tensor, from_bfloat16.tensors[name]) for name, tensor in from_float32.tensors.items())

    # Control: after another cast some codes flip.
    monkeypatch.setattr(quantize_module, "MASTER_CAST_DTYPE", torch.float16)
    assert not same_bytes(quantize_weight(master, resolved).codes, from_bfloat16.codes)


def test_int4_layout_is_that_of_the_checkpoint():
    """Eight codes to a word, each plus 8, the first in the lowest four bits."""
    codes = [-8, -7, -1, 0, 1, 2, 6, 7] * 4
    weight = torch.tensor([codes]).float().clamp(min=-7.5)  # the scale is 1, and -7.5 rounds to the even -8
    low_bit = quantize_weight(weight, resolve_scheme("W4A16", 32))
    assert low_bit.scale.tolist() == [[1.0]]
    assert [word & 0xFFFFFFFF for word in low_bit.codes[0].tolist()] == [0xFEA98710] * 4
    assert references.unpack_int4(low_bit.codes, 32) == [codes]
    assert low_bit.tensors["weight_shape"].tolist() == [1, 32]


@pytest.mark.parametrize(("scheme", "group_size"), SCHEMES)
def test_tensors_have_the_names_shapes_and_dtypes_of_the_checkpoint_format(scheme, group_size):
    low_bit = quantize_weight(torch.randn(16, 256), resolve_scheme(scheme, group_size))
    groups = 1 if group_size in (-1, None) else 256 // group_size
    if scheme == "W4A16":
        expected = {
            "weight_packed": (torch.int32, (16, 32)),
            "weight_scale": (torch.bfloat16, (16, groups)),
            "weight_shape": (torch.int64, (2,)),
        }
    else:
        expected = {"weight": (torch.float8_e4m3fn, (16, 256)), "weight_scale": (torch.bfloat16, (16, 1))}
    assert {name: (t.dtype, tuple(t.shape)) for name, t in low_bit.tensors.items()} == expected
    assert low_bit.num_bytes() == sum(t.numel() * t.element_size() for t in low_bit.tensors.values())
    assert all(t.is_contiguous() for t in low_bit.tensors.values())


def test_a_width_that_is_no_multiple_of_eight_is_padded_per_channel():
    weight = torch.randn(5, 20, generator=torch.Generator().manual_seed(4))
    low_bit = quantize_weight(weight, resolve_scheme("W4A16", -1))
    codes, _ = references.quantize_int4(weight)
    assert references.unpack_int4(low_bit.codes, 20) == codes
    assert low_bit.tensors["weight_shape"].tolist() == [5, 20]


def test_the_result_shares_no_storage_with_the_master():
    weight = torch.randn(4, 128, dtype=torch.bfloat16)
    for scheme, group_size in SCHEMES:
        low_bit = quantize_weight(weight, resolve_scheme(scheme, group_size))
        pointers = {t.untyped_storage().data_ptr() for t in low_bit.tensors.values()}
        assert weight.untyped_storage().data_ptr() not in pointers
        assert not any(t.requires_grad for t in low_bit.tensors.values())


# Golden vectors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scheme", "group_size"), SCHEMES)
def test_awkward_weights_give_the_bytes_of_llm_compressor(golden, scheme, group_size):
    """`tests/golden/make.py` lists the rows: zeros, outliers, ties, denormals, huge values, codes of -8."""
    name = f"{scheme}-{'channel' if group_size == -1 else group_size}" if group_size else scheme
    low_bit = quantize_weight(golden["master"], resolve_scheme(scheme, group_size))
    for key, tensor in low_bit.tensors.items():
        if key != "weight_shape":
            assert same_bytes(tensor, golden[f"{name}.{key}"]), key
    codes, scales = by_definition(golden["master"], scheme, group_size)  # and the reference of the tests agrees
    assert torch.equal(codes, stored(low_bit)[0])
    assert same_bytes(scales, stored(low_bit)[1])


def test_the_golden_rows_hold_the_cases_they_are_named_for(golden):
    """The control: the file would prove little if its rows were all ordinary."""
    with safe_open(GOLDEN, "pt") as file:
        rows = {name: i for i, name in enumerate(file.metadata()["rows"].split("; "))}
    master = golden["master"]
    codes = torch.tensor(references.unpack_int4(golden["W4A16-128.weight_packed"], 128))
    scales = golden["W4A16-128.weight_scale"].flatten()
    assert scales[rows["zeros"]] == references.BF16_EPS == torch.finfo(torch.bfloat16).eps
    assert not codes[rows["zeros"]].any()
    assert master[rows["negative zeros"]].signbit().all()
    assert (codes[rows["one negative outlier, code -8"]] == -8).sum() == 1
    assert codes[rows["both signs of the largest"]].unique().tolist() == [-8, 7]
    assert 0 < scales[rows["denormals"]] < torch.finfo(torch.bfloat16).tiny
    assert codes[rows["denormals"]].unique().numel() > 3
    assert scales[rows["denormals whose scale is zero"]] == references.BF16_EPS
    assert master[rows["denormals whose scale is zero"]].any()
    tie = rows["ties between codes"]
    assert torch.equal(codes[tie].float(), master[tie].float().round().clamp(-8, 7))  # torch.round: half to even
    float8 = golden["FP8_DYNAMIC.weight"].view(torch.uint8)
    assert not (float8[rows["negative zeros"]] == 0x80).any()
    assert (float8[rows["small negatives that round to zero"]] == 0x80).any()  # these keep their sign
    assert golden["master"].abs().max() > 1e37


# Refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scheme", "group_size"), SCHEMES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_diverged_weight_is_refused(scheme, group_size, value):
    weight = torch.randn(4, 256)
    weight[2, 200] = value
    with pytest.raises(ValueError, match=r"shape \(4, 256\) holds NaN or infinity.*learning rate.*checkpoint"):
        quantize_weight(weight, resolve_scheme(scheme, group_size))


@pytest.mark.parametrize("shape", [(128,), (2, 4, 128)])
def test_what_is_not_a_matrix_is_refused(shape):
    with pytest.raises(ValueError, match=r"matrix \(out, in\) was needed, got shape"):
        quantize_weight(torch.randn(shape), resolve_scheme("W4A16"))


def test_a_size_that_the_group_does_not_divide_names_the_layer_and_both_remedies():
    model = nn.ModuleDict({"fits": nn.Linear(256, 8), "odd": nn.Linear(96, 8)})
    with pytest.raises(
        ValueError, match=r"'odd' has in_features=96.*group_size=128.*quant_ignore.*\[32\].*-1"
    ) as error:
        apply_quantization(model, "W4A16")
    assert "fits" not in str(error.value)
    assert type(model["fits"]) is nn.Linear  # nothing was changed
    for remedy in ({"group_size": 32}, {"group_size": -1}, {"ignore": ["odd"]}):
        model = nn.ModuleDict({"fits": nn.Linear(256, 8), "odd": nn.Linear(96, 8)})
        assert dict(iter_low_bit_weights(apply_quantization(model, "W4A16", **remedy)))
