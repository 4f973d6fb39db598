"""Time of an optimizer step by part, and the share of quantized weights that it changes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from ..quant.quantize import LowBitWeight


# A sample of so many stored bytes of each weight is compared.
SAMPLED_BYTES = 524_288


class WeightFlips:
    """
    Share of quantized values that changed between two syncs. Only rows that this process holds.

    Args:
        most: Weights of up to so many stored bytes are compared whole; of larger ones an evenly strided sample.
    """

    def __init__(self, most: int = SAMPLED_BYTES) -> None:
        self._most = most
        self._last: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, weights: Mapping[str, LowBitWeight]) -> dict[str, float]:
        """
        `quant/flip_frac` since the last call; empty on the first call or without low-bit weights.

        Args:
            weights: The low-bit weights by name, from [`~qarl_trl.quant.store.LowBitStore.kept`]. A name that ends
                with a dot is LoRA's base as the reference model, which does not change.
        """
        changed = 0
        total = 0
        for name, weight in weights.items():
            sample = self._sample(weight)
            last = self._last.get(name)
            self._last[name] = sample
            if last is None or name.endswith("."):
                continue

            for values in _differences(weight, last, sample):
                changed += int(values.count_nonzero())
                total += values.numel()

        if not total:
            return {}
        return {"quant/flip_frac": changed / total}

    def _sample(self, weight: LowBitWeight) -> Tensor:
        stored = weight.quantized.reshape(-1).view(torch.uint8)
        # Even: `ceil` keeps the sample within the limit, and all of the weight is covered.
        stride = max(1, math.ceil(len(stored) / self._most))
        return stored[::stride].clone()


def _differences(weight: LowBitWeight, last: Tensor, sample: Tensor) -> list[Tensor]:
    """Tensors with an entry for each quantized value of two samples, not 0 where it changed."""
    # A byte may hold two 4-bit values, so changed bits are looked at by half bytes.
    differing = last ^ sample
    holds_pairs = "weight_packed" in weight.data and weight.scheme.weights.num_bits == 4
    if holds_pairs:
        return [differing & 0xF, differing >> 4]
    return [differing]


class StepClock(TrainerCallback):
    """
    Splits each optimizer step into rollout, weight sync and update.

    Args:
        engine: A `LowBitVLLMGeneration`, which counts the seconds of rollouts and weight syncs, or `None`.
        log: Takes a metric's name and value.
        flips: Returns the share of quantized values that a sync changed.
    """

    def __init__(
        self,
        engine: Any,
        log: Callable[[str, float], None],
        flips: Callable[[], dict[str, float]],
    ) -> None:
        self._engine = engine
        self._log = log
        self._flips = flips

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._start = time.perf_counter()
        if self._engine is not None:  # leave out what an evaluation generated before this step
            self._engine.reset_clock()
            self._syncs_before = self._engine.num_syncs

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Here the low-bit weights are still those of the sync. At the end of the step a callback may have made newer
        # ones, to save the model or to sample.
        if self._has_synced:
            for name, share in self._flips().items():
                self._log(name, share)

    @property
    def _has_synced(self) -> bool:
        """Whether there was a sync in this step. Not a rollout: those of a `rollout_func` are not timed."""
        return self._engine is not None and self._engine.num_syncs > self._syncs_before

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        total = time.perf_counter() - self._start
        rollout = 0.0
        sync = 0.0
        if self._engine is not None:
            rollout = self._engine.rollout_seconds
            sync = self._engine.sync_seconds

        if self._has_synced:
            self._log("sync/bytes", float(self._engine.synced_bytes))
        self._log("time/rollout", rollout)
        self._log("time/sync", sync)
        # What is left: forward, backward, optimizer, and also rewards and other callbacks.
        self._log("time/update", total - rollout - sync)
