"""`qarl_trl.metrics.clock`: quantized values that changed, counted by hand. The clock itself: tests/rollout/test_engine.py."""

import pytest
import torch
from torch import nn

from qarl_trl.metrics.clock import WeightFlips
from qarl_trl.quant import apply_quantization, quantized_modules
from qarl_trl.quant.scheme import SUPPORTED


FLIPS = "quant/flip_frac"


def layers(scheme, seed=0, in_features=128, out_features=16):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(in_features, out_features), nn.Linear(in_features, out_features))
    return apply_quantization(model, scheme)


def sync(model):
    """What a weight sync does to the counter: every layer's quantized values are made."""
    return [(name, module) for name, module in quantized_modules(model) if module.low_bit()]


def quantized_of(module):
    """One number for each code, whatever the layout."""
    low_bit, bits = module.low_bit(), module.scheme.weights.num_bits
    if "weight_packed" in low_bit.tensors and bits == 4:
        stored = low_bit.quantized.view(torch.uint8)
        return torch.stack((stored & 0xF, stored >> 4), -1).flatten(1)
    return low_bit.quantized.view(torch.uint8)


@pytest.mark.parametrize("scheme", list(SUPPORTED))
def test_code_flips_count_the_quantized_that_changed(scheme):
    model, counter = layers(scheme, out_features=128), WeightFlips()
    still = {FLIPS: 0.0}
    assert counter.update(sync(model)) == {}
    assert counter.update(sync(model)) == still
    before = [quantized_of(module) for module in model]
    with torch.no_grad():
        model[0].weight += 0.003 * torch.randn_like(model[0].weight)
    assert (
        sum(quantized.numel() for quantized in before) == 2 * 128 * 128
    )  # control: bytes would be half or twice as many
    first, second = ((quantized_of(m) != b).float().mean().item() for m, b in zip(model, before, strict=True))
    assert 0.04 < first < 1 and second == 0
    assert counter.update(sync(model)) == {FLIPS: first / 2}
    assert counter.update(sync(model)) == still


def test_both_nibbles_of_a_byte_count():
    """Control: a count of changed bytes would give half of this."""
    model, counter = layers("W4A16"), WeightFlips()
    counter.update(sync(model))
    with torch.no_grad():
        model[0].weight.neg_()
    changed = (
        (quantized_of(model[0]) != 16 - quantized_of(model[0])).sum().item()
    )  # a code and its opposite differ unless 0
    share = counter.update(sync(model))[FLIPS]
    assert share > 0.4
    assert share == pytest.approx(changed / (2 * 16 * 128), abs=0.01)  # -8 has no opposite code


@pytest.mark.parametrize("scheme", ["W4A16", "FP8_DYNAMIC"])
def test_a_sample_of_a_large_layer_estimates_its_share(scheme):
    model = layers(scheme, in_features=512, out_features=256)
    exact, sampled = WeightFlips(), WeightFlips(words=4000)
    exact.update(sync(model))
    sampled.update(sync(model))
    with torch.no_grad():
        for module in model:
            module.weight += 0.001 * torch.randn_like(module.weight)
    expected = exact.update(sync(model))
    assert all(0.02 < share < 0.9 for share in expected.values())
    # At least 1,900 quantized values a layer: one standard deviation is 0.011.
    assert sampled.update(sync(model)) == pytest.approx(expected, abs=0.03)
    assert all(quantized.shape[0] <= 4000 for quantized in sampled._last.values())


def test_without_low_bit_layers_there_is_no_share():
    counter = WeightFlips()
    assert counter.update([]) == {}
    assert counter.update([]) == {}
