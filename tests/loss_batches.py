"""Random completions for tests of the loss, and what Python floats make of them."""

import math
from types import SimpleNamespace

import references
import torch

from qarl_trl.loss import sequence_log_ratio


# WIDE has bounds a hundred times as far apart, which float32 resolves well.
PAPER = {"epsilon_high": 4e-4, "delta_low": 3e-4, "delta_high": 7e-4, "mismatch_cap": 2.0}
WIDE = {"epsilon_high": 0.03, "delta_low": 0.04, "delta_high": 0.07, "mismatch_cap": 1.2}

# The cap of the weights that batches get, whatever the band.
CAP = 2.0


def random_batch(seed, band=PAPER):
    """Completions in, beyond and on their bounds; holes, NaNs, zero advantages, a completion without tokens."""
    generator = torch.Generator().manual_seed(seed)
    size = 6
    length = 9

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    def chance(share, *shape):
        return torch.rand(*shape, generator=generator) < share

    lengths = torch.randint(1, length + 1, (size, 1), generator=generator)
    # An empty completion, and holes where a tool answered.
    lengths[5] = 0
    completion_mask = (torch.arange(length) < lengths).long()
    tool_mask = (~chance(0.2, size, length)).long()

    old = -normal(size, length).abs() - 0.1
    # The bounds are of the order of the ratio's spread, so every case is common.
    spread = band["delta_low"] + band["delta_high"]
    logps = old + spread * normal(size, length) * math.sqrt(length / 2)
    sampling = old + 0.3 * normal(size, 1) + 0.05 * normal(size, length)
    # An engine has no log-prob for some tokens.
    sampling[chance(0.15, size, length)] = math.nan

    advantages = normal(size)
    # As of a group with equal rewards.
    advantages[chance(0.2, size)] = 0.0
    return SimpleNamespace(
        logps=logps,
        old=old,
        sampling=sampling,
        advantages=advantages,
        completion_mask=completion_mask,
        tool_mask=tool_mask,
        mask=completion_mask * tool_mask,
    )


def without_empty(batch):
    """TRL sums tokens, so a completion without any has no policy term there; here it is a constant."""
    batch.advantages = batch.advantages * (batch.mask.sum(-1) > 0)
    return batch


def with_tie(batch, band):
    """
    `band` moved so that the first completion with a gradient sits exactly on one of its bounds.

    Unmoved where TRL's clip would be another function, with `delta_high < epsilon_high`.
    """
    tied = band | moved_bound(batch)
    if tied["delta_high"] < tied["epsilon_high"]:
        return band
    return tied


def moved_bound(batch):
    """The bound on which the first completion with a gradient sits, by its name."""
    ratios = sequence_log_ratio(batch.logps, batch.old, batch.mask).exp().double()
    for ratio, advantage in zip(ratios.tolist(), batch.advantages.tolist(), strict=True):
        if ratio > 1 and advantage > 0:
            return {"epsilon_high": ratio - 1}
        if ratio > 1 and advantage < 0:
            return {"delta_high": ratio - 1}
        if ratio < 1 and advantage < 0:
            return {"delta_low": 1 - ratio}
    return {}


def reference_weights(batch):
    """The mismatch weights of a batch by Python floats, `(B,)`."""
    weights = []
    for old, sampling, mask in zip(batch.old.tolist(), batch.sampling.tolist(), batch.mask.tolist(), strict=True):
        weights.append(references.mismatch_weight(old, sampling, mask, CAP))
    return torch.tensor(weights)


def reference(batch, band):
    """Loss and gradient by Python floats."""
    loss, gradient = references.tbpo(
        batch.logps.tolist(),
        batch.old.tolist(),
        batch.sampling.tolist(),
        batch.advantages.tolist(),
        batch.mask.tolist(),
        epsilon_high=band["epsilon_high"],
        delta_low=band["delta_low"],
        delta_high=band["delta_high"],
        cap=band["mismatch_cap"],
    )
    return loss, torch.tensor(gradient)


def worst(pairs):
    """Largest difference between (loss, gradient) pairs."""
    differences = []
    for (loss, gradient), (other_loss, other_gradient) in pairs:
        differences.append(abs(loss - other_loss))
        differences.append((gradient - other_gradient).abs().max().item())

    # `max` may pass a NaN over, which compares with nothing.
    assert not math.isnan(sum(differences))
    return max(differences)
