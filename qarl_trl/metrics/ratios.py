"""How far the policy moved since it sampled: shares beyond TBPO's bounds, extremes, quantiles (paper Figs. 4 and 5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor

from ..loss import TrustBand, loss_mask, sequence_log_ratio


# Two passes of one model over one batch shape agree to float32 rounding.
FIRST_RATIO_TOLERANCE = 1e-6

logger = get_logger(__name__)


@torch.no_grad()
def measure_ratios(
    logps: Tensor,  # `(B, T)` of the current policy
    batch: dict[str, Any],  # TRL's micro-batch
    errors: Tensor,  # mask of its error tokens, bool `(B, T)`
    band: TrustBand,  # TBPO's, also with another loss
    prefix: str,  # for the shares beyond the band with another loss, whose own shares TRL logs (`clip_ratio/*`)
    gather: Callable[[Tensor], Tensor],  # puts the rows of all processes one after the other
    fresh: bool,  # whether there was no optimizer step since the rollout, so that every ratio must be 1
) -> dict[str, float]:
    """`ratio/*` and `error_tokens/*` of a micro-batch over all processes, in one collective; see docs/metrics.md."""
    old = batch.get("old_per_token_logps", logps)
    columns = completion_columns(logps, old, loss_mask(batch), batch["advantages"], errors)
    rows = gather(torch.stack([column.float() for column in columns.values()], 1)).cpu()
    metrics = ratio_metrics(dict(zip(columns, rows.unbind(1), strict=True)), band, prefix)
    off = max(abs(metrics["ratio/min"] - 1), abs(metrics["ratio/max"] - 1))
    if fresh and off > FIRST_RATIO_TOLERANCE:
        logger.warning_once(
            "Sequence ratios are not 1 before any update of a rollout batch (ratio/min, ratio/max): `old` and current log-probs come "
            "from different kernels or batch shapes, and the loss clips that noise."
        )
    return metrics


def completion_columns(
    logps: Tensor, old: Tensor, mask: Tensor, advantages: Tensor, errors: Tensor
) -> dict[str, Tensor]:
    """Numbers `(B,)` that the metrics need of each completion, from tensors `(B, T)` and advantages `(B,)`."""
    counted = mask.bool()
    difference = torch.where(counted, logps.float() - old.float(), 0.0)
    return {
        "advantage": advantages,
        "ratio": sequence_log_ratio(logps, old, mask).exp(),
        "tokens": counted.sum(1),
        "k3": (difference.expm1() - difference).sum(1),  # expm1: see `mismatch_metrics`
        "errors": (errors & counted).sum(1),
    }


def ratio_metrics(columns: dict[str, Tensor], band: TrustBand, prefix: str) -> dict[str, float]:
    """The metrics, from columns `(N,)` of the completions of all processes; metrics without a value are left out."""
    ratio, advantages, tokens = columns["ratio"], columns["advantage"], columns["tokens"].double().sum()
    positive, negative = advantages > 0, advantages < 0
    metrics = {
        "ratio/min": ratio.min(),
        "ratio/max": ratio.max(),
        f"ratio/{prefix}pos_high_frac": (positive & (ratio > 1 + band.epsilon_high)).double().mean(),
        f"ratio/{prefix}neg_low_frac": (negative & (ratio < 1 - band.delta_low)).double().mean(),
        f"ratio/{prefix}neg_high_frac": (negative & (ratio > 1 + band.delta_high)).double().mean(),
    }
    if tokens:
        metrics["ratio/kl_k3"] = columns["k3"].double().sum() / tokens
        metrics["error_tokens/frac"] = columns["errors"].double().sum() / tokens
    for sign, rows in (("pos", positive), ("neg", negative)):
        if rows.any():
            quantiles = ratio[rows].quantile(torch.tensor([0.5, 0.99]))
            metrics |= {f"ratio/{sign}_q50": quantiles[0], f"ratio/{sign}_q99": quantiles[1]}
    return {name: value.item() for name, value in metrics.items()}
