"""Where a loss stops following a ratio, by the sign of the advantage."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ..loss import TrustBand


# TRL's losses with a clip. Those that weigh ratios softly (sapo, vespo) or clip a weight that is not differentiated (cispo) have none.
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


@dataclass(frozen=True)
class Bounds:
    """Ratios at which a loss stops; infinite, or 0 below, where it never does."""

    pos_high: float = math.inf
    neg_low: float = 0.0
    neg_high: float = math.inf

    @classmethod
    def of_band(cls, band: TrustBand) -> Bounds:
        """The bounds of TBPO."""
        return cls(1 + band.epsilon_high, 1 - band.delta_low, 1 + band.delta_high)

    @property
    def exist(self) -> dict[str, bool]:
        """Which edges there are, by name."""
        return {name: 0 < edge < math.inf for name, edge in vars(self).items()}

    def beyond(self, ratio: Tensor, advantages: Tensor) -> dict[str, Tensor]:
        """Which ratios lie beyond each edge, bool in the shape that the two arguments broadcast to."""
        positive, negative = advantages > 0, advantages < 0
        return {
            "pos_high": positive & (ratio > self.pos_high),
            "neg_low": negative & (ratio < self.neg_low),
            "neg_high": negative & (ratio > self.neg_high),
        }


def clip_bounds(loss_type: str, epsilon_low: float, epsilon_high: float, delta: float | None) -> Bounds:
    """
    The bounds of TRL's `-min(min(r, delta) A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A)`.

    Without `delta` a negative advantage has no upper one.
    """
    if loss_type not in CLIPPED:
        return Bounds()
    high = 1 + epsilon_high
    if delta is None:
        return Bounds(high, 1 - epsilon_low)
    return Bounds(min(high, delta), 1 - epsilon_low, max(high, delta))
