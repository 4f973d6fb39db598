"""What a run's log says about its health, in a few lines, each with what to do. Limits are those of docs/metrics.md."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .runs import Run


FEWEST = 8  # rollout batches below which nothing is said about a trend
NEAR_FLOOR = 3.0  # noise floors; the sync check warns of more
LARGEST_KL = 0.01  # nats per token, engine to learner: a limit that other projects use
CLIPPED, MOSTLY_CLIPPED = 0.3, 0.7
OF_SIGN = {"pos_high": "A > 0, above", "neg_low": "A < 0, below", "neg_high": "A < 0, above"}


@dataclass(frozen=True)
class Finding:
    """One line. `level` is "good", "look", "bad", or "unknown" where the log has nothing to judge by."""

    level: str
    text: str
    advice: str = ""


def verdict(run: Run) -> list[Finding]:
    """All that can be said, the most important first."""
    checks = (_reward, _signal, _mismatch, _sync, _clipping, _cut_off, _loops)
    return [finding for check in checks for finding in check(run)]


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
    if not math.isnan(end):
        spread, best = np.ptp(run.values("reward")), max(means)
        text = f"reward {start:.3g} in the first quarter of the run, {end:.3g} in the last"
        if best - end > 0.4 * spread:
            yield Finding(
                "bad", f"{text}, {best:.3g} at its best: it fell", "A run that collapsed: docs/troubleshooting.md."
            )
        elif end - start > 0.1 * spread:
            yield Finding("good", f"{text}: it rises")
        else:
            yield Finding("unknown", f"{text}: no clear trend")


def _signal(run: Run) -> Iterator[Finding]:
    if (share := quarters(run, "frac_reward_zero_std")[-1]) > 0.8:
        advice = "They give no gradient: use easier or harder problems, or more completions per prompt."
        yield Finding("look", f"all rewards are equal in {share:.0%} of the prompts", advice)


def _mismatch(run: Run) -> Iterator[Finding]:
    start, *_, end = quarters(run, "mismatch/logp_diff_mean")
    kl, floor = quarters(run, "mismatch/kl_k3")[-1], quarters(run, "sync/verify_noise_floor")[0]
    text = f"mismatch {end:.2g} nats per token"
    if math.isnan(end):
        yield Finding("unknown", "no log-prob mismatch was logged", "It needs a vLLM engine: use_vllm=True.")
    elif kl > LARGEST_KL:
        advice = "Engine and learner are two policies: quantize_learner=True, and one scheme in both (docs/troubleshooting.md)."
        yield Finding("bad", f"{text}: a KL of {kl:.2g}, above {LARGEST_KL}", advice)
    elif end > 2 * start and end > LARGEST_KL:
        advice = "The engine is stale, or the policy comes apart: see sync/* and error_tokens/* in docs/metrics.md."
        yield Finding("bad", f"{text}, {end / start:.1f} times that of the first quarter: it grows", advice)
    elif end > NEAR_FLOOR * floor:
        advice = "Another kernel, attention or scheme in the engine than in the learner: docs/numerics.md."
        yield Finding("look", f"{text}, {end / floor:.1f} noise floors", advice)
    elif end <= NEAR_FLOOR * floor:
        yield Finding("good", f"{text}: at the noise floor ({floor:.2g}) or below")
    elif kl <= LARGEST_KL:
        yield Finding("good", f"{text}: a KL of {kl:.2g}, below {LARGEST_KL}")
    else:
        yield Finding("unknown", f"{text}; no noise floor was logged", "verify_sync measures it.")


def _sync(run: Run) -> Iterator[Finding]:
    share = quarters(run, "quant/flip_frac")[-1]
    text = f"each sync changes {share:.2%} of the quantized values"
    if share == 0:
        yield Finding("bad", text, "Updates are lost in rounding: float32 master weights, or a higher learning_rate.")
    elif share > CLIPPED:
        yield Finding("bad", text, "The steps are too large: lower learning_rate.")
    elif not math.isnan(share):
        yield Finding("good", text)


def _clipping(run: Run) -> Iterator[Finding]:
    shares = {text: quarters(run, f"ratio/{edge}_frac")[-1] for edge, text in OF_SIGN.items()}
    shares = {text: share for text, share in shares.items() if not math.isnan(share)}
    text = "clipped: " + ", ".join(f"{share:.0%} ({text})" for text, share in shares.items())
    most = max(shares.values(), default=math.nan)
    if most > MOSTLY_CLIPPED:
        yield Finding(
            "bad", text, "Most answers give no gradient: lower learning_rate, or widen the bounds of the loss."
        )
    elif most > CLIPPED:
        yield Finding(
            "look", text, "Lower learning_rate, or use fewer updates per rollout batch (steps_per_generation)."
        )
    elif not math.isnan(most):
        yield Finding("good", text)


def _cut_off(run: Run) -> Iterator[Finding]:
    if (share := quarters(run, "completions/clipped_ratio")[-1]) > 0.3:
        advice = "Raise max_completion_length; if the share grows, read what the model writes (log_completions)."
        yield Finding("look", f"{share:.0%} of the answers are cut off", advice)


def _loops(run: Run) -> Iterator[Finding]:
    if (share := quarters(run, "error_tokens/frac")[-1]) > 0.01:
        yield Finding(
            "look", f"{share:.1%} of the tokens stand in loops", "Read the examples; docs/metrics.md, error tokens."
        )
