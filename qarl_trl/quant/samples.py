"""
Samples of master weights, to see that somebody wrote to them.

A write through `param.data` leaves no trace. A sample sees what changes a weight as a whole, such as a merged adapter,
noise, or the average that a callback puts in place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from .layers.layer import LowBitLayer


# Numbers of each weight.
SAMPLED = 64

# By device and dtype.
Samples = dict[Any, Tensor]


class Seen(Enum):
    """What a look at trained master weights saw."""

    NOTHING = "they are unchanged since the last look"
    STEP = "a change that was told, or shards, which cannot be compared"
    WRITE = "others, of which nobody had told"


class LastLook:
    """The samples of a model's master weights when they were last looked at."""

    def __init__(self) -> None:
        # Of the weights that nobody trains; `None` before the first look.
        self._untrained: Samples | None = None
        # Of those that are trained, with the count of changes that belongs to it.
        self._trained: tuple[int, Samples] | None = None

    def saw_other_untrained(self, layers: Iterable[LowBitLayer]) -> bool:
        """
        Look at the weights that nobody trains.

        Args:
            layers: The low-bit layers of the model.

        Returns:
            Whether they are others than at the last look. At the first look they are not.
        """
        before = self._untrained
        self._untrained = sample_weights(layers, trained=False)
        return before is not None and not are_equal(before, self._untrained)

    def at_trained(self, layers: Iterable[LowBitLayer], changes: int) -> Seen:
        """
        Look at the weights that are trained.

        Args:
            layers: The low-bit layers of the model.
            changes: How many changes were told until now.

        Returns:
            What changed since the last look.
        """
        before = self._trained
        samples = sample_weights(layers, trained=True)
        self._trained = (changes, samples)

        # An optimizer's step in between also counts if the weights are back where they were: low-bit weights that were
        # kept since then are of others.
        if before is None or before[0] != changes:
            return Seen.STEP
        if not are_equal(before[1], samples):
            return Seen.WRITE
        return Seen.NOTHING

    def count(self, changes: int) -> None:
        """Say that the trained weights of the last look are those after so many changes."""
        if self._trained is not None:
            self._trained = (changes, self._trained[1])


def sample_weights(layers: Iterable[LowBitLayer], trained: bool) -> Samples:
    """
    Some numbers of the master weights of layers, and of the adapters in them.

    Args:
        layers: Those of a frozen base have no master weights, and are left out.
        trained: Take the weights that need a gradient, or those that need none.
    """
    parameters = []
    for layer in layers:
        if layer.frozen_weight is not None:
            continue
        module: Any = layer
        parameters += [parameter for parameter in module.parameters() if parameter.requires_grad == trained]
    return sample_parameters(parameters)


def sample_parameters(parameters: Iterable[Tensor]) -> Samples:
    """
    Copies of some numbers of parameters.

    Args:
        parameters: Whole ones, no shards.
    """
    samples: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        samples.setdefault((parameter.device, parameter.dtype), []).append(sample(parameter))

    # Not one by one: each comparison would wait for the GPU.
    return {kind: torch.cat(of_kind) for kind, of_kind in samples.items()}


def are_equal(before: Samples, now: Samples) -> bool:
    """Whether two samples have the same numbers, of the same devices and dtypes."""
    if before.keys() != now.keys():
        return False
    return all(torch.equal(sample, now[kind]) for kind, sample in before.items())


def sample(weight: Tensor) -> Tensor:
    """
    About `SAMPLED` numbers of a weight, at equal distances: a view.

    They lie in many columns. For most matrices `len(values) // SAMPLED` is a number of whole rows, and all samples
    would be of the first column: nobody would see a head of attention that is switched off.
    """
    values = weight.detach().flatten()
    distance = max(1, len(values) // SAMPLED)
    if weight.dim() > 1 and len(values):
        columns = weight.shape[-1]
        step = max(1, columns // SAMPLED)
        # A sample is in each column that is a multiple of the two numbers' common divisor.
        while math.gcd(distance, columns) > step:
            distance += step
    return values[::distance]
