"""What is logged, whatever the loss and the learner; the names are in docs/metrics.md."""

from .clock import CodeFlips, StepClock
from .error_tokens import find_error_tokens, written_tokens
from .mismatch import check_mismatch, mismatch_metrics
from .ratios import RatioMeter
from .token_stats import TokenStats


__all__ = [
    "CodeFlips",
    "RatioMeter",
    "StepClock",
    "TokenStats",
    "check_mismatch",
    "find_error_tokens",
    "mismatch_metrics",
    "written_tokens",
]
