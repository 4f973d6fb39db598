"""`qarl_trl.quant.reference`: the bytes of compressed-tensors, for many weights and for every bfloat16 number."""

import pytest
import torch

from qarl_trl.quant import quantize_weight, reference, resolve_scheme
from qarl_trl.quant.quantize import LowBitWeight, dequantize
from qarl_trl.quant.scheme import has_global_scale
from quant.schemes import ALL_SCHEMES, SCHEMES, compressed, decompressed, normal, observed, same_bytes, same_tensors


def many_weights(seed):
    """A million bfloat16 weights, `(1024, 1024)`: a block of 128 rows each of eight kinds."""
    rng = torch.Generator().manual_seed(seed)

    def noise(scale=1.0):
        return scale * torch.randn(128, 1024, generator=rng)

    # All bit patterns, so denormals and huge numbers are as common as ordinary ones.
    patterns = torch.randint(-(2**15), 2**15, (128, 1024), generator=rng, dtype=torch.int16).view(torch.bfloat16)

    kinds = (
        noise(0.02),
        noise(1e-30),
        noise(1e4),
        (noise(0.02) / noise()).clamp(-1e30, 1e30),  # Cauchy: heavy tails
        noise(2.0).exp() * noise().sign(),
        torch.rand(128, 1024, generator=rng) + 0.3,  # one sign
        noise(0.02).relu() * (noise() > 1),  # mostly zeros, some of them negative
        torch.where(patterns.abs() < 1e37, patterns, -0.0).float(),  # any size at all
    )
    return torch.cat(kinds).bfloat16()


def parts(weight, scheme):
    """`many_weights` as they are, or, where one scale stands above all others, kind by kind."""
    if has_global_scale(scheme):
        # Heavy tails would set the global scale, and all other kinds would round to zero.
        return weight.split(128)
    return (weight,)


def quantized_of(tensors):
    return tensors["weight_packed"] if "weight_packed" in tensors else tensors["weight"]


@pytest.fixture(scope="module")
def weight():
    return many_weights(0)


# Many weights -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scheme", "group_size"), ALL_SCHEMES)
def test_a_million_weights_have_the_bytes_of_compressed_tensors(weight, scheme, group_size):
    resolved = resolve_scheme(scheme, group_size)

    for part in parts(weight, resolved):
        low_bit = quantize_weight(part, resolved)

        assert same_tensors(low_bit.tensors, compressed(part, resolved))
        assert same_bytes(dequantize(low_bit), decompressed(low_bit))


@pytest.mark.parametrize(("scheme", "group_size"), SCHEMES)
@pytest.mark.parametrize("factor", [0.25, 3.0])
def test_scales_of_other_weights_give_the_bytes_of_compressed_tensors(weight, scheme, group_size, factor):
    """Quantized values saturate; the zero point is then another one too."""
    resolved = resolve_scheme(scheme, group_size)
    # A quarter of each kind is enough, and takes a quarter of the time.
    weight = weight[::4].contiguous()
    # Scales of other rows and half a group further: a quarter and three times as large as they should be.
    others = weight.roll((3, 64), (0, 1)) * factor
    scale, zero_point = observed(others, resolved)

    encoded = reference.encode(weight, scale, None if resolved.weights.symmetric else zero_point, resolved)

    assert same_bytes(encoded, quantized_of(compressed(weight, resolved, (scale, zero_point))))
    # Control: with its own scales the weight has other bytes.
    assert not same_bytes(encoded, quantize_weight(weight, resolved).quantized)


# Controls: each of these would be noticed ---------------------------------------------------------------------------


def divide_in_float32(weight, scale, zero_point):
    quotient = weight.float() / scale.float()
    if zero_point is not None:
        quotient = quotient + zero_point
    return quotient.bfloat16()


def float8_with_negative_zeros(quotient):
    return quotient.clamp_(-reference.FP8_MAX, reference.FP8_MAX).to(reference.FP8)


def float8_without_a_sign_of_zero(quotient):
    values = float8_with_negative_zeros(quotient).float()
    return torch.where(values == 0, 0.0, values).to(reference.FP8)


@pytest.mark.parametrize(
    ("scheme", "name", "other"),
    [
        # The quotient unrounded before the zero point is added.
        ("W4A16_ASYM", "in_units_of_scale", divide_in_float32),
        # Zeros that keep their sign, and numbers that round to zero and lose it.
        ("FP8_DYNAMIC", "fp8_quantized", float8_with_negative_zeros),
        ("FP8_DYNAMIC", "fp8_quantized", float8_without_a_sign_of_zero),
        # 135 leaves the value plus 7 where plus 8 is stored, and above 256 bfloat16 numbers are 2 apart.
        ("W4A16", "_INT4_BIAS", 135.0),
        ("W4A16", "_INT4_BIAS", 264.0),
        # The largest number in the place of the largest magnitude, and a range without its lowest value.
        ("W8A16", "absmax", lambda blocks: blocks.amax(-1)),
        ("W4A8", "int_quantized", lambda quotient, bits: quotient.round().clamp(-7, 7).to(torch.int8)),
        # Cut off, not rounded.
        ("W8A8", "int_quantized", lambda quotient, bits: quotient.clamp(-128, 127).to(torch.int8)),
    ],
)
def test_another_arithmetic_gives_other_bytes(weight, monkeypatch, scheme, name, other):
    resolved = resolve_scheme(scheme)

    monkeypatch.setattr(reference, name, other)

    assert not same_tensors(quantize_weight(weight, resolved).tensors, compressed(weight, resolved))


# Every bfloat16 number ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def numbers():
    """All 65280 finite bfloat16 numbers and both infinities (16 times), `(256, 256)`, by falling bit pattern."""
    patterns = torch.arange(2**15 - 1, -(2**15) - 1, -1).to(torch.int16).view(torch.bfloat16)
    finite = patterns[patterns.isfinite()]
    # Both zeros are one number.
    assert finite.unique().numel() == 65280 - 1

    infinite = torch.tensor([float("inf"), -float("inf")]).bfloat16().repeat(128)
    return torch.cat((finite, infinite)).view(256, 256)


@pytest.mark.parametrize("scheme", ["W4A16", "W8A16", "W8A8", "W4A8", "FP8_DYNAMIC"])
def test_every_number_has_the_bytes_of_compressed_tensors(numbers, scheme):
    """With a scale of one, so that the number is the quotient."""
    resolved = resolve_scheme(scheme)
    # One scale a row, which is then 1 everywhere.
    resolved.weights.strategy = "channel"
    resolved.weights.group_size = None
    # The last row is infinite.
    weight = numbers[:-1]
    scale = torch.ones(255, 1, dtype=torch.bfloat16)

    encoded = reference.encode(weight, scale, None, resolved)

    assert same_bytes(encoded, quantized_of(compressed(weight, resolved, (scale, torch.zeros_like(scale)))))


@pytest.mark.parametrize("zero_point", range(-8, 8))
def test_every_number_has_the_bytes_of_compressed_tensors_with_every_zero_point(numbers, zero_point):
    resolved = resolve_scheme("W4A16_ASYM", -1)
    weight = numbers[:-1]
    scale = torch.ones(255, 1, dtype=torch.bfloat16)
    zero_points = torch.full((255, 1), zero_point, dtype=torch.int8)
    expected = compressed(weight, resolved, (scale, zero_points))

    encoded = reference.encode(weight, scale, zero_points, resolved)
    data = {name: tensor for name, tensor in expected.items() if name != "weight_shape"}
    low_bit = LowBitWeight(data, resolved)

    assert same_bytes(encoded, expected["weight_packed"])
    assert same_bytes(dequantize(low_bit), decompressed(low_bit))


# Pieces -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 130, 384])
def test_absmax_is_the_largest_magnitude(width):
    rows = normal(64, width, seed=width, dtype=torch.bfloat16)
    # Zeros of one sign, a denormal, and both infinities at the ends of a row.
    rows[0] = -0.0
    rows[1] = 2.0**-133
    rows[2, -1] = -float("inf")
    rows[3, 0] = float("inf")

    largest = reference.absmax(rows)

    assert torch.equal(largest, rows.abs().amax(-1))
    assert not largest.signbit().any()


@pytest.mark.parametrize("width", [1, 130, 384])
def test_absmax_of_a_row_with_a_nan_is_nan(width):
    rows = normal(64, width, seed=width, dtype=torch.bfloat16)
    rows[2, -1] = -float("inf")
    rows[2, 0] = float("nan")
    rows[4, -1] = -float("nan")

    largest = reference.absmax(rows)

    assert largest.isnan().nonzero().flatten().tolist() == [2, 4]
