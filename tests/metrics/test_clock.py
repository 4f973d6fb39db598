"""`qarl_trl.metrics.clock`: quantized values that changed, counted by hand.

The clock itself: tests/rollout/test_engine.py.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from qarl_trl.metrics.clock import StepClock, WeightFlips
from qarl_trl.quant import apply_quantization, low_bit_store


FLIPS = "quant/flip_frac"


def two_layers(scheme, in_features=128, out_features=128):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(in_features, out_features), nn.Linear(in_features, out_features))
    return apply_quantization(model, scheme)


def sync(model):
    """What a weight sync leaves for the counter: the low-bit weights of every layer."""
    # The stream quantizes as it goes, so it must run to its end.
    store = low_bit_store(model)
    dict(store.tensors())
    return store.kept()


def move_weight(layer, scale):
    with torch.no_grad():
        layer.weight += scale * torch.randn_like(layer.weight)


def quantized_values_of(layer):
    """One number for each quantized value, whatever the layout."""
    low_bit = layer.low_bit()
    stored = low_bit.quantized.view(torch.uint8)
    # W4A8 has a byte for each of its 4-bit values, under the name `weight`.
    holds_pairs = "weight_packed" in low_bit.tensors and layer.scheme.weights.num_bits == 4
    if holds_pairs:
        return torch.stack((stored & 0xF, stored >> 4), -1).flatten(1)
    return stored


@pytest.mark.parametrize("scheme", ["W4A16", "W8A16", "W8A8", "FP8_DYNAMIC", "NVFP4A16", "W4A8"])
def test_the_quantized_values_that_changed_are_counted(scheme):
    model = two_layers(scheme)
    counter = WeightFlips()
    assert counter.update(sync(model)) == {}
    assert counter.update(sync(model)) == {FLIPS: 0.0}

    # Of two layers one moves: a count of one layer alone, or of layers with a change, would be another share.
    before = torch.stack(list(map(quantized_values_of, model)))
    move_weight(model[0], 0.003)
    after = torch.stack(list(map(quantized_values_of, model)))
    changed, unchanged = (before != after).flatten(1).float().mean(1).tolist()

    assert before.numel() == 2 * 128 * 128  # control: bytes would be half or twice as many
    assert 0.04 < changed < 1
    assert unchanged == 0
    assert counter.update(sync(model)) == {FLIPS: changed / 2}
    assert counter.update(sync(model)) == {FLIPS: 0.0}


def test_a_sample_of_a_large_layer_estimates_its_share():
    # 131,072 quantized values a layer, of which 4,000 are looked at.
    model = two_layers("W4A16", in_features=512, out_features=256)
    exact = WeightFlips()
    sampled = WeightFlips(most=4000)
    exact.update(sync(model))
    sampled.update(sync(model))

    for layer in model:
        move_weight(layer, 0.001)

    expected = exact.update(sync(model))
    assert 0.02 < expected[FLIPS] < 0.9
    assert sampled.update(sync(model)) == pytest.approx(expected, abs=0.03)  # one standard deviation is 0.006
    # The memory for it is bounded, too.
    assert max(map(len, sampled._last.values())) <= 4000


def test_without_low_bit_layers_there_is_no_share():
    counter = WeightFlips()

    assert counter.update({}) == {}
    assert counter.update({}) == {}


def test_flips_are_those_of_the_sync_also_if_a_callback_saves_at_the_end_of_a_step():
    """Saving makes low-bit weights of the new master weights, which the next sync has, too."""
    model = two_layers("W8A8")
    store = low_bit_store(model)
    counter = WeightFlips()
    logged = []
    engine = SimpleNamespace(num_syncs=0, synced_bytes=1, rollout_seconds=0.0, sync_seconds=0.0, reset_clock=int)
    clock = StepClock(engine, lambda name, value: logged.append((name, value)), lambda: counter.update(store.kept()))

    for step in range(3):
        clock.on_step_begin(None, None, None)
        sync(model)
        engine.num_syncs += 1
        clock.on_pre_optimizer_step(None, None, None)
        move_weight(model[0], 0.003)
        # Once: saves after each step would only shift the shares by a step.
        if step == 1:
            sync(model)
        clock.on_step_end(None, None, None)

    flips = [value for name, value in logged if name == FLIPS]
    assert len(flips) == 2  # the first sync has nothing before it
    assert min(flips) > 0
