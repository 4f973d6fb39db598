"""`qarl_trl.metrics.clock`: codes that changed, counted by hand. The clock itself: tests/rollout/test_engine.py."""

import pytest
import torch
from torch import nn

from qarl_trl.metrics.clock import CodeFlips
from qarl_trl.quant import apply_quantization, quantized_modules
from qarl_trl.quant.table import SUPPORTED


def layers(scheme, seed=0, in_features=128, out_features=16):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(in_features, out_features), nn.Linear(in_features, out_features))
    return apply_quantization(model, scheme)


def publish(model):
    """What a publish does to the counter: every layer's codes are made."""
    return [(name, module) for name, module in quantized_modules(model) if module.low_bit()]


def codes_of(module):
    """One number for each code, whatever the layout."""
    low_bit, bits = module.low_bit(), module.scheme.weights.num_bits
    if "weight_packed" in low_bit.tensors and bits == 4:
        stored = low_bit.codes.view(torch.uint8)
        return torch.stack((stored & 0xF, stored >> 4), -1).flatten(1)
    return low_bit.codes.view(torch.uint8)


@pytest.mark.parametrize("scheme", list(SUPPORTED))
def test_code_flips_count_the_codes_that_changed(scheme):
    model, counter = layers(scheme, out_features=128), CodeFlips()
    assert counter.update(publish(model)) is None
    assert counter.update(publish(model)) == 0.0
    before = [codes_of(module) for module in model]
    with torch.no_grad():
        model[0].weight += 0.003 * torch.randn_like(model[0].weight)
    assert sum(codes.numel() for codes in before) == 2 * 128 * 128  # control: bytes would be half or twice as many
    expected = sum((codes_of(m) != b).sum().item() for m, b in zip(model, before, strict=True)) / (2 * 128 * 128)
    assert 0.02 < expected < 0.5
    assert counter.update(publish(model)) == expected
    assert counter.update(publish(model)) == 0.0


def test_both_nibbles_of_a_byte_count():
    """Control: a count of changed bytes would give half of this."""
    model, counter = layers("W4A16"), CodeFlips()
    counter.update(publish(model))
    with torch.no_grad():
        model[0].weight.neg_()
    changed = (codes_of(model[0]) != 16 - codes_of(model[0])).sum().item()  # a code and its opposite differ unless 0
    share = counter.update(publish(model))
    assert share > 0.4
    assert share == pytest.approx(changed / (2 * 16 * 128), abs=0.01)  # -8 has no opposite code


@pytest.mark.parametrize("scheme", ["W4A16", "FP8_DYNAMIC"])
def test_a_sample_of_a_large_layer_estimates_its_share(scheme):
    model = layers(scheme, in_features=512, out_features=256)
    exact, sampled = CodeFlips(), CodeFlips(words=4000)
    exact.update(publish(model))
    sampled.update(publish(model))
    with torch.no_grad():
        for module in model:
            module.weight += 0.001 * torch.randn_like(module.weight)
    expected = exact.update(publish(model))
    assert 0.02 < expected < 0.9
    # At least 1,900 codes a layer: one standard deviation is 0.008.
    assert sampled.update(publish(model)) == pytest.approx(expected, abs=0.03)
    assert all(codes.shape[0] <= 4000 for codes in sampled._last.values())


def test_without_low_bit_layers_there_is_no_share():
    counter = CodeFlips()
    assert counter.update([]) is None
    assert counter.update([]) is None
