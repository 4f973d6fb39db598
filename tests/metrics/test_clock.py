"""`qarl_trl.metrics.clock`: quantized values that changed, counted by hand. The clock itself: tests/rollout/test_engine.py."""

import pytest
import torch
from torch import nn

from qarl_trl.metrics.clock import WeightFlips
from qarl_trl.quant import apply_quantization, low_bit_store


FLIPS = "quant/flip_frac"


def layers(scheme, in_features=128, out_features=128):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(in_features, out_features), nn.Linear(in_features, out_features))
    return apply_quantization(model, scheme)


def sync(model):
    """What a weight sync leaves for the counter: the low-bit weights of every layer."""
    store = low_bit_store(model)
    dict(store.tensors())
    return store.kept()


def quantized_of(module):
    """One number for each quantized value, whatever the layout."""
    low_bit, bits = module.low_bit(), module.scheme.weights.num_bits
    if "weight_packed" in low_bit.tensors and bits == 4:
        stored = low_bit.quantized.view(torch.uint8)
        return torch.stack((stored & 0xF, stored >> 4), -1).flatten(1)
    return low_bit.quantized.view(torch.uint8)


@pytest.mark.parametrize("scheme", ["W4A16", "W8A16", "W8A8", "FP8_DYNAMIC", "NVFP4A16", "W4A8"])
def test_the_quantized_values_that_changed_are_counted(scheme):
    model, counter = layers(scheme), WeightFlips()
    assert counter.update(sync(model)) == {}
    assert counter.update(sync(model)) == {FLIPS: 0.0}
    before = [quantized_of(module) for module in model]
    with torch.no_grad():
        model[0].weight += 0.003 * torch.randn_like(model[0].weight)
    assert sum(q.numel() for q in before) == 2 * 128 * 128  # control: bytes would be half or twice as many
    first, second = ((quantized_of(m) != b).float().mean().item() for m, b in zip(model, before, strict=True))
    assert 0.04 < first < 1 and second == 0
    assert counter.update(sync(model)) == {FLIPS: first / 2}
    assert counter.update(sync(model)) == {FLIPS: 0.0}


def test_a_sample_of_a_large_layer_estimates_its_share():
    model = layers("W4A16", in_features=512, out_features=256)
    exact, sampled = WeightFlips(), WeightFlips(most=4000)
    exact.update(sync(model))
    sampled.update(sync(model))
    with torch.no_grad():
        for module in model:
            module.weight += 0.001 * torch.randn_like(module.weight)
    expected = exact.update(sync(model))
    assert 0.02 < expected[FLIPS] < 0.9
    assert sampled.update(sync(model)) == pytest.approx(expected, abs=0.03)  # one standard deviation is 0.006
    assert all(len(stored) <= 4000 for stored in sampled._last.values())


def test_without_low_bit_layers_there_is_no_share():
    counter = WeightFlips()
    assert counter.update({}) == counter.update({}) == {}
