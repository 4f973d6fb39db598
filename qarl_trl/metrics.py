"""What is logged about the gap between engine and learner, as pure functions.

Invariant: every statistic counts only tokens that are masked in and that the engine could score (paper Fig. 4 shows the
distributions that these numbers summarize).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .loss import mismatch_weight
from .quant.experts import QuantExperts
from .quant.linear import LowBitLayer
from .quant.quantize import LowBitWeight


@torch.no_grad()
def mismatch_sums(old_logps: Tensor, sampling_logps: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """
    Summable statistics of the token log-probability gap between learner and engine.

    Args:
        old_logps (`Tensor`): Learner at rollout time `(B, T)`.
        sampling_logps (`Tensor`): Engine `(B, T)`, NaN where it has no value.
        mask (`Tensor`): Tokens that count `(B, T)`.

    Returns:
        `dict[str, Tensor]`: float32 scalars `gap_sum` (sum of |difference|, nats), `k3_sum` (sum of
        `exp(d) - 1 - d` with `d = old - sampling`, whose mean estimates KL(engine || learner)), `tokens`, `gap_max`.
    """
    counted = mask.bool() & ~sampling_logps.isnan()
    difference = torch.where(counted, old_logps.float() - sampling_logps.float(), 0.0)
    return {
        "gap_sum": difference.abs().sum(),
        # expm1: a gap of 1e-3 has a term of 5e-7, of which exp(d) - 1 keeps one digit in float32.
        "k3_sum": (difference.expm1() - difference).sum(),
        "tokens": counted.sum().float(),
        "gap_max": difference.abs().max() if difference.numel() else difference.new_zeros(()),
    }


@torch.no_grad()
def weight_stats(old_logps: Tensor, sampling_logps: Tensor, mask: Tensor, cap: float) -> dict[str, Tensor]:
    """Mean, extremes and capped share of the sequence mismatch weight `(B,)`."""
    weight = mismatch_weight(old_logps, sampling_logps, mask, cap)
    at_cap = (weight >= cap * (1 - 1e-6)) | (weight <= (1 + 1e-6) / cap)
    return {
        "seq_weight_mean": weight.mean(),
        "seq_weight_min": weight.min(),
        "seq_weight_max": weight.max(),
        "seq_weight_capped_frac": at_cap.float().mean(),
    }


class CodeFlips:
    """
    Share of codes that changed between two publishes.

    Keeps at most `words` machine words a layer, evenly strided: exact for layers of up to eight times as many 4-bit
    codes, a sample of that size beyond. The experts of a layer share its `words`.
    """

    def __init__(self, words: int = 131_072) -> None:
        self._words = words
        self._last: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, modules: Iterable[tuple[str, LowBitLayer]]) -> float | None:
        """Compare with the last call and remember; `None` on the first call or without low-bit layers."""
        changed = total = 0
        for module_name, module in modules:
            parts = _named_weights(module_name, module)
            for name, weight in parts.items():
                codes, codes_per_byte = self._sample(weight, max(1, self._words // len(parts)))
                last = self._last.get(name)
                if last is not None:
                    changed += _differing_codes(last, codes, codes_per_byte)
                    total += codes.numel() * codes_per_byte
                self._last[name] = codes
        return changed / total if total else None

    @staticmethod
    def _sample(weight: LowBitWeight, most: int) -> tuple[Tensor, int]:
        """A strided copy of the code bytes, and how many codes each byte holds."""
        word = weight.codes.element_size()
        words = weight.codes.reshape(-1).view(torch.uint8).view(-1, word)
        stride = max(1, -(-len(words) // most))
        return words[::stride].clone(), 2 if word == 4 else 1


def _named_weights(name: str, module: LowBitLayer) -> dict[str, LowBitWeight]:
    if isinstance(module, QuantExperts):
        return {f"{name}.{local}": weight for local, weight in module.last_low_bits()}
    return {name: module.last_low_bit}


def _differing_codes(a: Tensor, b: Tensor, codes_per_byte: int) -> int:
    difference = a ^ b
    if codes_per_byte == 1:
        return int(difference.count_nonzero())
    return int((difference & 0xF).count_nonzero() + (difference >> 4).count_nonzero())
