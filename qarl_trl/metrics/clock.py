"""Time of an optimizer step by part, and the share of quantized weights that it changes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from ..quant.linear import LowBitLayer


class WeightFlips:
    """
    Share of quantized values that changed between two syncs.

    Exact for weights of up to `most` stored bytes; of larger ones an evenly strided sample. Only rows that this process holds.
    """

    def __init__(self, most: int = 524_288) -> None:
        self._most = most
        self._last: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, modules: Iterable[tuple[str, LowBitLayer]]) -> dict[str, float]:
        """`quant/flip_frac` since the last call; empty on the first call or without low-bit layers."""
        changed = total = 0
        for module_name, module in modules:
            for name, weight in module.low_bit_cache.last().items():
                stored = weight.quantized.reshape(-1).view(torch.uint8)
                sample = stored[:: max(1, math.ceil(len(stored) / self._most))].clone()
                last = self._last.get(f"{module_name}.{name}")
                self._last[f"{module_name}.{name}"] = sample
                if last is None or not name:  # "": LoRA's base as the reference model, which does not change
                    continue
                holds_pairs = "weight_packed" in weight.data and weight.scheme.weights.num_bits == 4
                differing = last ^ sample
                values = (differing & 0xF, differing >> 4) if holds_pairs else (differing,)
                changed += sum(int(value.count_nonzero()) for value in values)
                total += sum(value.numel() for value in values)
        return {"quant/flip_frac": changed / total} if total else {}


class StepClock(TrainerCallback):
    """Splits each optimizer step into rollout, weight sync and update."""

    def __init__(
        self,
        engine: Any,  # a `LowBitVLLMGeneration`, which counts the seconds of rollouts and weight syncs, or `None`
        log: Callable[[str, float], None],  # takes a metric's name and value
        flips: Callable[[], dict[str, float]],  # returns the share of quantized values that a sync changed
        after_first: Callable[[], None],  # called after the first step
    ) -> None:
        self._engine, self._log, self._flips, self._after_first = engine, log, flips, after_first
        self._stepped = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._start = time.perf_counter()
        if self._engine is not None:  # leave out what an evaluation generated before this step
            self._engine.reset_clock()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        total, engine = time.perf_counter() - self._start, self._engine
        rollout, sync = (0.0, 0.0) if engine is None else (engine.rollout_seconds, engine.sync_seconds)
        if rollout and engine.num_syncs:  # in this step, or in an evaluation just before it
            self._log("sync/bytes", float(engine.synced_bytes))
            for name, share in self._flips().items():
                self._log(name, share)
        self._log("time/rollout", rollout)
        self._log("time/sync", sync)
        self._log("time/update", total - rollout - sync)
        if not self._stepped:
            self._stepped = True
            self._after_first()
