"""`qarl_trl.quant.quantize`: equal, bit for bit, to the definition written out and to llm-compressor's own output."""

from pathlib import Path

import pytest
import references
import torch
from safetensors import safe_open
from torch import nn

from qarl_trl.quant import (
    apply_quantization,
    iter_low_bit_weights,
    quantize_weight,
    resolve_scheme,
)
from qarl_trl.quant import quantize as quantize_module
from qarl_trl.quant.reference import as_blocks, as_matrix
from quant.schemes import (
    ALL_SCHEMES,
    NAMES,
    NVFP4,
    SCHEMES,
    by_definition,
    min_max_qparams,
    normal,
    same_bytes,
    same_tensors,
)


GOLDEN = Path(__file__).parents[1] / "golden" / "quantize.safetensors"


def stored(weight, scheme, group_size):
    """The tensors of a quantized weight."""
    return quantize_weight(weight, resolve_scheme(scheme, group_size)).tensors


@pytest.fixture(scope="module")
def golden():
    with safe_open(GOLDEN, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


# The definition -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scheme", "group_size"), ALL_SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.02, 30.0])
def test_quantized_and_scales_are_those_of_the_definition(scheme, group_size, dtype, scale):
    rows = 128 if scheme == "FP8_BLOCK" else 24
    weight = (normal(rows, 256, seed=1) * scale + scale / 3).to(dtype)
    assert same_tensors(stored(weight, scheme, group_size), by_definition(weight, scheme, group_size))


def flipped(weight, scheme, group_size, divide):
    """Share of int4 quantized values that another arithmetic gives otherwise."""
    low_bit = quantize_weight(weight, resolve_scheme(scheme, group_size))
    quantized = torch.tensor(references.unpack_int4(low_bit.quantized, weight.shape[1]))
    grouped = weight.unflatten(-1, (-1, group_size))
    return (divide(grouped).round().clamp(-8, 7).flatten(-2) != quantized).float().mean().item()


@pytest.mark.parametrize(
    ("divide", "share"),
    [
        # Controls: each of these plausible shortcuts rounds some quantized values to their neighbour.
        (lambda w: w.float() / (w.abs().amax(-1, keepdim=True) / 7.5).float(), 0.005),  # the division in float32
        (lambda w: w / (w.abs().amax(-1, keepdim=True) / 7), 0.05),  # amax / 7, the other convention
        (lambda w: (w / (w.abs().amax(-1, keepdim=True) / 7.5)).clamp(min=-7), 0.005),  # no code -8
    ],
)
def test_another_arithmetic_gives_other_quantized(divide, share):
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(2)).bfloat16()
    assert flipped(weight, "W4A16", 32, lambda w: w / (w.abs().amax(-1, keepdim=True) / 7.5)) == 0
    assert flipped(weight, "W4A16", 32, divide) > share


@pytest.mark.parametrize(("scheme", "group_size"), ALL_SCHEMES)
def test_float32_and_bfloat16_master_weights_give_the_same_bytes(scheme, group_size, monkeypatch):
    master = normal(128, 256, seed=3)
    resolved = resolve_scheme(scheme, group_size)
    from_float32 = quantize_weight(master, resolved)
    from_bfloat16 = quantize_weight(master.bfloat16(), resolved)
    assert same_tensors(from_float32.tensors, from_bfloat16.tensors)

    # Control: after another cast some quantized values flip.
    monkeypatch.setattr(quantize_module, "MASTER_CAST_DTYPE", torch.float16)
    assert not same_bytes(quantize_weight(master, resolved).quantized, from_bfloat16.quantized)


def test_int4_layout_is_that_of_the_checkpoint():
    """Eight quantized values to a word, each plus 8, the first in the lowest four bits."""
    quantized = [-8, -7, -1, 0, 1, 2, 6, 7] * 4
    weight = torch.tensor([quantized]).float().clamp(min=-7.5)  # the scale is 1, and -7.5 rounds to the even -8
    low_bit = quantize_weight(weight, resolve_scheme("W4A16", 32))
    assert low_bit.scale.tolist() == [[1.0]]
    assert [word & 0xFFFFFFFF for word in low_bit.quantized[0].tolist()] == [0xFEA98710] * 4
    assert references.unpack_int4(low_bit.quantized, 32) == [quantized]
    assert low_bit.tensors["weight_shape"].tolist() == [1, 32]


def test_int8_layout_is_that_of_the_checkpoint():
    """Four quantized values to a word, each plus 128, the first in the lowest byte."""
    quantized = [-128, -127, -1, 0, 1, 2, 126, 127] * 4
    weight = torch.tensor([quantized]).float().clamp(min=-127.5)  # the scale is 1, and -127.5 rounds to the even -128
    low_bit = quantize_weight(weight, resolve_scheme("W8A16", 32))
    assert low_bit.scale.tolist() == [[1.0]]
    assert [word & 0xFFFFFFFF for word in low_bit.quantized[0].tolist()] == [0x807F0100, 0xFFFE8281] * 4
    assert low_bit.tensors["weight_shape"].tolist() == [1, 32]


def test_zero_points_of_eight_output_channels_share_a_word():
    """Each plus 8, the first channel in the lowest four bits; a channel that is not there is 0."""
    zero_points = [-8, -7, -1, 0, 1, 2, 6, 7, -8, 3]
    weight = torch.stack([(torch.arange(32) % 16 - 8 - z).float() for z in zero_points])  # quantized values of scale 1
    low_bit = quantize_weight(weight, resolve_scheme("W4A16_ASYM", 32))
    assert low_bit.scale.unique().tolist() == [1.0]
    assert [word & 0xFFFFFFFF for word in low_bit.tensors["weight_zero_point"][:, 0].tolist()] == [0xFEA98710, 0xB0]
    assert references.unpack_int4(low_bit.quantized, 32) == [list(range(-8, 8)) * 2] * 10


@pytest.mark.parametrize(("scheme", "group_size"), ALL_SCHEMES)
def test_tensors_have_the_names_shapes_and_dtypes_of_the_checkpoint_format(scheme, group_size):
    low_bit = quantize_weight(torch.randn(128, 256), resolve_scheme(scheme, group_size))
    groups = 1 if group_size in (-1, None) else 256 // group_size
    scale = {"weight_scale": (torch.bfloat16, (1, 2) if scheme == "FP8_BLOCK" else (128, groups))}
    if scheme == NVFP4:
        scale = {"weight_scale": (torch.float8_e4m3fn, (128, 16))}
    packed = {
        "weight_packed": (torch.int32, (128, 64 if scheme == "W8A16" else 32)),
        "weight_shape": (torch.int64, (2,)),
    }
    expected = {
        "W4A16": packed,
        "W4A16_ASYM": packed | {"weight_zero_point": (torch.int32, (16, groups))},
        "W8A16": packed,
        "FP8_DYNAMIC": {"weight": (torch.float8_e4m3fn, (128, 256))},
        "FP8_BLOCK": {"weight": (torch.float8_e4m3fn, (128, 256))},
        "W8A8": {"weight": (torch.int8, (128, 256))},
        "W4A8": {"weight": (torch.int8, (128, 256))},
        "W4AFP8": packed,
        NVFP4: {"weight_packed": (torch.uint8, (128, 128)), "weight_global_scale": (torch.float32, (1,))},
    }[scheme] | scale
    assert {name: (t.dtype, tuple(t.shape)) for name, t in low_bit.tensors.items()} == expected
    assert list(low_bit.tensors) == sorted(expected)
    assert low_bit.quantized is low_bit.tensors["weight_packed" if "weight_packed" in expected else "weight"]
    assert low_bit.scale is low_bit.tensors["weight_scale"]
    assert low_bit.num_bytes() == sum(t.numel() * t.element_size() for t in low_bit.tensors.values())
    assert all(t.is_contiguous() for t in low_bit.tensors.values())
    assert sum(t.view(torch.uint8).numel() for t in low_bit.tensors.values()) == low_bit.num_bytes()


@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM", "W8A16"])
@pytest.mark.parametrize("width", [20, 18, 33])
def test_a_width_that_does_not_fill_its_last_word_is_padded_per_channel(scheme, width):
    weight = normal(5, width, seed=4) + 0.3
    found = stored(weight, scheme, -1)
    assert same_tensors(found, by_definition(weight, scheme, -1))
    assert found["weight_shape"].tolist() == [5, width]


@pytest.mark.parametrize("weight", [normal(16, 256).t(), normal(256, 32)[:, ::2].t(), normal(16, 512)[:, ::2]])
@pytest.mark.parametrize("scheme", [name for name in NAMES if name not in ("FP8_BLOCK", "W4AFP8")])
def test_a_strided_master_gives_the_bytes_of_its_copy(scheme, weight):
    size = -1 if scheme in ("W4A16", "W4A16_ASYM", "W8A16", "W4A8") else None
    assert not weight.is_contiguous()
    assert same_tensors(stored(weight, scheme, size), stored(weight.contiguous(), scheme, size))


@pytest.mark.parametrize(("scheme", "group_size"), ALL_SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_master_is_neither_changed_nor_shared(scheme, group_size, dtype):
    weight = normal(128, 256, dtype=dtype)
    before = weight.clone()
    tensors = stored(weight, scheme, group_size)
    assert torch.equal(weight, before)
    assert weight.untyped_storage().data_ptr() not in {t.untyped_storage().data_ptr() for t in tensors.values()}
    assert not any(t.requires_grad for t in tensors.values())


# Golden vectors -----------------------------------------------------------------------------------------------------


def master_of(golden, scheme):
    """What `tests/golden/make.py` gave to llm-compressor."""
    if scheme in ("FP8_BLOCK", NVFP4):
        return golden["blocks"]
    if scheme in ("W4A16", "FP8_DYNAMIC"):
        return golden["master"]
    return torch.cat((golden["master"], golden["shifted"]))


@pytest.mark.parametrize(("scheme", "group_size"), ALL_SCHEMES)
def test_awkward_weights_give_the_bytes_of_llm_compressor(golden, scheme, group_size):
    """`tests/golden/make.py` lists the rows: zeros, outliers, ties, denormals, huge values, quantized values of -8, one sign."""
    name = f"{scheme}-{'channel' if group_size == -1 else group_size}" if group_size else scheme
    expected = {key.removeprefix(f"{name}."): t for key, t in golden.items() if key.startswith(f"{name}.")}
    weight = master_of(golden, scheme)
    if scheme in ("W4A16", "W4A16_ASYM", "W8A16", "W4AFP8"):
        expected["weight_shape"] = torch.tensor(weight.shape)
    assert len(expected) >= 2
    assert same_tensors(stored(weight, scheme, group_size), expected)
    assert same_tensors(by_definition(weight, scheme, group_size), expected)  # and the reference of the tests agrees


def test_the_golden_rows_hold_the_cases_they_are_named_for(golden):
    """The control: the file would prove little if its rows were all ordinary."""
    with safe_open(GOLDEN, "pt") as file:
        rows = {name: i for i, name in enumerate(file.metadata()["rows"].split("; "))}
    master = golden["master"]
    quantized = torch.tensor(references.unpack_int4(golden["W4A16-128.weight_packed"], 128))
    scales = golden["W4A16-128.weight_scale"].flatten()
    assert scales[rows["zeros"]] == references.BF16_EPS == torch.finfo(torch.bfloat16).eps
    assert not quantized[rows["zeros"]].any()
    assert master[rows["negative zeros"]].signbit().all()
    assert (quantized[rows["one negative outlier, code -8"]] == -8).sum() == 1
    assert quantized[rows["both signs of the largest"]].unique().tolist() == [-8, 7]
    assert 0 < scales[rows["denormals"]] < torch.finfo(torch.bfloat16).tiny
    assert quantized[rows["denormals"]].unique().numel() > 3
    assert scales[rows["denormals whose scale is zero"]] == references.BF16_EPS
    assert master[rows["denormals whose scale is zero"]].any()
    tie = rows["ties between codes"]
    assert torch.equal(quantized[tie].float(), master[tie].float().round().clamp(-8, 7))  # torch.round: half to even
    float8 = golden["FP8_DYNAMIC.weight"].view(torch.uint8)
    assert not (float8[rows["negative zeros"]] == 0x80).any()
    assert (float8[rows["small negatives that round to zero"]] == 0x80).any()  # these keep their sign
    assert golden["master"].abs().max() > 1e37


def test_the_shifted_golden_rows_hold_the_cases_they_are_named_for(golden):
    with safe_open(GOLDEN, "pt") as file:
        rows = {name: i + 14 for i, name in enumerate(file.metadata()["shifted rows"].split("; "))}
    words = [[word & 0xFFFFFFFF for word in row] for row in golden["W4A16_ASYM-128.weight_zero_point"].tolist()]
    zero_points = [((words[i // 8][0] >> (4 * (i % 8))) & 15) - 8 for i in range(24)]
    scales = golden["W4A16_ASYM-128.weight_scale"].flatten()
    assert zero_points[rows["all above zero"]] == zero_points[rows["zero and above"]] == -8
    assert zero_points[rows["all below zero"]] == zero_points[rows["zero and below"]] == 7
    assert -8 < zero_points[rows["mostly above zero"]] < 0 < zero_points[rows["mostly below zero"]] < 7
    assert zero_points[0] == 0  # a group of zeros
    assert scales[0] == scales[rows["denormals below zero whose scale is zero"]] == references.BF16_EPS
    assert 0 < scales[rows["denormals above zero"]] < torch.finfo(torch.bfloat16).tiny
    quantized = torch.tensor(references.unpack_int4(golden["W4A16_ASYM-128.weight_packed"], 128))
    tie = rows["ties between asymmetric codes"]
    assert scales[tie] == 1.0
    assert ((golden["shifted"][tie - 14] + 0.5) % 1 == 0).all()  # every value is halfway
    assert quantized[tie].unique().numel() > 7
    first, second = golden["FP8_BLOCK.weight_scale"].flatten()
    assert first > 0.01
    assert 0 < second < torch.finfo(torch.bfloat16).tiny
    scales = golden["NVFP4A16.weight_scale"].view(torch.uint8)
    assert (scales == references.FLOAT8_EPS).sum() > 1000  # denormals and zeros
    assert scales.max() == 0x7E  # 448, of the largest weight
    words = golden["NVFP4A16.weight_packed"]
    assert torch.cat((words & 15, words >> 4)).unique().numel() == 16


# Refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scheme", "group_size"), SCHEMES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_diverged_weight_is_refused(scheme, group_size, value):
    weight = torch.randn(128, 256)
    weight[2, 200] = value
    resolved = resolve_scheme(scheme, group_size)
    with pytest.raises(ValueError, match=r"holds NaN or infinity.*learning rate.*checkpoint"):
        quantize_weight(weight, resolved)
    # Frozen scales do not see the weight, and saturate what is only large.
    frozen = min_max_qparams(torch.randn(128, 256), resolved)
    with pytest.raises(ValueError, match=r"holds NaN or infinity"):
        quantize_weight(weight, resolved, frozen)
    weight[2, 200] = 1e37
    quantize_weight(weight, resolved, frozen)


@pytest.mark.parametrize("scheme", [*NAMES, NVFP4])
def test_a_weight_without_rows_has_no_quantized(scheme):
    tensors = stored(torch.empty(0, 256), scheme, None)
    whole = ("weight_shape", "weight_global_scale")
    assert all(tensor.numel() == 0 for name, tensor in tensors.items() if name not in whole)


@pytest.mark.parametrize("shape", [(128,), (2, 4, 128)])
def test_what_is_not_a_matrix_is_refused(shape):
    with pytest.raises(ValueError, match=r"must be a matrix \(out, in\), got shape"):
        quantize_weight(torch.randn(shape), resolve_scheme("W4A16"))


def test_a_size_that_the_group_does_not_divide_names_the_layer_and_both_remedies():
    model = nn.ModuleDict({"fits": nn.Linear(256, 8), "odd": nn.Linear(96, 8)})
    with pytest.raises(ValueError, match=r"'odd'.*in_features=96.*quant_ignore.*-1") as error:
        apply_quantization(model, "W4A16")
    assert "fits" not in str(error.value)
    assert type(model["fits"]) is nn.Linear  # nothing was changed
    for remedy in ({"group_size": 32}, {"group_size": -1}, {"ignore": ["odd"]}):
        model = nn.ModuleDict({"fits": nn.Linear(256, 8), "odd": nn.Linear(96, 8)})
        assert dict(iter_low_bit_weights(apply_quantization(model, "W4A16", **remedy)))


# Blocks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scheme", "group_size"), ALL_SCHEMES)
def test_as_matrix_undoes_as_blocks(scheme, group_size):
    resolved = resolve_scheme(scheme, group_size)
    weight = torch.arange(256 * 384).view(256, 384)
    blocks = as_blocks(weight, resolved)
    assert torch.equal(as_matrix(blocks, weight.shape, resolved), weight)
    last = blocks[-1, -1]  # the elements of the last scale
    if scheme == "FP8_BLOCK":
        assert torch.equal(last, weight[128:, 256:].flatten())
    else:
        size = 16 if scheme == NVFP4 else 384 if group_size in (None, -1) else group_size
        assert torch.equal(last, weight[-1, -size:])


def test_each_block_has_the_scale_of_its_largest_magnitude():
    weight = torch.full((256, 384), 0.5)
    weight[200, 10], weight[3, 300] = -448.0, 896.0
    scale = stored(weight, "FP8_BLOCK", None)["weight_scale"]
    half = torch.tensor(0.5 / 448, dtype=torch.bfloat16).item()
    assert scale.tolist() == [[half, half, 2.0], [1.0, half, half]]


# Frozen scales ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scheme", "group_size"), SCHEMES)
def test_the_scales_of_the_weight_itself_change_nothing(scheme, group_size):
    weight, resolved = normal(128, 256, seed=5) + 0.1, resolve_scheme(scheme, group_size)
    qparams = min_max_qparams(weight, resolved)
    assert same_bytes(qparams[0], quantize_weight(weight, resolved).scale)
    assert (qparams[1] is None) == (scheme != "W4A16_ASYM")
    assert same_tensors(quantize_weight(weight, resolved, qparams).tensors, stored(weight, scheme, group_size))


@pytest.mark.parametrize(
    ("name", "qparams", "words"),
    [
        ("W4A16", lambda scale, zero: (scale[:, :1], None), ["Frozen scale", "(16, 1)", "(16, 2)", "another layer"]),
        ("W4A16", lambda scale, zero: (scale.float(), None), ["Frozen scale", "torch.float32", "torch.bfloat16"]),
        ("W4A16", lambda scale, zero: (scale, scale), ["Frozen zero point", "the scheme is symmetric"]),
        ("W4A16", lambda scale, zero: (None, None), ["Frozen scale None"]),
        ("W4A16_ASYM", lambda scale, zero: (scale, None), ["Frozen zero point None", "torch.int8"]),
        ("W4A16_ASYM", lambda scale, zero: (scale, zero.float()), ["Frozen zero point", "torch.float32"]),
        ("W4A16_ASYM", lambda scale, zero: (scale, zero[:8]), ["Frozen zero point", "(8, 2)", "(16, 2)"]),
    ],
)
def test_frozen_scales_that_do_not_fit_are_refused(name, qparams, words):
    weight, resolved = normal(16, 256), resolve_scheme(name)
    with pytest.raises(ValueError) as error:
        quantize_weight(weight, resolved, qparams(*min_max_qparams(weight, resolved)))
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(("scheme", "group_size"), SCHEMES)
@pytest.mark.parametrize("value", [0.0, -0.0, -1.0, float("nan"), float("inf")])
def test_frozen_scales_that_are_no_units_are_refused(scheme, group_size, value):
    """A weight divided by them would have quantized values all the same, of any value."""
    weight, resolved = normal(128, 256), resolve_scheme(scheme, group_size)
    scale, zero_point = min_max_qparams(weight, resolved)
    scale[-1, -1] = value
    with pytest.raises(ValueError, match=r"Frozen scales must be finite and above zero.*damaged"):
        quantize_weight(weight, resolved, (scale, zero_point))


# Parts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scheme", "group_size"), SCHEMES)
def test_parts_of_the_rows_are_weights_of_their_own(scheme, group_size):
    resolved, weight = resolve_scheme(scheme, group_size), normal(384, 256)
    parts = quantize_weight(weight, resolved).split(128)
    assert [part.shape for part in parts] == [(128, 256)] * 3
    for part, rows in zip(parts, weight.split(128), strict=True):
        assert same_tensors(part.tensors, quantize_weight(rows, resolved).tensors)
    assert not same_tensors(parts[0].tensors, parts[1].tensors)  # control


@pytest.mark.parametrize(
    ("scheme", "out", "rows"),
    [("W4A16", 12, 5), ("W4A16_ASYM", 14, 7), ("FP8_BLOCK", 384, 96), ("FP8_BLOCK", 256, 64), ("NVFP4A16", 16, 8)],
)
def test_parts_that_share_something_are_refused(scheme, out, rows):
    with pytest.raises(ValueError, match=rf"{out} rows .* cannot be split into {rows} each"):
        quantize_weight(normal(out, 256), resolve_scheme(scheme)).split(rows)
