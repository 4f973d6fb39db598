"""`qarl_trl.quant.gemms.activations`: the quantized values of the definition, and of vLLM's own operations."""

import weakref

import pytest
import references
import torch

from qarl_trl.quant.gemms.activations import (
    memoize_last,
    quantize_groups_fp8,
    quantize_tokens_fp8,
    quantize_tokens_int8,
    quantize_tokens_int8_asymmetric,
)
from quant.schemes import as_bytes, normal


SIZES = [1e-30, 1e-3, 1.0, 1e4]
DTYPES = [torch.bfloat16, torch.float32]
ZEROS = slice(3, 5)  # the rows of `tokens` that are zero


def tokens(scale=1.0, dtype=torch.float32, seed=0, shape=(40, 256)):
    """Activations with a token of zeros, one of negative zeros, an outlier, one sign each, and ties."""
    x = scale * normal(*shape, seed=seed)
    x[3] = 0.0
    x[4] = -0.0
    x[5, 7] = 100 * scale
    x[6] = x[6].abs()
    x[7] = -x[7].abs()
    x[8] = scale * (torch.arange(shape[1]) % 255 - 127.0) / 2
    return x.to(dtype)


def tokens_of_sizes(sizes, dtype):
    """500 tokens of each size."""
    # A seed of its own for each size, so that no two sizes have the same mantissas.
    parts = [tokens(scale, dtype, seed, (500, 256)) for seed, scale in enumerate(sizes)]
    return torch.cat(parts)


def as_int8(quotient):
    """Rounded to nearest; NaN, from a token of zeros, to 0."""
    return quotient.round().nan_to_num(0.0).to(torch.int8)


def share_of_differences(a, b):
    return (a != b).float().mean()


# Float8 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e4])
@pytest.mark.parametrize(
    ("quantize", "reference"),
    [
        (quantize_tokens_fp8, references.quantize_tokens_float8),
        (quantize_groups_fp8, references.quantize_groups_float8),
    ],
)
def test_float8_of_a_token_or_group_is_that_of_the_definition(dtype, scale, quantize, reference):
    x = tokens(scale, dtype)

    quantized, scales = quantize(x)

    expected_quantized, expected_scales = reference(x)
    assert scales.dtype == torch.float32
    assert torch.equal(scales, expected_scales)
    # As bytes: `torch.equal` would take a negative zero for zero.
    assert torch.equal(as_bytes(quantized), expected_quantized)


def test_dividing_a_token_by_its_scale_gives_other_values():
    """The control of the tests around: vLLM multiplies by the reciprocal, which decides near ties."""
    # The second value lies so near to the tie at 152 that the rounding of the reciprocal decides.
    x = torch.tensor([[float.fromhex("0x1.c4aa3p+0"), float.fromhex("0x1.332a56p-1")]])

    quantized, scales = quantize_tokens_fp8(x)

    assert quantized[0, 1].item() == 144.0
    divided = (x / scales).to(torch.float8_e4m3fn)
    assert divided[0, 1].item() == 160.0


def test_multiplying_a_group_by_the_reciprocal_gives_other_values():
    """The control: groups are divided by their scale where tokens are multiplied by its reciprocal."""
    x = normal(4000, 128)

    quantized, scales = quantize_groups_fp8(x)

    multiplied = (x * scales.reciprocal()).clamp(-448, 448).to(torch.float8_e4m3fn)
    # Rare, so a comparison of few numbers would not notice.
    assert 0 < share_of_differences(as_bytes(multiplied), as_bytes(quantized)) < 1e-4


# Int8 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [*SIZES, 1e-38, 1e-40])
def test_int8_of_a_token_is_that_of_the_definition(dtype, scale):
    """Down to scales whose reciprocal is infinite, where every number but zero saturates."""
    x = tokens(scale, dtype)

    quantized, scales = quantize_tokens_int8(x)

    expected_quantized, expected_scales = references.quantize_tokens_int8(x)
    assert quantized.dtype == torch.int8
    assert scales.dtype == torch.float32
    assert torch.equal(scales, expected_scales)
    assert torch.equal(quantized, expected_quantized)
    assert not quantized[ZEROS].any()
    assert not scales[ZEROS].any()


def test_dividing_or_one_rounding_of_the_reciprocal_gives_other_int8_values():
    """The controls: on a CPU vLLM multiplies by the reciprocal of the rounded scale."""
    # The engine's dtype has many near ties.
    x = tokens(dtype=torch.bfloat16, shape=(4000, 256))

    quantized, scales = quantize_tokens_int8(x)

    x = x.float()
    divided = as_int8(x / scales)
    rounded_once = as_int8(x * (127.0 / x.abs().amax(-1, keepdim=True)))
    assert 0 < share_of_differences(divided, quantized) < 1e-3
    assert 0 < share_of_differences(rounded_once, quantized) < 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", SIZES)
def test_asymmetric_int8_of_a_token_is_that_of_the_definition(dtype, scale):
    x = tokens(scale, dtype)

    quantized, scales = quantize_tokens_int8_asymmetric(x)

    expected_quantized, expected_scales = references.quantize_tokens_int8_asymmetric(x)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(quantized, torch.tensor(expected_quantized, dtype=torch.int16))
    assert not quantized[ZEROS].any()
    assert (scales[ZEROS] == 1).all()


def test_halves_are_rounded_away_from_zero_in_asymmetric_int8():
    """The control: to even, as everywhere else, some tokens get other quantized values."""
    x = torch.tensor([[0.5, 1.5, 2.5, 3.5, 255.0], [-0.5, -1.5, -2.5, -3.5, -255.0]])

    quantized, scales = quantize_tokens_int8_asymmetric(x)

    assert scales.unique().tolist() == [1.0]
    assert quantized.tolist() == [[1, 2, 3, 4, 255], [-1, -2, -3, -4, -255]]
    assert not torch.equal(quantized.float(), x.round())


def test_the_zero_point_comes_from_the_side_that_the_engine_takes():
    """From the minimum or the maximum it is the same number but for rounding, which counts where it is halfway."""
    rng = torch.Generator().manual_seed(0)
    # Minimum and maximum 255 apart, both at a half: the zero point is a tie, but for the roundings of a factor.
    low = torch.randint(1, 254, (2000,), generator=rng) + 0.5
    x = torch.stack((-low, 255 - low, low / 3), dim=-1) * (0.5 + torch.rand(2000, 1, generator=rng))

    quantized, scales = quantize_tokens_int8_asymmetric(x)

    expected_quantized, expected_scales = references.quantize_tokens_int8_asymmetric(x)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(quantized, torch.tensor(expected_quantized, dtype=torch.int16))

    # Control: the rows tell the two sides apart.
    inverse = torch.full((2000,), 255.0) / (x[:, 1] - x[:, 0])
    from_minimum = (-128 - x[:, 0] * inverse).round()
    from_maximum = (127 - x[:, 1] * inverse).round()
    assert (from_minimum != from_maximum).sum() > 100


# Once for each input -------------------------------------------------------------------------------------------------


class Counted:
    """A function of a tensor that counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, x, factor=2.0):
        self.calls += 1
        return x * factor


def test_the_same_tensor_gives_the_same_object_and_another_one_does_not():
    function = Counted()
    x = normal(3, 4)

    result = memoize_last(function, x)

    assert memoize_last(function, x) is result
    # Equal numbers, another tensor.
    assert memoize_last(function, x.clone()) is not result
    assert function.calls == 2
    assert torch.equal(memoize_last(function, x, 3.0), 3 * x)
    assert torch.equal(memoize_last(Counted(), x), 2 * x)


@pytest.mark.parametrize(
    "change",
    [lambda x: x.add_(1), lambda x: x.view(-1)[3:5].zero_(), lambda x: setattr(x, "data", x + 1)],
    ids=["in place", "through a view", "new storage"],
)
def test_a_changed_tensor_is_computed_again(change):
    function = Counted()
    x = normal(3, 4)
    before = memoize_last(function, x)

    change(x)

    assert torch.equal(memoize_last(function, x), 2 * x)
    # Control: the change is one.
    assert not torch.equal(before, 2 * x)


def test_nothing_is_held_longer_than_the_input():
    function = Counted()
    x = normal(3, 4)
    # A cast to its own dtype returns `x` itself, which it must not hold by a cycle.
    assert memoize_last(torch.Tensor.to, x, torch.float32) is x

    source = weakref.ref(x)
    result = weakref.ref(memoize_last(function, x))
    # As the quantized values of a cast.
    chained = weakref.ref(memoize_last(function, result()))
    assert result() is not None
    assert chained() is not None

    del x
    assert source() is None
    assert result() is None
    assert chained() is None


def test_tensors_of_inference_mode_are_computed_each_time():
    function = Counted()
    with torch.inference_mode():
        x = normal(3, 4)
        memoize_last(function, x)

        # In inference mode this counts no version.
        x.add_(1)

        assert torch.equal(memoize_last(function, x), 2 * x)


# Against vLLM -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [False, True])
def test_float8_is_that_of_vllm(groups, dtype):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    shape = GroupShape(1, 128) if groups else GroupShape.PER_TOKEN
    quantize = quantize_groups_fp8 if groups else quantize_tokens_fp8
    with set_current_vllm_config(VllmConfig()):
        theirs = QuantFP8(static=False, group_shape=shape)
    x = tokens_of_sizes((1e-1, 1.0, 1e4), dtype)

    quantized, scales = quantize(x)

    expected_quantized, expected_scales = theirs.forward_native(x)
    assert torch.equal(as_bytes(quantized), as_bytes(expected_quantized))
    # For groups vLLM's plain form keeps the scale above 1 / (448 * 512), its GPU kernels keep the magnitude above
    # 1e-10, as we do.
    at_the_bound = expected_scales == torch.tensor(1 / (448 * 512))
    # These are the tokens of zeros.
    assert 0 < at_the_bound.float().mean() < 0.01
    assert torch.equal(scales[~at_the_bound], expected_scales[~at_the_bound])


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.avx512  # that for AVX2 has -128 where the scale is 0
@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_of_a_token_is_that_of_vllm(dtype):
    from vllm import _custom_ops as ops

    x = tokens_of_sizes((1e-42, 1e-40, 1e-38, *SIZES, 1e36), dtype)

    quantized, scales = quantize_tokens_int8(x)

    expected_quantized, expected_scales, _ = ops.onednn_scaled_int8_quant(x, None, None, True)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(quantized, expected_quantized)
