"""The mismatch between engine and learner at rollout time (paper Fig. 4).

Every statistic counts only unmasked tokens that the engine could score.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..loss import mismatch_weight


# Maximum share of tokens without a log-prob of the engine. TRL gives them weight 1, which is meant for a few of them.
MOST_UNSCORED = 0.5


@torch.no_grad()
def mismatch_metrics(
    old_logps: Tensor, sampling_logps: Tensor, mask: Tensor, cap: float, gather: Callable[[Tensor], Tensor]
) -> dict[str, float]:
    """
    The metrics `mismatch/*` of one rollout batch, over all processes in one collective; see docs/metrics.md.

    The log-probs `(B, T)` are those of the learner at rollout time and of the engine (NaN where it has none).
    """
    counted = mask.bool() & ~sampling_logps.isnan()
    difference = torch.where(counted, old_logps.float() - sampling_logps.float(), 0.0)
    columns = [
        difference.abs().sum(1),
        difference.abs().amax(1),
        # Its mean estimates KL(engine || learner). expm1, because for a mismatch of 1e-3 the term is 5e-7, of which exp(d) - 1
        # keeps one digit in float32.
        (difference.expm1() - difference).sum(1),
        counted.sum(1),
        mask.bool().sum(1),
        mismatch_weight(old_logps, sampling_logps, mask, cap),
    ]
    rows = gather(torch.stack([column.float() for column in columns], 1)).double().cpu()
    absolute, largest, k3, scored, tokens, weight = rows.unbind(1)
    missing, present = (count.view(-1, len(mask)).sum(1) for count in (tokens - scored, tokens))  # of each process
    at_cap = (weight >= cap * (1 - 1e-6)) | (weight <= (1 + 1e-6) / cap)
    total = scored.sum().clamp(min=1)
    metrics = {
        "logp_diff_mean": absolute.sum() / total,
        "kl_k3": k3.sum() / total,
        "logp_diff_max": largest.max(),
        "unscored_max": (missing / present.clamp(min=1)).max(),
        "seq_weight_mean": weight.mean(),
        "seq_weight_min": weight.min(),
        "seq_weight_max": weight.max(),
        "seq_weight_capped_frac": at_cap.double().mean(),
    }
    return {name: value.item() for name, value in metrics.items()}


def check_mismatch(logp_diff: float, unscored: float, threshold: float | None) -> None:
    """
    Stop (`RuntimeError`) at log-probs that are NaN or infinite, and at a mismatch above the `threshold` (`mismatch_abort_threshold`).

    `logp_diff` is the mean over all tokens in nats, `unscored` the share that the engine could not score in the worst process.
    """
    if not math.isfinite(logp_diff) or unscored > MOST_UNSCORED:
        raise RuntimeError(
            f"Log-probs hold NaN or infinity: the mismatch between engine and learner is {logp_diff} nats per token, and the engine gave "
            f"NaN to {unscored:.0%} of the tokens of a process. Compare with quant_scheme='none', and lower the learning rate if "
            "the run was healthy before."
        )
    if threshold is not None and logp_diff > threshold:
        raise RuntimeError(
            f"The mean log-prob mismatch between engine and learner is {logp_diff:.4f} nats per token, above "
            f"mismatch_abort_threshold={threshold}. Likely causes: a stale engine (the mismatch grows with every update), another "
            "scheme, kernel or dtype than the learner's (quantize_learner=False), or sampling parameters whose distribution the "
            "learner does not score."
        )
