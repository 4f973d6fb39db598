"""The mismatch between engine and learner at rollout time (paper Fig. 4).

Every statistic of it counts only tokens that are masked in and that the engine could score.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..loss import mismatch_weight


if TYPE_CHECKING:
    from ..config import QaRLConfig


# Share of tokens without a log-prob of the engine. TRL gives them weight 1, which is meant for single ones.
MOST_UNSCORED = 0.5


def mismatch_metrics(
    old_logps: Tensor, sampling_logps: Tensor, mask: Tensor, cap: float, gather: Callable[[Tensor], Tensor]
) -> dict[str, float]:
    """What is logged as `mismatch/*` of one rollout batch, `(B, T)` on each process; see docs/metrics.md."""
    stats = mismatch_sums(old_logps, sampling_logps, mask) | weight_stats(old_logps, sampling_logps, mask, cap)
    stats = reduce_stats(stats, gather)
    tokens = max(stats.pop("tokens_sum"), 1)
    means = {"logp_diff_mean": stats.pop("logp_diff_sum") / tokens, "kl_k3": stats.pop("k3_sum") / tokens}
    return means | {"logp_diff_max": stats.pop("logp_diff_max")} | stats


@torch.no_grad()
def mismatch_sums(old_logps: Tensor, sampling_logps: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """
    Summable statistics of the mismatch between the learner at rollout time and the engine (NaN where it has no value), `(B, T)`.

    Returns:
        `dict[str, Tensor]`: float32 scalars `logp_diff_sum` (sum of |difference|, nats), `k3_sum` (sum of
        `exp(d) - 1 - d` with `d = old - sampling`, whose mean estimates KL(engine || learner)), `tokens_sum`, `logp_diff_max`, and
        `unscored_max`, the share of masked-in tokens without a value.
    """
    counted = mask.bool() & ~sampling_logps.isnan()
    difference = torch.where(counted, old_logps.float() - sampling_logps.float(), 0.0)
    return {
        "logp_diff_sum": difference.abs().sum(),
        # expm1: a mismatch of 1e-3 has a term of 5e-7, of which exp(d) - 1 keeps one digit in float32.
        "k3_sum": (difference.expm1() - difference).sum(),
        "tokens_sum": counted.sum().float(),
        "unscored_max": (mask.bool() & sampling_logps.isnan()).sum() / mask.sum().clamp(min=1),
        "logp_diff_max": difference.abs().max() if difference.numel() else difference.new_zeros(()),
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


def reduce_stats(stats: dict[str, Tensor], gather: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """
    The same scalars over all processes, in one collective: `gather` takes `(1, n)` of this process to `(processes, n)`.

    The end of a name says how they combine: `_sum`, `_min`, `_max`, otherwise the mean.
    """
    rows = gather(torch.stack([value.float() for value in stats.values()])[None]).cpu()
    combine = {"sum": torch.sum, "min": torch.min, "max": torch.max}
    ends = (name.rpartition("_")[2] for name in stats)
    return {
        name: combine.get(end, torch.mean)(column).item()
        for name, end, column in zip(stats, ends, rows.unbind(1), strict=True)
    }


def check_mismatch(logp_diff: float, unscored: float, args: QaRLConfig) -> None:
    """
    Stop (`RuntimeError`) at log-probs that are no numbers, and at a mismatch above `args.mismatch_abort_threshold`.

    Args:
        logp_diff (`float`): Mean mismatch over all tokens, nats.
        unscored (`float`): Share of tokens that the engine could not score, in the worst process.
    """
    if not math.isfinite(logp_diff) or unscored > MOST_UNSCORED:
        raise RuntimeError(
            f"Log-probs hold NaN or infinity: the mismatch between engine and learner is {logp_diff} nats per token, and the engine gave "
            f"NaN to {unscored:.0%} of the tokens of a process. Activations overflow in one of the two: compare with "
            "quant_scheme='none', and lower the learning rate if the run was healthy before."
        )
    threshold = args.mismatch_abort_threshold
    if threshold is None or logp_diff <= threshold:
        return
    baseline = "" if args.quantize_learner else " (quantize_learner=False: this mismatch is what the method removes)"
    raise RuntimeError(
        f"The mean log-prob mismatch between engine and learner is {logp_diff:.4f} nats per token, above "
        f"mismatch_abort_threshold={threshold}. Likely causes:\n"
        "  - stale engine: does the mismatch grow with every update? Compare sync/bytes and quant/flip_frac in the log;\n"
        f"  - wrong scheme: the engine and the learner must both run {args.quant_name!r}{baseline};\n"
        f"  - sampling parameters: temperature={args.temperature}, top_p={args.top_p}, top_k={args.top_k}, "
        f"min_p={args.min_p} must describe the distribution that the learner scores;\n"
        "  - kernels: another attention implementation or dtype in the learner than in the engine."
    )
