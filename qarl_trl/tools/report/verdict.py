"""Judge a run by its log, in a few lines, each with what to do. The limits are those of docs/metrics.md."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .runs import Run


FEWEST = 8  # rollout batches needed to judge a trend
NEAR_FLOOR = 3.0  # noise floors; the sync check warns of more
LARGEST_KL = 0.01  # nats per token, engine to learner: a limit that other projects use
NEVER = math.inf
COLLAPSED, NOTHING = "troubleshooting.md#the-reward-collapsed", "troubleshooting.md#nothing-is-learned"
MISMATCH = "troubleshooting.md#the-mismatch-is-too-large"
CLIPPED = "Lower learning_rate, or use fewer updates per rollout batch (steps_per_generation).", "metrics.md#ratios"
SLOWER = "Lower learning_rate.", COLLAPSED
LONG = "Raise max_completion_length.", "metrics.md#trls-names-to-watch"
LOOPS = "Read some answers (log_completions), then look at the mismatch.", "metrics.md#error-tokens"
# Shares in the last quarter of a run: the limits for "look at this" and "wrong", what it is, what to do, and the page that says
# more.
LIMITS = (
    ("frac_reward_zero_std", 0.8, NEVER, "{:.0%} of the prompts have equal rewards", "Use other problems.", NOTHING),
    ("quant/flip_frac", NEVER, 0.3, "each sync changes {:.2%} of the quantized values", *SLOWER),
    ("ratio/pos_high_frac", 0.3, 0.7, "{:.0%} of the answers are clipped (A > 0, above)", *CLIPPED),
    ("ratio/neg_low_frac", 0.3, 0.7, "{:.0%} of the answers are clipped (A < 0, below)", *CLIPPED),
    ("ratio/neg_high_frac", 0.3, 0.7, "{:.0%} of the answers are clipped (A < 0, above)", *CLIPPED),
    ("completions/clipped_ratio", 0.3, NEVER, "{:.0%} of the answers are cut off", *LONG),
    ("error_tokens/frac", 0.01, NEVER, "{:.1%} of the tokens stand in loops", *LOOPS),
)


class Finding(NamedTuple):
    """One line. `level` is "good", "look", "bad", or "unknown" if the log does not tell; `page` is a page of docs/."""

    level: str
    text: str
    advice: str = ""
    page: str = ""


def verdict(run: Run) -> list[Finding]:
    """All findings, the most important first."""
    return [*_reward(run), _mismatch(run), *_shares(run)]


def headline(findings: list[Finding]) -> str:
    """The state of the run in a few words."""
    levels = {finding.level for finding in findings}
    return "something is wrong" if "bad" in levels else "look at this" if "look" in levels else "healthy"


def quarters(run: Run, name: str) -> list[float]:
    """Means of a metric over the four quarters of a run (for a short run four times its mean); NaN if it was not logged."""
    values = run.values(name)
    parts = np.array_split(values, 4) if len(values) >= FEWEST else [values] * 4
    return [float(part.mean()) if len(part) else math.nan for part in parts]


# NaN (a metric that was not logged) makes every comparison below false, so it gives no finding.


def _reward(run: Run) -> Iterator[Finding]:
    start, *_, end = means = quarters(run, "reward")
    if math.isnan(end):
        return
    spread, best, batches = np.ptp(run.values("reward")), max(means), len(run.values("reward"))
    text = f"reward {start:.3g} in the first quarter of the run, {end:.3g} in the last"
    if batches < FEWEST:
        yield Finding("unknown", f"reward {end:.3g}: {batches} rollout batches are too few for a trend")
    elif best - end > 0.4 * spread:
        advice = "Stop it, and look at the mismatch before the fall."
        yield Finding("bad", f"{text}, {best:.3g} at its best: it fell", advice, COLLAPSED)
    elif end - start > 0.1 * spread:
        yield Finding("good", f"{text}: it rises")
    else:
        yield Finding("unknown", f"{text}: no clear trend", "Train on, or look at the rewards.", NOTHING)


def _mismatch(run: Run) -> Finding:
    start, *_, end = quarters(run, "mismatch/logp_diff_mean")
    kl, floor = quarters(run, "mismatch/kl_k3")[-1], quarters(run, "sync/verify_noise_floor")[0]
    if math.isnan(end):
        advice = "It needs a vLLM engine: use_vllm=True."
        return Finding("unknown", "no log-prob mismatch was logged", advice, MISMATCH)
    text = f"mismatch {end:.2g} nats per token"
    if kl > LARGEST_KL:
        advice = "Engine and learner are two policies: set quantize_learner=True, and one scheme in both."
        return Finding("bad", f"{text}: a KL of {kl:.2g}, above {LARGEST_KL}", advice, MISMATCH)
    if end > 2 * start and end > LARGEST_KL:
        advice = "The engine is stale, or the policy comes apart: look at sync/* and error_tokens/*."
        return Finding("bad", f"{text}, {end / start:.1f} times that of the first quarter: it grows", advice, MISMATCH)
    if end > NEAR_FLOOR * floor:
        advice = "Engine and learner differ in a kernel, in attention or in the scheme."
        return Finding("look", f"{text}, {end / floor:.1f} noise floors", advice, MISMATCH)
    if end <= NEAR_FLOOR * floor:
        return Finding("good", f"{text}; rounding alone moves the sync check's tokens by {floor:.2g}")
    if kl <= LARGEST_KL:
        return Finding("good", f"{text}: a KL of {kl:.2g}, below {LARGEST_KL}")
    return Finding("unknown", f"{text}; no noise floor was logged", "verify_sync measures it.", MISMATCH)


def _shares(run: Run) -> Iterator[Finding]:
    within = []
    if quarters(run, "quant/flip_frac")[-1] == 0:
        advice = "Updates are lost in rounding: use float32 master weights, or a higher learning_rate."
        yield Finding("bad", "no sync changes a quantized value", advice, NOTHING)
    for name, look, bad, text, advice, page in LIMITS:
        share = quarters(run, name)[-1]
        if share > min(look, bad):
            yield Finding("bad" if share > bad else "look", text.format(share), advice, page)
        elif share > 0:
            within.append(text.format(share))
    if within:
        yield Finding("good", "; ".join(within))
