"""The verdict of the sync check, from the log-probs of one prompt by engine and learner.

Mismatches are judged in noise floors: how far rounding alone moves the learner's log-probs.

- A first sync (`read_first`) passes up to `usual` floors, and fails above MOST_FIRST. Between them the mismatch must
  have fallen to LEFT of that before the sync, because with 8-bit activations a missing layer stays below MOST_FIRST.
- A later one (`read_later`) may be GROWTH times the first, and the engine must have moved where the learner did.

What engines and faults were measured to be is in docs/numerics.md and dev/numerics.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from .learner_logps import LearnerLogps


# In noise floors. Healthy engines had at most 1.4, on CPUs and on an H200.
USUAL = 3.0
# For experts whose inputs are not quantized: Marlin's W4A16 experts had 4.0 on the H200, on syncs that were right bit
# for bit (A, B, A). Why is not known. Learners with ten times the roundings have 2.7 to 6.0. Experts with 8-bit inputs
# had 1.3 on the H200, and at most 2.0 with such roundings.
USUAL_OF_WEIGHT_ONLY_EXPERTS = 6.0
# A first sync fails above it in any case. Rounding ten times as coarse gave at most 6; one layer that was not loaded,
# without 8-bit activations, 23 and more (dev/numerics.md).
MOST_FIRST = 13.0
# A share of the mismatch before the first sync.
LEFT = 0.2
# A multiple of the first mismatch in noise floors.
GROWTH = 3.0
# Smallest noise floor in nats, for learners with nearly uniform answers.
RESOLUTION = 1e-4
# Movements are compared once the learner has moved this many standard deviations of noise since the anchor.
VISIBLE = 12.0


class Reading(NamedTuple):
    """
    The result of one check in this process. Mismatches are mean absolute log-prob differences in nats per token.

    Args:
        logp_diff: The mismatch between engine and learner.
        noise_floor: The mismatch between the learner without and with rounding noise.
        limit: The largest mismatch that passes; infinite where the model's answers allow no verdict.
        followed: Share of the learner's movement since the anchor that the engine also made: 1 with the new weights, 0
            with the old. NaN if the learner has not moved visibly.
    """

    logp_diff: float
    noise_floor: float
    limit: float
    followed: float = math.nan

    @property
    def stale(self) -> bool:
        """Whether the engine still answers with older weights."""
        return self.followed < 0.5

    @property
    def wrong(self) -> bool:
        """Whether the check fails, also by a mismatch that is NaN or infinite."""
        return self.stale or not math.isfinite(self.logp_diff) or self.logp_diff > self.limit


@dataclass(frozen=True)
class Anchor:
    """
    What later checks compare with: the state at a check that passed.

    Args:
        engine: The engine's log-probs, `(T - 1,)` float32.
        learner: The learner's log-probs without noise, `(T - 1,)` float32.
        ratio: The first mismatch of the run in noise floors, at least so large that the usual one may come later.
    """

    engine: Tensor
    learner: Tensor
    ratio: float


def read_first(engine: Tensor, learner: LearnerLogps, before: Tensor | None, usual: float = USUAL) -> Reading:
    """
    Judge the first sync of a run, which must bring the engine near the learner.

    Args:
        engine: The engine's log-probs after the sync, `(T - 1,)` float32.
        learner: The learner's.
        before: The engine's before the sync, with random weights; `None` if it may hold weights of an earlier run.
        usual: Mismatch that always passes, in noise floors.
    """
    logp_diff = _mismatch(engine, learner.plain)
    noise_floor = _noise_floor(learner)

    limit = MOST_FIRST * noise_floor
    if before is not None:
        logp_diff_before = _mismatch(before.to(engine.device), learner.plain)
        # Never below the usual, never above MOST_FIRST; in between what is left of the mismatch with random weights.
        limit = max(usual * noise_floor, min(limit, LEFT * logp_diff_before))

        # An engine that the sync did not reach would pass, too, so there is no verdict.
        if limit >= logp_diff_before:
            limit = math.inf
    return Reading(logp_diff=logp_diff, noise_floor=noise_floor, limit=limit)


def first_anchor(engine: Tensor, learner: LearnerLogps, first: Reading, usual: float = USUAL) -> Anchor:
    """
    The anchor after the first check.

    Args:
        engine: The engine's log-probs after the first sync, `(T - 1,)` float32.
        learner: The learner's.
        first: What the check read of them.
        usual: As for [`read_first`]. A first mismatch may be small by chance, so later ones up to this pass as well.
    """
    # GROWTH times it is at least `usual`.
    ratio = max(usual / GROWTH, first.logp_diff / first.noise_floor)
    return Anchor(engine, learner.plain, ratio)


def read_later(engine: Tensor, learner: LearnerLogps, anchor: Anchor) -> Reading:
    """
    Judge a later sync by the first mismatch of the run and by the learner's movement.

    An update may move log-probs less than two kernels differ, so the size of the mismatch cannot show a stale engine.
    But the engine's movement since the anchor, projected on the learner's, is as long as the learner's with the new
    weights and 0 with the old.

    Args:
        engine: The engine's log-probs after the sync, `(T - 1,)` float32.
        learner: The learner's.
        anchor: The last check at which the learner had moved visibly.
    """
    noise_floor = _noise_floor(learner)
    return Reading(
        logp_diff=_mismatch(engine, learner.plain),
        noise_floor=noise_floor,
        limit=GROWTH * anchor.ratio * noise_floor,
        followed=_share_followed(engine, learner, anchor),
    )


def _share_followed(engine: Tensor, learner: LearnerLogps, anchor: Anchor) -> float:
    """
    Share of the learner's movement since the anchor that the engine also made; NaN if it is not visible.

    Noise adds little in the one direction of the movement: if `T - 1` independent errors have norm `n`, the standard
    deviation along it is `n / sqrt(T - 1)`. Both readings of the engine have this error. So a movement of VISIBLE
    standard deviations is measured to `sqrt(2) / 12 = 0.12` of itself, and a share below one half is four standard
    deviations from 1.
    """
    movement = learner.plain - anchor.learner
    engine_movement = engine - anchor.engine

    # How far roundings move log-probs: those of the learner, or those between engine and learner at the anchor.
    rounding = (learner.noisy - learner.plain).norm().item()
    kernels = (anchor.engine - anchor.learner).norm().item()
    visible_length = VISIBLE * max(rounding, kernels) / math.sqrt(len(movement))

    # So written that a NaN counts as not visible.
    if not movement.norm().item() > visible_length:
        return math.nan
    return (engine_movement @ movement / (movement @ movement)).item()


def _noise_floor(learner: LearnerLogps) -> float:
    """The mismatch that rounding alone makes, in nats per token."""
    return max(_mismatch(learner.noisy, learner.plain), RESOLUTION)


def _mismatch(logps: Tensor, others: Tensor) -> float:
    """Mean absolute difference of two log-probs `(T - 1,)`, in nats per token."""
    return (logps - others).abs().mean().item()
