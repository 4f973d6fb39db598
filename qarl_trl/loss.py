"""TBPO, the trust-band objective: its bounds and its weight, in float32 (paper Sec. 3.2, Eq. 5 and Appendix E; docs/paper_map.md).

The loss uses only the geometric mean `r` of a completion's token ratios, learner now over learner at rollout time:

    loss = - mean_i( w_i * clip(r_i) * A_i )      A > 0: clip(r) = min(r, 1 + eps_h)
                                                  A < 0: clip(r) = clamp(r, 1 - delta_l, 1 + delta_h)

Outside its band the clipped ratio is constant, so the completion gives no gradient. The run computes this loss by TRL's own
`GRPOTrainer._compute_loss` with `loss_type="grpo"` and `importance_sampling_level="sequence"`, which computes

    - min( min(r, delta) * A, clamp(r, 1 - epsilon, 1 + epsilon_high) * A )

For A > 0 the minimum takes the smaller ratio, `min(r, 1 + epsilon_high)`: the lower bound never binds. For A < 0 it takes the larger
of `min(r, delta)` and the clamped ratio: `clamp(r, 1 - epsilon, delta)`, as long as `delta >= 1 + epsilon_high`. So with
`epsilon = delta_l`, `epsilon_high = eps_h` and `delta = 1 + delta_h` it is TBPO ([`clip_to`]), and `w` ([`mismatch_weight`]) takes
the place of TRL's importance sampling weight. tests/test_loss.py compares loss and gradient with the formula written out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class TrustBand:
    """Bounds of the sequence ratio, by the sign of the advantage; `ValueError` for bounds that leave no band."""

    epsilon_high: float  # advantage > 0: ratio at most `1 + epsilon_high`. The paper's eps_h, 4e-4
    delta_low: float  # advantage < 0: ratio at least `1 - delta_low`. The paper's delta_l, 3e-4
    delta_high: float  # advantage < 0: ratio at most `1 + delta_high`. The paper's delta_h, 7e-4
    mismatch_cap: float  # the mismatch weight stays in `[1 / mismatch_cap, mismatch_cap]`. The paper's c, 2

    def __post_init__(self) -> None:
        for name in ("epsilon_high", "delta_low", "delta_high"):
            if not getattr(self, name) > 0:
                raise ValueError(f"tbpo_{name}={getattr(self, name)} must be > 0: a band of width 0 trains nothing.")
        if not self.delta_low < 1:
            raise ValueError(f"tbpo_delta_low={self.delta_low} must be < 1, since ratios are positive.")
        if not (self.mismatch_cap > 1 and math.isfinite(self.mismatch_cap)):
            raise ValueError(f"tbpo_mismatch_cap={self.mismatch_cap} must be finite and > 1: weights are in [1/c, c].")


def clip_to(band: TrustBand, trainer: Any) -> None:
    """Make the loss of a `GRPOTrainer` clip as TBPO does; see the module's docstring. `band.delta_high >= band.epsilon_high`."""
    trainer.loss_type, trainer.importance_sampling_level = "grpo", "sequence"
    trainer.epsilon_low, trainer.epsilon_high = band.delta_low, band.epsilon_high
    trainer.args.delta = 1 + band.delta_high  # TRL reads it from there


def filter_advantages(advantages: Tensor, kind: str) -> Tensor:
    """The advantages for the loss, same shape: unchanged (`"none"`), or with negative ones set to 0 (`"positive"`)."""
    return advantages.clamp(min=0.0) if kind == "positive" else advantages


def loss_mask(inputs: dict[str, Any]) -> Tensor:
    """Mask of the tokens that count in TRL's loss, `(B, T)`: completion mask times tool mask."""
    mask = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


def sequence_log_ratio(logps: Tensor, base_logps: Tensor, mask: Tensor) -> Tensor:
    """Mean log-prob difference over the unmasked tokens of each completion, (B, T) -> (B,), 0 for an empty one; float32, as bands are 5e-4 wide."""
    mask = mask.bool()
    # `where`, not a product: a NaN at a masked position would survive a multiplication by zero.
    difference = torch.where(mask, logps.float() - base_logps.float(), 0.0)
    return difference.sum(-1) / mask.sum(-1).clamp(min=1)


def mismatch_weight(old_logps: Tensor, sampling_logps: Tensor, mask: Tensor, cap: float) -> Tensor:
    """
    Capped weight of the engine's samples under the learner, `exp(clamp(log w, -log c, log c))` (Eq. 5): float32 `(B,)`, detached.

    The log-probs `(B, T)` are those of the learner at rollout time and of the engine. Tokens that the engine could not score (NaN)
    count as matched: their difference is zero.
    """
    sampling_logps = torch.where(sampling_logps.isnan(), old_logps, sampling_logps)
    log_weight = sequence_log_ratio(old_logps, sampling_logps, mask)
    return log_weight.clamp(-math.log(cap), math.log(cap)).exp().detach()
