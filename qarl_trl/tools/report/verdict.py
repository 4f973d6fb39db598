"""Judge a run by its log, in a few lines, each with what to do. The limits are those of docs/metrics.md."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .limits import (
    CLIPPED,
    COLLAPSED,
    CUT_OFF,
    EARLIER_CLIPS,
    EQUAL_REWARDS,
    LIMITS,
    MISMATCH,
    NOTHING,
    OTHER_PROBLEMS,
)
from .runs import LoggedRun


# Rollout batches needed to judge a trend: a quarter of them, rounded up, has the three that a standard error needs.
FEWEST = 9
# Noise floors; the sync check warns of more.
NEAR_FLOOR = 3.0
# Nats per token, engine to learner: a limit that other projects use.
LARGEST_KL = 0.01
# A smaller share of quantized values changed by a sync is hardly any: the smallest of the committed runs that learned
# is 7.5e-5 (benchmarks/results/real/channel).
FEWEST_FLIPS = 2e-5
# Metrics that are a number in each line of a run that trains. A reward may be missing.
NUMBERS = ("loss", "grad_norm", "entropy", "mismatch/logp_diff_mean", "sampling/sampling_logp_difference/mean")


@dataclass(frozen=True)
class Judgement:
    """
    One line about a run.

    Args:
        level: "good", "look", "bad", or "unknown" if the log does not tell.
        text: What is so.
        advice: What to do.
        page: The page of docs/ that says more.
    """

    level: str
    text: str
    advice: str = ""
    page: str = ""


def judge(run: LoggedRun) -> list[Judgement]:
    """
    Judge a run.

    Args:
        run: What the run logged.

    Returns:
        All judgements, the most important first.
    """
    return [*_judge_numbers(run), *_judge_reward(run), _judge_mismatch(run), *_judge_shares(run)]


def headline(judgements: Sequence[Judgement]) -> str:
    """
    The state of the run in a few words.

    Args:
        judgements: All judgements about it.
    """
    levels = {judgement.level for judgement in judgements}
    if "bad" in levels:
        return "something is wrong"
    if "look" in levels:
        return "look at this"
    if "good" in levels:
        return "healthy"
    return "cannot be judged"


def quarters(run: LoggedRun, name: str) -> list[float]:
    """
    Means of a metric over the four quarters of a run; for a short run four times its mean.

    Args:
        run: What the run logged.
        name: The metric's name.

    Returns:
        Four numbers, NaN if the metric was not logged.
    """
    values = run.values(name)
    if len(values) == 0:
        return [math.nan] * 4
    if len(values) < FEWEST:
        return [float(values.mean())] * 4
    return [float(part.mean()) for part in np.array_split(values, 4)]


# NaN (a metric that was not logged) makes every comparison below false, so it gives no judgement.


def _judge_numbers(run: LoggedRun) -> Iterator[Judgement]:
    """At most one judgement: whether a metric ended as NaN or infinity, which no other judgement sees."""
    last: dict[str, tuple[float, float]] = {}
    for row in sorted(run.log, key=lambda row: row["step"]):
        for name in NUMBERS:
            if isinstance(row.get(name), int | float):
                last[name] = (row["step"], row[name])

    for name, (step, value) in last.items():
        if not math.isfinite(value):
            text = f"{name} is {value} at step {step:g}: the weights or log-probs are no numbers any more"
            advice = "Resume from a checkpoint before it, with a lower learning_rate or max_grad_norm."
            yield Judgement("bad", text, advice, COLLAPSED)
            return


def _judge_reward(run: LoggedRun) -> Iterator[Judgement]:
    """At most one judgement: whether the reward rises or falls by more than noise."""
    rewards = run.values("reward")
    if len(rewards) == 0:
        return

    if len(rewards) < FEWEST:
        text = (
            f"reward {rewards.mean():.3g}: {len(rewards)} rollout batches are too few for a trend: it takes {FEWEST}"
        )
        yield Judgement("unknown", text)
        return

    # Rounded up, so that each has the three that a standard error needs.
    length = math.ceil(len(rewards) / 4)
    first = rewards[:length]
    last = rewards[-length:]

    # Rewards have any unit, so a fall from the best quarter, which may lie anywhere, is measured by how far they went.
    means = quarters(run, "reward")
    best = max(means)
    # Of nine batches noise alone goes that far in a quarter of all runs.
    is_no_noise = _clearly_above(_best_before(rewards, length), last)
    if best - means[-1] > 0.4 * np.ptp(rewards) and is_no_noise:
        text = _first_and_last(means[0], means[-1])
        advice = "Stop it, and look at the mismatch before the fall."
        yield Judgement("bad", f"{text}, {best:.3g} at its best: it fell", advice, COLLAPSED)
        return

    text = _first_and_last(first.mean(), last.mean())
    if _clearly_above(last, first):
        yield Judgement("good", f"{text}: it rises")
    elif _clearly_above(first, last):
        yield Judgement("look", f"{text}: it falls", "Look at the mismatch, or lower learning_rate.", COLLAPSED)
    else:
        yield Judgement("unknown", f"{text}: no clear change", "Train on, or look at the rewards.", NOTHING)


def _first_and_last(first: float, last: float) -> str:
    """The mean rewards of two quarters, in words."""
    return f"reward {first:.3g} in the first quarter of the run, {last:.3g} in the last"


def _best_before(rewards: np.ndarray, length: int) -> np.ndarray:
    """The best batches in a row that end before the last ones, both of that number."""
    starts = range(len(rewards) - 2 * length + 1)
    # A reward may fall in the middle of a quarter.
    best = max(starts, key=lambda start: rewards[start : start + length].mean())
    return rewards[best : best + length]


def _clearly_above(high: np.ndarray, low: np.ndarray) -> bool:
    """Whether a mean is above another by more than twice the standard error of their difference."""
    variance = high.var(ddof=1) / len(high) + low.var(ddof=1) / len(low)
    return bool(high.mean() - low.mean() > 2 * math.sqrt(variance))


def _judge_mismatch(run: LoggedRun) -> Judgement:
    """How far engine and learner are apart; the KL comes first, because it does not depend on the noise floor."""
    means = quarters(run, "mismatch/logp_diff_mean")
    start = means[0]
    end = means[-1]
    kl = quarters(run, "mismatch/kl_k3")[-1]
    floor = quarters(run, "sync/verify_noise_floor")[0]
    if math.isnan(end):
        if not _samples(run):
            return Judgement("unknown", "the run logged no reward and no completions: nothing was sampled to judge")
        advice = "It needs a vLLM engine: use_vllm=True."
        return Judgement("unknown", "no log-prob mismatch was logged", advice, MISMATCH)

    text = f"mismatch {end:.2g} nats per token"
    if kl > LARGEST_KL or (math.isnan(kl) and least_kl(end) > LARGEST_KL):
        known = f"{kl:.2g}" if kl > LARGEST_KL else f"at least {least_kl(end):.2g}"
        advice = "Engine and learner are two policies: set quantize_learner=True, and one scheme in both."
        return Judgement("bad", f"{text}: a KL of {known}, above {LARGEST_KL}", advice, MISMATCH)

    # A mismatch far below the limit may double by chance.
    if end > 2 * start and end > LARGEST_KL:
        growth = f"{text}, {end / start:.1f} times that of the first quarter: it grows"
        advice = "The engine is stale, or the policy comes apart: look at sync/* and error_tokens/*."
        return Judgement("bad", growth, advice, MISMATCH)

    if end > NEAR_FLOOR * floor:
        advice = "Engine and learner differ in a kernel, in attention or in the scheme."
        return Judgement("look", f"{text}, {end / floor:.1f} noise floors", advice, MISMATCH)
    if end <= NEAR_FLOOR * floor:
        return Judgement("good", f"{text}; rounding alone moves the sync check's tokens by {floor:.2g}")

    # No noise floor was logged.
    if kl <= LARGEST_KL:
        return Judgement("good", f"{text}: a KL of {kl:.2g}, below {LARGEST_KL}")
    return Judgement("unknown", f"{text}; no noise floor was logged", "verify_sync measures it.", MISMATCH)


def least_kl(mismatch: float) -> float:
    """
    The least `mismatch/kl_k3` that goes with a mean of abs(d): TRL logs the mean alone.

    exp(d) - 1 - d is least for negative d, and convex in abs(d) there, so its mean is at least its value at the mean.

    Args:
        mismatch: That mean, nats per token.
    """
    return math.expm1(-mismatch) + mismatch


def _samples(run: LoggedRun) -> bool:
    """Whether the log is one of a trainer that samples: its lines have a reward, or figures about completions."""
    return any(name == "reward" or name.startswith("completions/") for name in _logged(run))


def _is_of_qarl(run: LoggedRun) -> bool:
    """Whether the log is one of `QaRLTrainer`, which alone has ratios, with every loss."""
    return any(name.startswith("ratio/") for name in _logged(run))


def _logged(run: LoggedRun) -> set[str]:
    """The names of all that a run logged."""
    names: set[str] = set()
    for row in run.log:
        names.update(row)
    return names


def _judge_shares(run: LoggedRun) -> Iterator[Judgement]:
    """A judgement for each share above a limit, and one for all others."""
    # The table below has upper limits alone; this share has a lower one.
    flips = quarters(run, "quant/flip_frac")[-1]
    if flips == 0 and _has_no_gradient(run):
        text = "no sync changes a quantized value: the updates have no gradient"
        are_equal = quarters(run, EQUAL_REWARDS)[-1] == 1
        equal = "All rewards of a prompt are equal. Try the reward with `qarl-trl doctor`."
        advice = equal if are_equal else "Look whether all answers are cut off or left out."
        yield Judgement("bad", text, advice, NOTHING)
    elif flips == 0 and not _a_sync_follows_a_gradient(run):
        text = "no sync changes a quantized value, and each followed updates without a gradient"
        yield Judgement("unknown", text, "Train on.", NOTHING)
    elif flips < FEWEST_FLIPS:
        advice = "Updates are lost in rounding: use float32 master weights, or a higher learning_rate."
        if flips == 0:
            yield Judgement("bad", "no sync changes a quantized value", advice, NOTHING)
        else:
            text = f"each sync changes a share of {flips:.1e} of the quantized values, below {FEWEST_FLIPS:.0e}"
            yield Judgement("look", text, advice, NOTHING)

    # What is within its limit is told in one line, so that a reader sees the figures.
    within = []
    is_earlier = len(run.values(CLIPPED)) == 0
    for limit in (*LIMITS, *EARLIER_CLIPS) if is_earlier else LIMITS:
        share = quarters(run, limit.metric)[-1]
        if limit.metric == "quant/flip_frac" and share < FEWEST_FLIPS:
            continue
        text = limit.text.format(share)
        advice = limit.advice
        if limit.metric == EQUAL_REWARDS:
            advice = _which_problems(run)
        elif limit.metric == CUT_OFF and not _is_of_qarl(run):
            # The log does not say whether the run has any.
            advice += " Answers that end at a stop string of generation_kwargs count as cut off here, too."
        if share > limit.bad:
            yield Judgement("bad", text, advice, limit.page)
        elif share > limit.look:
            yield Judgement("look", text, advice, limit.page)
        elif share > 0:
            within.append(text)
    if within:
        yield Judgement("good", "; ".join(within))


def _has_no_gradient(run: LoggedRun) -> bool:
    """Whether nothing was learned in the last quarter, as where all rewards of a prompt are equal."""
    gradient = quarters(run, "grad_norm")[-1]
    # A penalty may have a gradient where the rewards have none.
    return gradient == 0 or (math.isnan(gradient) and quarters(run, EQUAL_REWARDS)[-1] == 1)


def _a_sync_follows_a_gradient(run: LoggedRun) -> bool:
    """Whether a sync with a share of changed values followed an update with a gradient, as far as the log tells."""
    gradients: list[float] = []
    is_logged = False
    for row in sorted(run.log, key=lambda row: row["step"]):
        # Those of its own line come after the sync. Of the updates before a first line nothing is known.
        if "quant/flip_frac" in row:
            if not gradients or any(gradient != 0 for gradient in gradients):
                return True
            gradients = []
        gradient = row.get("grad_norm")
        if isinstance(gradient, int | float):
            gradients.append(gradient)
            is_logged = True
    return not is_logged


def _which_problems(run: LoggedRun) -> str:
    """Advice for a run whose prompts have equal rewards: it depends on whether most answers are wrong or right."""
    rewards = run.values("reward")
    if len(rewards) == 0:
        return OTHER_PROBLEMS

    # Where all are equal, the log does not tell: the reward may also read no answer.
    low = rewards.min()
    high = rewards.max()
    if low == high:
        return "Try the reward with `qarl-trl doctor`; if it is right, use other problems."

    # The log has no bounds of the rewards, only what the batches reached. Between 0 and 1 they are shares of right
    # answers, of which the best may be as low as 0.05.
    if low >= 0 and high <= 1:
        low = 0.0
        high = 1.0
    middle = (low + high) / 2
    end = quarters(run, "reward")[-1]
    if end < middle:
        return "Use easier problems: the rewards are low."
    if end > middle:
        return "Use harder problems: the rewards are high."
    return OTHER_PROBLEMS
