"""What TRL's batch dictionary means to the loss.

Invariant: a token counts in the ratio, the weight and every metric exactly when it counts in TRL's loss.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .loss import TrustBand, in_band, sequence_ratio


def loss_mask(inputs: dict[str, Any]) -> Tensor:
    """Completion mask times tool mask, `(B, T)`."""
    mask = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


def drop_out_of_band(inputs: dict[str, Any], logps: Tensor, band: TrustBand) -> None:
    """
    Take completions outside their band out of the mean, by rescaling the advantages in `inputs`.

    TRL divides by the batch size B; with advantages times `B / kept` inside the band and 0 outside, that is the mean
    over the `kept` completions.
    """
    advantages = inputs["advantages"]
    ratio = sequence_ratio(logps, inputs.get("old_per_token_logps", logps), loss_mask(inputs))
    kept = in_band(ratio, advantages, band)
    inputs["advantages"] = advantages * kept * (kept.numel() / kept.sum().clamp(min=1))
