"""How far the policy moved since it sampled: shares beyond TBPO's bounds, extremes, quantiles (paper Figs. 4, 5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor

from ..loss import TrustBand, loss_mask, sequence_log_ratio
from .columns import Mean, gather_columns, kl_terms


# Two passes of one model over one batch shape agree to float32 rounding.
FIRST_RATIO_TOLERANCE = 1e-6

# By their names in the log.
QUANTILES = {"q50": 0.5, "q99": 0.99}

logger = get_logger(__name__)


@torch.no_grad()
def measure_ratios(
    logps: Tensor,
    batch: dict[str, Any],
    errors: Tensor,
    band: TrustBand,
    prefix: str,
    gather: Callable[[Tensor], Tensor],
    fresh: bool,
) -> dict[str, float]:
    """
    The metrics `ratio/*` and `error_tokens/*` of a micro-batch, over all processes (docs/metrics.md).

    Args:
        logps: Log-probs by the learner now, `(B, T)`.
        batch: TRL's micro-batch. Without log-probs at rollout time all ratios are 1.
        errors: Mask of its error tokens, bool `(B, T)`.
        band: TBPO's bounds, also with another loss.
        prefix: For the names of the shares beyond the bounds with another loss, whose own shares TRL logs
            (`clip_ratio/*`).
        gather: Puts the rows of all processes one after the other.
        fresh: Whether there was no optimizer step since the rollout. Then a ratio that is not 1 gives a warning.

    Returns:
        The metrics by name: the same in all processes.
    """
    # TRL leaves them out where no update comes between rollout and loss.
    old_logps = batch.get("old_per_token_logps", logps)
    mask = loss_mask(batch)
    columns = completion_columns(logps, old_logps, mask, _of_completions(batch["advantages"], mask), errors)
    metrics = ratio_metrics(gather_columns(columns, gather), band, prefix)

    if fresh and "ratio/min" in metrics:
        _warn_unless_one(metrics["ratio/min"], metrics["ratio/max"])
    return metrics


def _of_completions(advantages: Tensor, mask: Tensor) -> Tensor:
    """Advantages `(B,)` as they are, and of those of tokens `(B, T)`, which a subclass may give to TRL, the means."""
    if advantages.dim() == 1:
        return advantages
    return (advantages * mask).sum(1) / mask.sum(1).clamp(min=1)


def _warn_unless_one(smallest: float, largest: float) -> None:
    """Warn once if ratios before any update are not 1."""
    off = max(abs(smallest - 1), abs(largest - 1))
    if off > FIRST_RATIO_TOLERANCE:
        logger.warning_once(
            "Sequence ratios are not 1 before any update of a rollout batch (ratio/min, ratio/max): `old` and current "
            "log-probs come from different kernels or batch shapes, and the loss clips that noise."
        )


def completion_columns(
    logps: Tensor, old_logps: Tensor, mask: Tensor, advantages: Tensor, errors: Tensor
) -> dict[str, Tensor]:
    """
    Numbers `(B,)` that the metrics need of each completion.

    Args:
        logps: Log-probs by the learner now, `(B, T)`.
        old_logps: Log-probs by the learner at rollout time, `(B, T)`.
        mask: 1 for the tokens that count, `(B, T)`.
        advantages: One number for each completion, `(B,)`.
        errors: Mask of error tokens, bool `(B, T)`.
    """
    counted = mask.bool()
    difference = torch.where(counted, logps.float() - old_logps.float(), 0.0)

    return {
        "advantage": advantages,
        "ratio": sequence_log_ratio(logps, old_logps, mask).exp(),
        "tokens": counted.sum(1),
        # The old policy sampled, so this estimates KL(old || now).
        "k3": kl_terms(difference).sum(1),
        "errors": (errors & counted).sum(1),
    }


def ratio_metrics(columns: dict[str, Tensor], band: TrustBand, prefix: str) -> dict[str, float]:
    """
    The metrics of completions, without those that have no value.

    Args:
        columns: Those of [`completion_columns`] for the completions of all processes, float32 `(N,)`.
        band: TBPO's bounds.
        prefix: For the names of the shares beyond the bounds.
    """
    ratio = columns["ratio"]

    # A completion with advantage 0 has no bounds, but it counts among all of which the shares are taken. So does one
    # without a token in the loss, whose ratio is 1.
    positive = columns["advantage"] > 0
    negative = columns["advantage"] < 0

    beyond = {
        "pos_high": positive & (ratio > 1 + band.epsilon_high),
        "neg_low": negative & (ratio < 1 - band.delta_low),
        "neg_high": negative & (ratio > 1 + band.delta_high),
    }

    metrics: dict[str, float] = {}
    for bound, completions in beyond.items():
        # A share of all completions of all processes, so that TRL's mean over micro-batches is the share of the whole.
        metrics[f"ratio/{prefix}{bound}_frac"] = completions.double().mean().item()

    # What has no value is left out, or it would count in TRL's mean over micro-batches.
    counted = columns["tokens"] > 0
    bounded = counted & (positive | negative)
    if bounded.any():
        clipped = torch.stack(list(beyond.values())).any(0)
        share = clipped[bounded].double().mean().item()
        metrics[f"ratio/{prefix}clipped_frac"] = Mean(share, bounded.sum().item())

    tokens = columns["tokens"].double().sum().item()
    if tokens > 0:
        metrics["ratio/min"] = ratio[counted].min().item()
        metrics["ratio/max"] = ratio[counted].max().item()
        metrics["ratio/kl_k3"] = Mean(columns["k3"].double().sum().item() / tokens, tokens)
        metrics["error_tokens/frac"] = Mean(columns["errors"].double().sum().item() / tokens, tokens)

    for sign, completions in (("pos", positive & counted), ("neg", negative & counted)):
        if completions.any():
            quantiles = ratio[completions].quantile(torch.tensor([*QUANTILES.values()]))
            for name, quantile in zip(QUANTILES, quantiles, strict=True):
                metrics[f"ratio/{sign}_{name}"] = quantile.item()

    return metrics
