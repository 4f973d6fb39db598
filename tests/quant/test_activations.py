"""`qarl_trl.quant.activations`: the quantized values of the definition, and of vLLM's own operations."""

import weakref

import pytest
import references
import torch

from qarl_trl.quant.activations import (
    memoize_last,
    quantize_groups_fp8,
    quantize_tokens_fp8,
    quantize_tokens_int8,
    quantize_tokens_int8_asymmetric,
)
from quant.schemes import normal


SIZES = [1e-30, 1e-3, 1.0, 1e4]
DTYPES = [torch.bfloat16, torch.float32]


def tokens(scale=1.0, dtype=torch.float32, seed=0, shape=(40, 256)):
    """Activations with a token of zeros, one of negative zeros, an outlier, one sign each, and ties."""
    x = scale * normal(*shape, seed=seed)
    x[3] = 0.0
    x[4] = -0.0
    x[5, 7] = 100 * scale
    x[6], x[7] = x[6].abs(), -x[7].abs()
    x[8] = scale * (torch.arange(shape[1]) % 255 - 127.0) / 2
    return x.to(dtype)


def as_bytes(tensor):
    return tensor.view(torch.uint8)


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
    assert torch.equal(as_bytes(quantized), expected_quantized)


def test_dividing_by_the_scale_gives_other_quantized():
    """The control of the tests around: vLLM multiplies by the reciprocal, which tells near ties between quantized values apart."""
    x = torch.tensor([[float.fromhex(v) for v in ("0x1.c4aa3p+0", "0x1.332a56p-1")]])
    quantized, scales = quantize_tokens_fp8(x)
    assert quantized[0, 1].item() == 144.0
    assert (x / scales).to(torch.float8_e4m3fn)[0, 1].item() == 160.0


def test_multiplying_a_group_by_the_reciprocal_gives_other_quantized():
    """The control: groups are divided by their scale where tokens are multiplied by its reciprocal."""
    x = normal(4000, 128)
    quantized, scales = quantize_groups_fp8(x)
    other = (x * scales.reciprocal()).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert 0 < (as_bytes(other) != as_bytes(quantized)).float().mean() < 1e-4


# Int8 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [*SIZES, 1e-38, 1e-40])
def test_int8_of_a_token_is_that_of_the_definition(dtype, scale):
    """Down to scales whose reciprocal is infinite, where every number but zero saturates."""
    x = tokens(scale, dtype)
    quantized, scales = quantize_tokens_int8(x)
    expected_quantized, expected_scales = references.quantize_tokens_int8(x)
    assert (quantized.dtype, scales.dtype) == (torch.int8, torch.float32)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(quantized, expected_quantized)
    assert not quantized[3:5].any()
    assert not scales[3:5].any()


def test_dividing_or_one_rounding_of_the_reciprocal_gives_other_int8_quantized():
    """The controls: on a CPU vLLM multiplies by the reciprocal of the rounded scale."""
    x = tokens(dtype=torch.bfloat16, shape=(4000, 256))  # the engine's dtype has many near ties
    quantized, scales = quantize_tokens_int8(x)
    x = x.float()
    divided = (x / scales).round().nan_to_num(0.0).to(torch.int8)
    rounded_once = (x * (127.0 / x.abs().amax(-1, keepdim=True))).round().nan_to_num(0.0).to(torch.int8)
    assert 0 < (divided != quantized).float().mean() < 1e-3
    assert 0 < (rounded_once != quantized).float().mean() < 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", SIZES)
def test_asymmetric_int8_of_a_token_is_that_of_the_definition(dtype, scale):
    x = tokens(scale, dtype)
    quantized, scales = quantize_tokens_int8_asymmetric(x)
    expected_quantized, expected_scales = references.quantize_tokens_int8_asymmetric(x)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(quantized, torch.tensor(expected_quantized, dtype=torch.int16))
    assert not quantized[3:5].any()
    assert (scales[3:5] == 1).all()


def test_halves_are_rounded_away_from_zero_in_asymmetric_quantized():
    """The control: to even, as everywhere else, some tokens get other quantized values."""
    x = torch.tensor([[0.5, 1.5, 2.5, 3.5, 255.0], [-0.5, -1.5, -2.5, -3.5, -255.0]])  # one step is 1
    quantized, scales = quantize_tokens_int8_asymmetric(x)
    assert scales.unique().tolist() == [1.0]
    assert quantized.tolist() == [[1, 2, 3, 4, 255], [-1, -2, -3, -4, -255]]
    assert not torch.equal(quantized.float(), x.round())


def test_the_zero_point_comes_from_the_side_that_the_engine_takes():
    """From the minimum or the maximum it is the same number but for rounding, which counts where it is halfway."""
    rng = torch.Generator().manual_seed(0)
    low = torch.randint(1, 254, (2000,), generator=rng) + 0.5
    x = torch.stack((-low, 255 - low, low / 3), dim=-1) * (0.5 + torch.rand(2000, 1, generator=rng))
    quantized, scales = quantize_tokens_int8_asymmetric(x)
    expected_quantized, expected_scales = references.quantize_tokens_int8_asymmetric(x)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(quantized, torch.tensor(expected_quantized, dtype=torch.int16))
    # Control: the rows tell the two sides apart.
    steps = torch.full((2000,), 255.0) / (x[:, 1] - x[:, 0])
    assert ((-128 - x[:, 0] * steps).round() != (127 - x[:, 1] * steps).round()).sum() > 100


# Once for each input -------------------------------------------------------------------------------------------------


class Counted:
    """A function of a tensor that counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, x, factor=2.0):
        self.calls += 1
        return x * factor


def test_the_same_tensor_gives_the_same_object_and_another_one_does_not():
    function, x = Counted(), normal(3, 4)
    found = memoize_last(function, x)
    assert memoize_last(function, x) is found
    assert memoize_last(function, x.clone()) is not found  # equal numbers, another tensor
    assert function.calls == 2
    assert torch.equal(memoize_last(function, x, 3.0), 3 * x)
    assert torch.equal(memoize_last(Counted(), x), 2 * x)


@pytest.mark.parametrize(
    "change",
    [lambda x: x.add_(1), lambda x: x.view(-1)[3:5].zero_(), lambda x: setattr(x, "data", x + 1)],
    ids=["in place", "through a view", "new storage"],
)
def test_a_changed_tensor_is_computed_again(change):
    function, x = Counted(), normal(3, 4)
    before = memoize_last(function, x)
    change(x)
    assert torch.equal(memoize_last(function, x), 2 * x)
    assert not torch.equal(before, 2 * x)  # control


def test_nothing_is_held_longer_than_the_input():
    function, x = Counted(), normal(3, 4)
    assert memoize_last(torch.Tensor.to, x, torch.float32) is x
    result, source = weakref.ref(memoize_last(function, x)), weakref.ref(x)
    chained = weakref.ref(memoize_last(function, result()))  # as the quantized values of a cast
    assert None not in (result(), chained())
    del x
    assert (source(), result(), chained()) == (None, None, None)


def test_tensors_of_inference_mode_are_computed_each_time():
    function = Counted()
    with torch.inference_mode():
        x = normal(3, 4)
        memoize_last(function, x)
        x.add_(1)  # which counts no version
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
    with set_current_vllm_config(VllmConfig()):
        theirs = QuantFP8(static=False, group_shape=shape)
    x = torch.cat([tokens(scale, dtype, i, (500, 256)) for i, scale in enumerate((1e-1, 1.0, 1e4))])
    quantized, scales = theirs.forward_native(x)
    found, found_scales = (quantize_groups_fp8 if groups else quantize_tokens_fp8)(x)
    assert torch.equal(as_bytes(found), as_bytes(quantized))
    # For groups vLLM's plain form keeps the scale above 1 / (448 * 512), its GPU kernels keep the magnitude above 1e-10, as we do.
    floor = scales == torch.tensor(1 / (448 * 512))
    assert 0 < floor.float().mean() < 0.01  # the tokens of zeros
    assert torch.equal(found_scales[~floor], scales[~floor])


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.avx512  # that for AVX2 has -128 where the scale is 0
@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_of_a_token_is_that_of_vllm(dtype):
    from vllm import _custom_ops as ops

    sizes = (1e-42, 1e-40, 1e-38, *SIZES, 1e36)
    x = torch.cat([tokens(scale, dtype, i, (500, 256)) for i, scale in enumerate(sizes)])
    quantized, scales, _ = ops.onednn_scaled_int8_quant(x, None, None, True)
    found_quantized, found_scales = quantize_tokens_int8(x)
    assert torch.equal(found_scales, scales)
    assert torch.equal(found_quantized, quantized)
