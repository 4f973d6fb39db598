"""`qarl_trl.quant.kv_cache`: the rounding of keys and values, by a reference of plain Python numbers."""

import pytest
import torch
from references.kv_cache import cut_off, magnitudes
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qarl_trl.quant.kv_cache import FORMATS, from_cache, register_with_cache, round_to_cache, with_cache


def all_bfloat16():
    """Every finite bfloat16, `(65280,)`."""
    # 65,536 patterns, less the 256 of NaN and infinity.
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16)
    numbers = patterns.view(torch.bfloat16)
    return numbers[numbers.isfinite()]


@pytest.mark.parametrize("cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_every_bfloat16_is_cut_off_to_the_numbers_of_the_format(cache_dtype):
    x = all_bfloat16()
    # One by one in Python, among all numbers that the format has.
    numbers = magnitudes(cache_dtype)
    expected = torch.tensor([cut_off(number, numbers) for number in x.tolist()])

    rounded = round_to_cache(x, cache_dtype)

    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded.float(), expected)
    # Control: the nearest number is another for half of those that lie between two.
    largest = numbers[-1]
    nearest = x.float().clamp(-largest, largest).to(FORMATS[cache_dtype]).float()
    assert (nearest != expected).sum() > 2_000


def test_fp8_is_e4m3():
    x = all_bfloat16()

    assert torch.equal(round_to_cache(x, "fp8"), round_to_cache(x, "fp8_e4m3"))
    assert not torch.equal(round_to_cache(x, "fp8"), round_to_cache(x, "fp8_e5m2"))  # control


def test_float32_is_rounded_to_bfloat16_first():
    """As the engine's keys are: the nearest bfloat16 below 16 is 16, which is a number of the format."""
    x = torch.tensor([15.99])

    rounded = round_to_cache(x, "fp8")

    assert rounded.dtype == torch.float32
    assert rounded.item() == 16.0
    assert cut_off(15.99, magnitudes("fp8_e4m3")) == 15.0  # control


def test_infinity_becomes_the_largest_number_and_nan_stays():
    x = torch.tensor([torch.inf, -torch.inf, torch.nan])

    rounded = round_to_cache(x, "fp8")

    assert rounded[:2].tolist() == [448.0, -448.0]
    assert rounded[2].isnan()


def test_the_gradient_passes_as_it_is():
    x = torch.tensor([0.3, -1e-9, 1e9], requires_grad=True)
    grad = torch.tensor([1.5, 2.5, -3.5])

    output = from_cache(x, "fp8")
    output.backward(grad)

    # Control: the forward does round, so the gradient passes straight through something.
    assert not torch.equal(output, x)
    assert torch.equal(x.grad, grad)


def test_an_attention_is_registered_once_for_each_cache():
    # An attention that says with which cache it was called.
    register_with_cache("test_attention", lambda *args, cache_dtype: cache_dtype, lambda *args: None)

    for cache_dtype in FORMATS:
        attention = ALL_ATTENTION_FUNCTIONS[with_cache("test_attention", cache_dtype)]
        assert attention() == cache_dtype
