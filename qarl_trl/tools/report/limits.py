"""The limits of the shares that a run logs, with what to do beyond them. They are those of docs/metrics.md."""

from __future__ import annotations

import math
from dataclasses import dataclass


# The limit of a share that is never wrong, or never only worth a look.
NEVER = math.inf

# Pages of docs/.
COLLAPSED = "troubleshooting.md#the-reward-collapsed"
NOTHING = "troubleshooting.md#nothing-is-learned"
MISMATCH = "troubleshooting.md#the-mismatch-is-too-large"
RATIOS = "metrics.md#ratios"
TRL_NAMES = "metrics.md#trls-names-to-watch"
ERROR_TOKENS = "metrics.md#error-tokens"

EQUAL_REWARDS = "frac_reward_zero_std"
CLIPPED = "ratio/clipped_frac"
CUT_OFF = "completions/clipped_ratio"
OTHER_PROBLEMS = "Use other problems."
LOWER_RATE = "Lower learning_rate, or use fewer updates per rollout batch (steps_per_generation)."


@dataclass(frozen=True)
class Limit:
    """
    The limits of a share, over the last quarter of a run.

    Args:
        metric: The metric's name in the log.
        look: Above this share: look at it.
        bad: Above this share it is wrong.
        text: What it is, with a place for the share.
        advice: What to do.
        page: The page of docs/ that says more.
    """

    metric: str
    look: float
    bad: float
    text: str
    advice: str
    page: str


# What runs of versions before `ratio/clipped_frac` logged in its place.
EARLIER_CLIPS = tuple(
    Limit(
        metric,
        look=0.3,
        bad=0.7,
        text=f"{{:.0%}} of the answers are clipped ({which})",
        advice=LOWER_RATE,
        page=RATIOS,
    )
    for metric, which in (
        ("ratio/pos_high_frac", "A > 0, above"),
        ("ratio/neg_low_frac", "A < 0, below"),
        ("ratio/neg_high_frac", "A < 0, above"),
    )
)

LIMITS = (
    Limit(
        EQUAL_REWARDS,
        look=0.8,
        bad=NEVER,
        text="{:.0%} of the prompts have equal rewards",
        advice=OTHER_PROBLEMS,
        page=NOTHING,
    ),
    Limit(
        "quant/flip_frac",
        look=NEVER,
        bad=0.3,
        text="each sync changes {:.3%} of the quantized values",
        advice="Lower learning_rate.",
        page=COLLAPSED,
    ),
    Limit(
        CLIPPED,
        look=0.3,
        bad=0.7,
        text="{:.0%} of the answers with an advantage are clipped",
        advice=LOWER_RATE,
        page=RATIOS,
    ),
    Limit(
        CUT_OFF,
        look=0.3,
        bad=NEVER,
        text="{:.0%} of the answers are cut off",
        advice="Raise max_completion_length.",
        page=TRL_NAMES,
    ),
    Limit(
        "error_tokens/frac",
        look=0.01,
        bad=NEVER,
        text="{:.1%} of the tokens stand in loops",
        advice="Read some answers (log_completions), then look at the mismatch.",
        page=ERROR_TOKENS,
    ),
    Limit(
        "mismatch/seq_weight_capped_frac",
        look=0.01,
        bad=NEVER,
        text="the mismatch weight of {:.0%} of the answers is at its cap",
        advice="Engine and learner are far apart: find the cause. A wider cap hides it.",
        page=MISMATCH,
    ),
    Limit(
        "mismatch/unscored_max",
        look=0.01,
        bad=NEVER,
        text="the engine gave no log-prob to {:.0%} of the tokens",
        advice="Above one half the run stops.",
        page=MISMATCH,
    ),
)
