"""The sync check: does the engine answer with the weights that were just synced?

Engine and learner score one fixed prompt, before the first sync of a run (the engine then holds random weights) and after
it. What stops a run is measured in that run: how much of the first mismatch is left, and whether a wrong model explains the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import torch
from accelerate.logging import get_logger
from torch import Tensor

from .scores import Scores, engine_logps


logger = get_logger(__name__)

# Mismatches in noise floors. Healthy engines had at most 1.4 (docs/numerics.md): above USUAL is a warning. Up to TENFOLD, kernels ten
# times as far apart, size stops no run, and later mismatches may be GROWTH times the first.
USUAL, TENFOLD, GROWTH = 3.0, 13.0, 3.0
# Share of the squared mismatch that a wrong model has to explain. Healthy engines, however noisy: about 0 at most.
EXPLAINED = 0.25
# Smallest noise floor in nats, for learners that answer uniformly whatever their layers compute.
RESOLUTION = 1e-4
# The learner's movement since the anchor must stand out this far before the engine's is measured along it.
VISIBLE = 12.0


@dataclass(frozen=True)
class Reading:
    """What one check found on this process. Mismatches are mean absolute log-prob differences in nats per token."""

    logp_diff: float  # between engine and learner
    noise_floor: float  # between the learner without and with rounding noise
    limit: float  # largest mismatch that passes; infinite where the model's answers allow no verdict
    before: float = math.nan  # the mismatch before the first sync; NaN in later checks
    explained: float = -math.inf  # share of the squared mismatch that the most similar wrong model explains
    suspect: int = 0  # which of `Scores.wrong` that is; behind the last: the engine before its first sync
    # Share of the learner's movement since the anchor that the engine made too: 1 with the new weights, 0 with the old. NaN
    # where the learner has not moved visibly.
    followed: float = math.nan

    @property
    def stale(self) -> bool:
        return self.followed < 0.5

    @property
    def wrong(self) -> bool:
        """A mismatch that is no number is too large."""
        too_large = not math.isfinite(self.logp_diff) or self.logp_diff > self.limit
        return self.stale or self.explained > EXPLAINED or too_large


class Anchor(NamedTuple):
    """Log-probs of engine and learner at a check that passed, and the first mismatch of the run in noise floors, at least 1."""

    engine: Tensor
    learner: Tensor
    ratio: float = 1.0


class SyncCheck:
    """Checks an engine against the learner after its syncs, by a fixed prompt."""

    def __init__(
        self,
        token_ids: Sequence[int],
        every: str | int,  # "first", or every so many syncs, the first one included
        score: Callable[[bool], Scores],  # the prompt by the learner, with wrong models if asked; collective
        gather: Callable[[Tensor], Tensor],  # values of all processes, so that all of them stop together
        report: Callable[[str, float], None],  # takes `sync/verify_logp_diff`, `..._noise_floor` and `..._allowed`
    ) -> None:
        self.token_ids = list(token_ids)
        self.every = every
        self._score, self._gather, self._report = score, gather, report
        self._before: Tensor | None = None
        self._anchor: Anchor | None = None

    def due(self, syncs: int) -> bool:
        """Whether the engine is to be checked after this many syncs."""
        return syncs == 1 if self.every == "first" else (syncs - 1) % self.every == 0

    def look_before(self, llm: Any) -> None:
        """Score the prompt by an engine that nothing was synced to."""
        self._before = engine_logps(llm, self.token_ids)

    def check(self, llm: Any, syncs: int) -> Reading:
        """Compare engine and learner, in every process; `RuntimeError` in all when the engine of any is wrong or stale."""
        first = self._anchor is None
        learner = self._score(first)
        failure, engine = None, torch.full_like(learner.plain, math.nan)
        try:
            engine = engine_logps(llm, self.token_ids).to(learner.plain.device)
        except Exception as error:  # the others wait for this process in the gather; NaN stops them as well
            failure = error
        reading = read_first(engine, learner, self._before) if first else read_later(engine, learner, self._anchor)
        gathered = self._gather(torch.tensor([astuple(reading)], device=engine.device)).tolist()
        if failure is not None:
            raise failure
        rows = [Reading(*row[:5], int(row[5]), row[6]) for row in gathered]
        worst = max(rows, key=lambda row: (row.wrong, row.logp_diff))
        for name, value in (
            ("logp_diff", worst.logp_diff),
            ("noise_floor", worst.noise_floor),
            ("allowed", worst.limit),
        ):
            if value < math.inf:
                self._report(f"sync/verify_{name}", value)
        if worst.wrong:
            wrong = [*(f"the learner {name}" for name in learner.wrong), "an engine that nothing was synced to"]
            suspect = wrong[worst.suspect] if worst.explained > EXPLAINED else ""
            raise RuntimeError(diagnosis(worst, suspect, syncs, sum(row.wrong for row in rows), len(rows)))
        if first:
            _warn(worst)
            self._anchor = Anchor(engine, learner.plain, max(1.0, reading.logp_diff / reading.noise_floor))
        elif not math.isnan(reading.followed):
            # Kept until the learner has moved visibly, so that small updates add up to a verdict.
            self._anchor = Anchor(engine, learner.plain, self._anchor.ratio)
        return reading


def read_first(engine: Tensor, learner: Scores, before: Tensor | None) -> Reading:
    """
    Judge the first sync of a run by the log-probs `(T - 1,)` of the engine after it and `before` it.

    Without the latter, or with NaN in it, size gives no verdict.
    """
    logp_diff, noise_floor = _logp_diffs(engine, learner)
    logp_diff_before = math.nan if before is None else (before.to(engine.device) - learner.plain).abs().mean().item()
    limit = max(TENFOLD * noise_floor, logp_diff_before / 2)
    explained, suspect = -math.inf, 0
    if logp_diff > noise_floor:
        others = [*learner.wrong.values()] if before is None else [*learner.wrong.values(), before.to(engine.device)]
        own = (engine - learner.plain).square().sum()
        shares = [(1 - (engine - other).square().sum() / own).item() for other in others]
        suspect = max(range(len(shares)), key=shares.__getitem__, default=0)
        explained = shares[suspect] if shares else explained
    return Reading(
        logp_diff, noise_floor, limit if limit < logp_diff_before else math.inf, logp_diff_before, explained, suspect
    )


def read_later(engine: Tensor, learner: Scores, anchor: Anchor) -> Reading:
    """Judge the log-probs `(T - 1,)` of a later sync by the first of the run and by the learner's movement."""
    logp_diff, noise_floor = _logp_diffs(engine, learner)
    moved = learner.plain - anchor.learner
    noise = max((learner.noisy - learner.plain).norm().item(), (anchor.engine - anchor.learner).norm().item())
    # The share has the standard deviation of this noise in one direction, twice, over the length of the way.
    visible = moved.norm().item() > VISIBLE * noise / math.sqrt(len(moved))
    followed = ((engine - anchor.engine) @ moved / (moved @ moved)).item() if visible else math.nan
    return Reading(logp_diff, noise_floor, GROWTH * anchor.ratio * noise_floor, followed=followed)


def _logp_diffs(engine: Tensor, learner: Scores) -> tuple[float, float]:
    logp_diff, noise_floor = ((other - learner.plain).abs().mean().item() for other in (engine, learner.noisy))
    return logp_diff, max(noise_floor, RESOLUTION)


def diagnosis(reading: Reading, suspect: str, syncs: int, failed: int, processes: int) -> str:
    """What to tell the user about a failed check; `suspect` names the wrong model that explains the mismatch."""
    of_all = f" ({failed} of {processes} processes; the worst is shown)" if processes > 1 else ""
    other_weights = "some layers of the engine hold other weights than the synced ones."
    if reading.stale:
        cause = (
            f"It followed {100 * reading.followed:.0f} % of the learner's movement since the last clear check: the engine "
            "is stale and answers from earlier weights."
        )
    elif suspect:
        cause = f"They are nearer to those of {suspect}: the engine does not compute with what was synced."
    elif not math.isnan(reading.before):
        cause = (
            f"Before it, with random weights, the mismatch was {reading.before:.4f}, and at most {reading.limit:.4f} should be "
            f"left: {other_weights}"
        )
    else:
        cause = f"Judged by the first sync of this run, kernels explain at most {reading.limit:.4f}: {other_weights}"
    return (
        f"After sync {syncs} the engine's log-probs of the sync check prompt are {reading.logp_diff:.4f} nats per token from "
        f"the learner's{of_all}. {cause} Rollouts from it would be off-policy. Repeat with vllm_engine_kwargs="
        "{'enforce_eager': true} to see whether compiled code is at fault, compare with quant_scheme='none', and report the "
        "model and versions. verify_sync='off' skips this check."
    )


def _warn(reading: Reading) -> None:
    """Say of a first sync that passed what could not be judged, or is unusual."""
    if math.isnan(reading.before):
        logger.warning(
            f"The engine held weights of an earlier run, so the size of its first mismatch ({reading.logp_diff:.4f} nats per token) gives no "
            "verdict. Start the server again for a full check."
        )
    elif reading.limit == math.inf:
        logger.warning(
            "verify_sync can tell little about the first sync: the engine's log-probs of the sync check prompt were "
            f"{reading.before:.4f} nats per token from the learner's before it, and rounding alone moves them by "
            f"{reading.noise_floor:.4f}. The model answers nearly as random weights do. Watch mismatch/logp_diff_mean."
        )
    elif reading.logp_diff > USUAL * reading.noise_floor:
        logger.warning(
            f"After the first sync the engine's log-probs of the sync check prompt are {reading.logp_diff:.4f} nats per token "
            f"from the learner's, {reading.logp_diff / reading.noise_floor:.1f} times what one more rounding per layer does; "
            f"{USUAL:g} times is the most expected. No missing layer explains it; another scheme, rotary setting, "
            "attention variant or much coarser kernels in the engine may: compare mismatch/logp_diff_mean with a run of "
            "quant_scheme='none'."
        )
