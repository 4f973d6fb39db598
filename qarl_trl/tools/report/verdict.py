"""What a run's log says about its health, in a few lines, each with what to do. Limits are those of docs/metrics.md."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .runs import Run


FEWEST = 8  # rollout batches below which nothing is said about a trend
NEAR_FLOOR = 3.0  # noise floors; the sync check warns of more
LARGEST_KL = 0.01  # nats per token, engine to learner: a limit that other projects use
NEVER = math.inf
CLIPPED = "Lower learning_rate, or use fewer updates per rollout batch (steps_per_generation)."
# A share in the last quarter of a run, above which values it is to be looked at and is wrong, what it is, and what to do.
LIMITS = (
    ("frac_reward_zero_std", 0.8, NEVER, "{:.0%} of the prompts have equal rewards", "Use easier or harder problems."),
    ("quant/flip_frac", NEVER, 0.3, "each sync changes {:.2%} of the quantized values", "Lower learning_rate."),
    ("ratio/pos_high_frac", 0.3, 0.7, "{:.0%} of the answers are clipped (A > 0, above)", CLIPPED),
    ("ratio/neg_low_frac", 0.3, 0.7, "{:.0%} of the answers are clipped (A < 0, below)", CLIPPED),
    ("ratio/neg_high_frac", 0.3, 0.7, "{:.0%} of the answers are clipped (A < 0, above)", CLIPPED),
    ("completions/clipped_ratio", 0.3, NEVER, "{:.0%} of the answers are cut off", "Raise max_completion_length."),
    ("error_tokens/frac", 0.01, NEVER, "{:.1%} of the tokens stand in loops", "See docs/metrics.md, error tokens."),
)


class Finding(NamedTuple):
    """One line. `level` is "good", "look", "bad", or "unknown" where the log has nothing to judge by."""

    level: str
    text: str
    advice: str = ""


def verdict(run: Run) -> list[Finding]:
    """All that can be said, the most important first."""
    return [*_reward(run), _mismatch(run), *_shares(run)]


def headline(findings: list[Finding]) -> str:
    """The whole run in a word or two."""
    levels = {finding.level for finding in findings}
    return "something is wrong" if "bad" in levels else "look at this" if "look" in levels else "healthy"


def quarters(run: Run, name: str) -> list[float]:
    """Means of a metric over the four quarters of a run; of a short run four times its mean; NaN if it was not logged."""
    values = run.values(name)
    parts = np.array_split(values, 4) if len(values) >= FEWEST else [values] * 4
    return [float(part.mean()) if len(part) else math.nan for part in parts]


# NaN, of a metric that was not logged, fails every comparison below: no finding comes of it.


def _reward(run: Run) -> Iterator[Finding]:
    start, *_, end = means = quarters(run, "reward")
    if math.isnan(end):
        return
    spread, best = np.ptp(run.values("reward")), max(means)
    text = f"reward {start:.3g} in the first quarter of the run, {end:.3g} in the last"
    if best - end > 0.4 * spread:
        advice = "A run that collapsed: docs/troubleshooting.md."
        yield Finding("bad", f"{text}, {best:.3g} at its best: it fell", advice)
    elif end - start > 0.1 * spread:
        yield Finding("good", f"{text}: it rises")
    else:
        yield Finding("unknown", f"{text}: no clear trend")


def _mismatch(run: Run) -> Finding:
    start, *_, end = quarters(run, "mismatch/logp_diff_mean")
    kl, floor = quarters(run, "mismatch/kl_k3")[-1], quarters(run, "sync/verify_noise_floor")[0]
    if math.isnan(end):
        return Finding("unknown", "no log-prob mismatch was logged", "It needs a vLLM engine: use_vllm=True.")
    text = f"mismatch {end:.2g} nats per token"
    if kl > LARGEST_KL:
        advice = "Engine and learner are two policies: quantize_learner=True, and one scheme in both (docs/troubleshooting.md)."
        return Finding("bad", f"{text}: a KL of {kl:.2g}, above {LARGEST_KL}", advice)
    if end > 2 * start and end > LARGEST_KL:
        advice = "The engine is stale, or the policy comes apart: see sync/* and error_tokens/* in docs/metrics.md."
        return Finding("bad", f"{text}, {end / start:.1f} times that of the first quarter: it grows", advice)
    if end > NEAR_FLOOR * floor:
        advice = "Another kernel, attention or scheme in the engine than in the learner: docs/numerics.md."
        return Finding("look", f"{text}, {end / floor:.1f} noise floors", advice)
    if end <= NEAR_FLOOR * floor:
        return Finding("good", f"{text}: at the noise floor ({floor:.2g}) or below")
    if kl <= LARGEST_KL:
        return Finding("good", f"{text}: a KL of {kl:.2g}, below {LARGEST_KL}")
    return Finding("unknown", f"{text}; no noise floor was logged", "verify_sync measures it.")


def _shares(run: Run) -> Iterator[Finding]:
    if quarters(run, "quant/flip_frac")[-1] == 0:
        advice = "Updates are lost in rounding: float32 master weights, or a higher learning_rate."
        yield Finding("bad", "no sync changes a quantized value", advice)
    for name, look, bad, text, advice in LIMITS:
        share = quarters(run, name)[-1]
        if share > min(look, bad):
            yield Finding("bad" if share > bad else "look", text.format(share), advice)
