"""Time of an optimizer step by part, and the share of quantized weights that it changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from ..quant.experts import QuantExperts
from ..quant.linear import LowBitLayer
from ..quant.quantize import LowBitWeight


if TYPE_CHECKING:
    from ..config import QaRLConfig


class WeightFlips:
    """
    Share of quantized values that changed between two syncs.

    Keeps at most `words` machine words a layer, evenly strided: exact for layers of up to eight times as many 4-bit
    quantized values, a sample of that size beyond. The two parameters of a layer's experts share its `words`. Where each process holds its
    own rows, of those.
    """

    def __init__(self, words: int = 131_072) -> None:
        self._words = words
        self._last: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, modules: Iterable[tuple[str, LowBitLayer]]) -> dict[str, float]:
        """
        Compare with the last call and remember.

        Returns:
            `dict[str, float]`: `quant/flip_frac`; empty on the first call or without low-bit layers.
        """
        changed = total = 0
        for module_name, module in modules:
            parts = _named_weights(module_name, module)
            stored = sum(weight.quantized.numel() for weight in parts.values())
            for name, weight in parts.items():
                sample = _sample(weight, max(1, self._words * weight.quantized.numel() // stored))
                last = self._last.get(name)
                if last is not None:
                    nibbles = _holds_pairs(weight)
                    changed += _differing_quantized(last, sample, nibbles)
                    total += sample.numel() * (2 if nibbles else 1)
                self._last[name] = sample
        return {"quant/flip_frac": changed / total} if total else {}


def _sample(weight: LowBitWeight, most: int) -> Tensor:
    """At most `most` words of the quantized values, evenly strided, as bytes `(words, bytes of a word)`."""
    words = weight.quantized.reshape(-1).view(torch.uint8).view(-1, weight.quantized.element_size())
    return words[:: max(1, -(-len(words) // most))].clone()


def _holds_pairs(weight: LowBitWeight) -> bool:
    """Whether a byte of the stored quantized values holds two of them."""
    return "weight_packed" in weight.tensors and weight.scheme.weights.num_bits == 4


def _named_weights(name: str, module: LowBitLayer) -> dict[str, LowBitWeight]:
    if isinstance(module, QuantExperts):
        return {f"{name}.{local}": weight for local, weight in module.last_low_bits().items()}
    return {name: module.last_low_bit}


def _differing_quantized(a: Tensor, b: Tensor, pairs: bool) -> int:
    difference = a ^ b
    if not pairs:
        return int(difference.count_nonzero())
    return int((difference & 0xF).count_nonzero() + (difference >> 4).count_nonzero())


class StepClock(TrainerCallback):
    """
    Splits each optimizer step into rollout, weight sync and update.

    Args:
        engine (`LowBitVLLMGeneration`, *optional*): Counts the seconds of rollouts and weight syncs.
        log (`Callable`): Takes a metric's name and value.
        flips (`Callable`): Metrics of the quantized weights that changed, after a weight sync.
        after_first (`Callable`): Called after the first step.
    """

    def __init__(
        self,
        engine: Any,
        log: Callable[[str, float], None],
        flips: Callable[[], dict[str, float]],
        after_first: Callable[[], None],
    ) -> None:
        self._engine, self._log, self._flips, self._after_first = engine, log, flips, after_first
        self._start = time.perf_counter()
        self._stepped = False

    def on_step_begin(self, args: QaRLConfig, state: Any, control: Any, **kwargs: Any) -> None:
        self._start = time.perf_counter()
        if self._engine is not None:  # what an evaluation generated does not belong to this step
            self._engine.reset_clock()

    def on_step_end(self, args: QaRLConfig, state: Any, control: Any, **kwargs: Any) -> None:
        total, engine = time.perf_counter() - self._start, self._engine
        rollout, sync = (0.0, 0.0) if engine is None else (engine.rollout_seconds, engine.sync_seconds)
        if rollout and engine.last_sync:  # of this step, or of an evaluation just before it
            self._log("sync/bytes", float(engine.last_sync.num_bytes))
            for name, share in self._flips().items():
                self._log(name, share)
        self._log("time/rollout", rollout)
        self._log("time/sync", sync)
        self._log("time/update", total - rollout - sync)
        if not self._stepped:
            self._stepped = True
            self._after_first()
