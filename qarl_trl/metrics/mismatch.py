"""The gap between engine and learner at rollout time (paper Fig. 4).

Every statistic of it counts only tokens that are masked in and that the engine could score.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..loss import mismatch_weight


if TYPE_CHECKING:
    from ..config import QaRLConfig


def mismatch_metrics(
    old_logps: Tensor, sampling_logps: Tensor, mask: Tensor, cap: float, gather: Callable[[Tensor], Tensor]
) -> dict[str, float]:
    """What is logged as `mismatch/*` of one rollout batch, `(B, T)` on each process; see docs/metrics.md."""
    stats = mismatch_sums(old_logps, sampling_logps, mask) | weight_stats(old_logps, sampling_logps, mask, cap)
    stats = reduce_stats(stats, gather)
    tokens = max(stats.pop("tokens_sum"), 1)
    means = {"logp_gap_mean": stats.pop("gap_sum") / tokens, "kl_k3": stats.pop("k3_sum") / tokens}
    return means | {"logp_gap_max": stats.pop("gap_max")} | stats


@torch.no_grad()
def mismatch_sums(old_logps: Tensor, sampling_logps: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """
    Summable statistics of the gap between the learner at rollout time and the engine (NaN where it has no value), `(B, T)`.

    Returns:
        `dict[str, Tensor]`: float32 scalars `gap_sum` (sum of |difference|, nats), `k3_sum` (sum of
        `exp(d) - 1 - d` with `d = old - sampling`, whose mean estimates KL(engine || learner)), `tokens_sum`, `gap_max`.
    """
    counted = mask.bool() & ~sampling_logps.isnan()
    difference = torch.where(counted, old_logps.float() - sampling_logps.float(), 0.0)
    return {
        "gap_sum": difference.abs().sum(),
        # expm1: a gap of 1e-3 has a term of 5e-7, of which exp(d) - 1 keeps one digit in float32.
        "k3_sum": (difference.expm1() - difference).sum(),
        "tokens_sum": counted.sum().float(),
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


def check_mismatch(gap: float, args: QaRLConfig) -> None:
    """Stop (`RuntimeError`) at a gap, in nats per token, that is NaN or above `args.mismatch_abort_threshold`."""
    threshold = args.mismatch_abort_threshold
    if threshold is None or gap <= threshold:
        return
    baseline = "" if args.quant_learner else " (quant_learner=False: this gap is what the method removes)"
    raise RuntimeError(
        f"The mean log-prob gap between engine and learner is {gap:.4f} nats per token, above "
        f"mismatch_abort_threshold={threshold}. Likely causes:\n"
        "  - stale engine: does the gap grow with every update? Compare publish/bytes and quant/code_flip_frac in the log;\n"
        f"  - wrong scheme: the engine and the learner must both run {args.quant_name!r}{baseline};\n"
        f"  - sampling parameters: temperature={args.temperature}, top_p={args.top_p}, top_k={args.top_k}, "
        f"min_p={args.min_p} must describe the distribution that the learner scores;\n"
        "  - kernels: another attention implementation or dtype in the learner than in the engine."
    )
