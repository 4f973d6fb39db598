"""The mismatch between engine and learner at rollout time (paper Fig. 4).

Every statistic counts only unmasked tokens that the engine could score.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..loss import mismatch_weight
from .columns import Mean, gather_columns, kl_terms


# Maximum share of tokens without a log-prob of the engine. TRL gives them weight 1, which is meant for a few of them.
MOST_UNSCORED = 0.5

# A weight so close to its cap is at its cap, relative: exp(log c) in float32 is not always c.
CAP_TOLERANCE = 1e-6


@torch.no_grad()
def mismatch_metrics(
    old_logps: Tensor,
    sampling_logps: Tensor,
    mask: Tensor,
    cap: float,
    gather: Callable[[Tensor], Tensor],
) -> dict[str, float]:
    """
    The metrics `mismatch/*` of a rollout batch, over all processes, in one collective (docs/metrics.md).

    Args:
        old_logps: Log-probs by the learner at rollout time, `(B, T)`.
        sampling_logps: Log-probs by the engine, `(B, T)`, NaN where it has none.
        mask: 1 for the tokens that count, `(B, T)`; at least one of all processes.
        cap: The cap of the mismatch weight, c of TBPO.
        gather: Puts the rows of all processes one after the other.

    Returns:
        The metrics by name, log-probs in nats: the same in all processes.
    """
    columns = _completion_columns(old_logps, sampling_logps, mask, cap)
    # Sums over a whole rollout batch, of millions of tokens in a large run, need float64.
    gathered = {name: column.double() for name, column in gather_columns(columns, gather).items()}

    total = gathered["scored"].sum().clamp(min=1).item()
    # Of an answer that is left out of the loss the weight is 1, and means nothing.
    weight = gathered["weight"][gathered["tokens"] > 0]
    at_cap = (weight >= cap * (1 - CAP_TOLERANCE)) | (weight <= (1 + CAP_TOLERANCE) / cap)

    # Over tokens, not over completions: long answers count more.
    return {
        "logp_diff_mean": Mean(gathered["absolute"].sum().item() / total, total),
        "kl_k3": Mean(gathered["k3"].sum().item() / total, total),
        "logp_diff_max": gathered["largest"].max().item(),
        "unscored_max": _unscored_by_process(gathered, len(mask)).max().item(),
        "seq_weight_mean": Mean(weight.mean().item(), len(weight)),
        "seq_weight_min": weight.min().item(),
        "seq_weight_max": weight.max().item(),
        "seq_weight_capped_frac": Mean(at_cap.double().mean().item(), len(weight)),
    }


def _completion_columns(old_logps: Tensor, sampling_logps: Tensor, mask: Tensor, cap: float) -> dict[str, Tensor]:
    """Numbers `(B,)` that the metrics need of each completion."""
    scored = mask.bool() & ~sampling_logps.isnan()
    # `where` also drops the NaN of tokens that the engine did not score, which a product with a mask would keep.
    difference = torch.where(scored, old_logps.float() - sampling_logps.float(), 0.0)

    return {
        "absolute": difference.abs().sum(1),
        "largest": difference.abs().amax(1),
        # The engine sampled, so this estimates KL(engine || learner).
        "k3": kl_terms(difference).sum(1),
        "scored": scored.sum(1),
        "tokens": mask.bool().sum(1),
        "weight": mismatch_weight(old_logps, sampling_logps, mask, cap),
    }


def _unscored_by_process(columns: dict[str, Tensor], rows: int) -> Tensor:
    """Share of the tokens of each process that the engine could not score, `(processes,)`; each has so many `rows`."""
    # The rows of a process stand together, see `gather_columns`.
    tokens = columns["tokens"].view(-1, rows).sum(1)
    scored = columns["scored"].view(-1, rows).sum(1)
    return (tokens - scored) / tokens.clamp(min=1)


def check_mismatch(logp_diff: float, unscored: float, threshold: float | None) -> None:
    """
    Stop a run whose log-probs are no numbers, or whose engine and learner are too far apart.

    Args:
        logp_diff: Mean over all tokens of the absolute log-prob difference, in nats (`logp_diff_mean`).
        unscored: Share of tokens that the engine could not score, in the worst process (`unscored_max`).
        threshold: Maximum of `logp_diff`, in nats (`mismatch_abort_threshold`); `None` for no maximum.

    Raises:
        RuntimeError: in all processes, since all have the same metrics.
    """
    # A NaN of the learner is in the mean. Those of the engine are left out of it, so their share is looked at.
    if not math.isfinite(logp_diff) or unscored > MOST_UNSCORED:
        raise RuntimeError(
            f"Log-probs hold NaN or infinity: the mismatch between engine and learner is {logp_diff} nats per token, "
            f"and the engine gave NaN to {unscored:.0%} of the tokens of a process. Compare with quant_scheme='none', "
            "and lower the learning rate if the run was healthy before."
        )

    # After the check for NaN, because no comparison with one is true.
    if threshold is not None and logp_diff > threshold:
        raise RuntimeError(
            f"The mean log-prob mismatch between engine and learner is {logp_diff:.4f} nats per token, above "
            f"mismatch_abort_threshold={threshold}. Likely causes: a stale engine (the mismatch grows with every "
            "update), another scheme, kernel or dtype than the learner's (quantize_learner=False), or sampling "
            "parameters whose distribution the learner does not score."
        )
