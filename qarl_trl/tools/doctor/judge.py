"""Judge the log-prob mismatch that was measured: does the learner compute what the engine does, and is QaRL needed?"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...config import QaRLConfig
from . import FAIL, OK, WARN, CheckResult


# The learner agrees with the engine if its mismatch is at most so many kernel floors. More than one, because the two
# are means over the answers of different engines.
AGREES = 1.5
# A learner with more than this share of the bf16 learner's mismatch is hardly nearer to the engine than that one.
HARDLY_NEARER = 0.5
# Only above so many kernel floors does the bf16 learner's mismatch come from the low bits, so that the two compare.
ABOVE_FLOOR = 2
# A smaller floor counts as this many nats, because nothing is a multiple of 0.
SMALLEST_FLOOR = 1e-9


@dataclass(frozen=True)
class Mismatch:
    """
    Mean absolute differences between the log-probs of sampled tokens by an engine and by a learner, in nats per token.

    Without a scheme all engines and learners are bf16.

    Attributes:
        floor: bf16 engine and bf16 learner. Only their kernels differ, so it is called the kernel floor.
        rollout_only: Low-bit engine and bf16 learner.
        learner: Low-bit engine and the learner of the run.
        weight_only: Whether scheme and cache leave activations alone.
    """

    floor: float
    rollout_only: float
    learner: float
    weight_only: bool = True


def judge_mismatch(mismatch: Mismatch, args: QaRLConfig) -> CheckResult:
    """
    Judge the learner's mismatch by the kernel floor: above it is a failure, or a warning if the scheme explains it.

    Args:
        mismatch: What was measured.
        args: The settings of the run.
    """
    name = "verdict"
    if mismatch.learner <= AGREES * mismatch.floor:
        return CheckResult(OK, name, "engine and learner agree as far as kernels let them")

    times = f"{mismatch.learner / max(mismatch.floor, SMALLEST_FLOOR):.1f} times the floor"
    if not args.quantize_learner:
        return CheckResult(WARN, name, f"quantize_learner: false leaves {times}")
    if args.has_low_bit_cache and args.aligned_cache is None:
        return CheckResult(WARN, name, f"quantize_learner_kv: false leaves {times}")

    hardly_nearer = mismatch.learner > HARDLY_NEARER * mismatch.rollout_only
    comparable = mismatch.rollout_only > ABOVE_FLOOR * mismatch.floor
    # With quantized activations, a rounding at another place may lead this far away from the engine.
    if mismatch.weight_only and hardly_nearer and comparable:
        return CheckResult(
            FAIL,
            name,
            "the low-bit learner is hardly nearer to the engine than a bf16 one: it does not compute what the engine "
            "does. Compare versions above; report model and scheme",
        )

    return CheckResult(
        WARN,
        name,
        f"{times}. With quantized activations this is expected if engine and learner round at different places "
        "(docs/numerics.md); a weight-only scheme (W4A16) reaches the floor",
    )


def advise_on_qarl(rollout_only: float, quantize_learner: bool, four_bits: bool) -> CheckResult:
    """
    The advice of docs/which_learner.md, from the table that the page shows.

    Args:
        rollout_only: The mismatch between a low-bit engine and a bf16 learner, nats per token.
        quantize_learner: Whether the learner of the run is the low-bit one, without that mismatch.
        four_bits: Whether there are 4-bit weights, which GPTQ rounds better. Others are rounded to nearest.
    """
    column = "4-bit weights" if four_bits else "8-bit weights"
    rows = _rule()
    # The thresholds rise, so the last row that the mismatch reaches holds.
    reached = [row[column] for row in rows if rollout_only >= row["from"]]
    text = f"at {rollout_only:.2g} nats per token: {reached[-1]} (docs/which_learner.md)"
    status = OK if quantize_learner else status_of(rollout_only)
    return CheckResult(status, "which learner?", text)


def status_of(mismatch: float) -> str:
    """
    `WARN` for a mismatch that reaches the last threshold of docs/which_learner.md, whose arms went apart, else `OK`.

    Args:
        mismatch: Between the engine and the learner of a run, nats per token.
    """
    return WARN if mismatch >= _rule()[-1]["from"] else OK


def _rule() -> list[dict[str, Any]]:
    """The rows of the page's table, with rising thresholds."""
    return json.loads(Path(__file__).with_name("rule.json").read_text())
