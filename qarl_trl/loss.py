"""TBPO, the trust-band objective (paper Sec. 3.2, Eq. 5 and Appendix E; recipes/paper.md).

The loss uses only the geometric mean `r` of a completion's token ratios, learner now over learner at rollout time, and
the capped weight `w` of the engine's sample under the learner:

    loss = - mean_i( w_i * clip(r_i) * A_i )      A > 0: clip(r) = min(r, 1 + eps_h)
                                                  A < 0: clip(r) = clamp(r, 1 - delta_l, 1 + delta_h)

Everything is float32: bfloat16 stores 1 + 4e-4, the paper's smallest bound, as 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class TrustBand:
    """
    Bounds of the sequence ratio, by the sign of the advantage (paper Table 2), and the cap of the mismatch weight.

    Args:
        epsilon_high: For an advantage above 0 the ratio counts up to `1 + epsilon_high`. The paper's eps_h, 4e-4.
        delta_low: For an advantage below 0 the ratio counts down to `1 - delta_low`. The paper's delta_l, 3e-4.
        delta_high: For an advantage below 0 the ratio counts up to `1 + delta_high`. The paper's delta_h, 7e-4.
        mismatch_cap: The mismatch weight stays in `[1 / mismatch_cap, mismatch_cap]`. The paper's c, 2.

    Raises:
        ValueError: if the bounds leave no band.
    """

    epsilon_high: float
    delta_low: float
    delta_high: float
    mismatch_cap: float

    def __post_init__(self) -> None:
        for name in ("epsilon_high", "delta_low", "delta_high"):
            if not getattr(self, name) > 0:
                raise ValueError(f"tbpo_{name}={getattr(self, name)} must be > 0: a band of width 0 trains nothing.")

        if not self.delta_low < 1:
            raise ValueError(f"tbpo_delta_low={self.delta_low} must be < 1, since ratios are positive.")

        if not (self.mismatch_cap > 1 and math.isfinite(self.mismatch_cap)):
            raise ValueError(f"tbpo_mismatch_cap={self.mismatch_cap} must be finite and > 1: weights are in [1/c, c].")


def tbpo_loss(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    band: TrustBand,
    weight: Tensor | None = None,
    kept: Tensor | None = None,
) -> Tensor:
    """
    The loss of a micro-batch, which a run with `loss_type="tbpo"` differentiates (paper Sec. 3.2).

    TRL's two-sided sequence clip with these bounds is the same function where `delta_high >= epsilon_high`, bit for
    bit (tests/test_loss.py).

    Args:
        logps: Log-probs of the completions' tokens by the learner now, `(B, T)` float32.
        old_logps: The same by the learner at rollout time, `(B, T)` float32, from the same kernels: the band is
            narrower than the difference between two kernels.
        advantages: One number for each completion, `(B,)`.
        mask: 1 for the tokens that count, `(B, T)`.
        band: The bounds.
        weight: The mismatch weight of each completion, `(B,)` float32, from [`mismatch_weight`]; `None` counts all
            alike.
        kept: A factor for each completion or token, `(B, 1)` or `(B, T)`: TRL's masks for off-policy completions and
            for tokens of low entropy.

    Returns:
        The loss, a scalar. A completion outside of its band is constant, so it gives no gradient at all.
    """
    # The mean over tokens, not the sum of a plain importance ratio: the band means the same at every length.
    ratio = sequence_log_ratio(logps, old_logps, mask).exp()

    # For A > 0 there is no lower bound: a good completion that became less likely keeps its gradient. For A < 0 an
    # upper bound keeps a ratio that grows, of a bad completion, from dominating the update.
    clipped = torch.where(
        advantages > 0,
        ratio.clamp(max=1 + band.epsilon_high),
        # Outside of its bounds `clamp` is constant, which is what drops a completion from the gradient.
        ratio.clamp(1 - band.delta_low, 1 + band.delta_high),
    )
    per_token = -(clipped * advantages).unsqueeze(1)

    # After the clip: a mask of tokens must not change the ratio, which is of the whole completion.
    if kept is not None:
        per_token = per_token * kept
    if weight is not None:
        per_token = per_token * weight.unsqueeze(1)

    # Without `kept` each token of a completion has the same value, so this is the value itself. With it, a token that
    # is dropped counts as 0 and stays in the number of tokens. A completion without tokens counts as 0.
    per_completion = (per_token * mask).sum(-1) / mask.sum(-1).clamp(min=1)
    return per_completion.mean()


def mismatch_weight(old_logps: Tensor, sampling_logps: Tensor, mask: Tensor, cap: float) -> Tensor:
    """
    Capped weight of the engine's samples under the learner, `exp(clamp(log w, -log c, log c))` (paper Eq. 5).

    Args:
        old_logps: Log-probs by the learner at rollout time, `(B, T)` float32.
        sampling_logps: Log-probs by the engine, `(B, T)` float32, NaN where it has none. Such tokens count as matched.
        mask: 1 for the tokens that count, `(B, T)`.
        cap: c, above 1.

    Returns:
        Float32 `(B,)` in `[1 / c, c]`, detached.
    """
    # NaN is how TRL marks a token that vLLM did not score. Its difference becomes 0, so its weight is 1.
    sampling_logps = torch.where(sampling_logps.isnan(), old_logps, sampling_logps)
    log_weight = sequence_log_ratio(old_logps, sampling_logps, mask)

    # Clamped before `exp`, so that no difference can overflow. Detached: it weighs samples, and is no path to the
    # policy.
    log_cap = math.log(cap)
    return log_weight.clamp(-log_cap, log_cap).exp().detach()


def sequence_log_ratio(logps: Tensor, base_logps: Tensor, mask: Tensor) -> Tensor:
    """
    Mean log-prob difference over the unmasked tokens of each completion, `(B, T)` to float32 `(B,)`; 0 for an empty
    one.
    """
    mask = mask.bool()
    # `where`, not a product: a NaN at a masked position would survive a multiplication by zero.
    difference = torch.where(mask, logps.float() - base_logps.float(), 0.0)
    # An empty completion (all tokens masked) has a ratio of exp(0) = 1.
    return difference.sum(-1) / mask.sum(-1).clamp(min=1)


def filter_advantages(advantages: Tensor, kind: str) -> Tensor:
    """The advantages for the loss, same shape: unchanged (`"none"`), or with negative ones set to 0 (`"positive"`)."""
    if kind == "positive":
        return advantages.clamp(min=0.0)
    return advantages


def loss_mask(inputs: dict[str, Any]) -> Tensor:
    """Mask of the tokens that count in TRL's loss, `(B, T)`: completion mask times tool mask."""
    if "tool_mask" in inputs:
        return inputs["completion_mask"] * inputs["tool_mask"]
    return inputs["completion_mask"]
