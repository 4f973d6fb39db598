"""The sync check: does the engine answer with the weights of the last sync?

Engine and learner score one fixed prompt, before the first sync of a run (while the engine holds random weights) and
after it. The mismatch must fall to a level that rounding explains, which is measured on the learner. Later checks also
compare how the log-probs of engine and learner moved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor

from .engine_logps import engine_logps
from .learner_logps import LearnerLogps
from .verdict import GROWTH, USUAL, Anchor, Reading, read_first, read_later


logger = get_logger(__name__)


@dataclass
class SyncCheck:
    """
    Checks an engine against the learner after its syncs, by a fixed prompt.

    Args:
        token_ids: The prompt, `T` tokens.
        every: `"first"`, or a number N: the first sync and then every N syncs.
        score: LearnerLogps the prompt by the learner. All processes call it together.
        gather: Collects the rows `(1, 4)` of all processes, so that they stop together.
        report: Logs a metric by name and value.
        usual: Mismatch that always passes, in noise floors; see `verdict.py`.
        before: The engine's log-probs before its first sync, `(T - 1,)` float32; `None` if it may hold weights of an
            earlier run.
        anchor: What the next check compares with; `None` before the first check.
    """

    token_ids: Sequence[int]
    every: str
    score: Callable[[], LearnerLogps]
    gather: Callable[[Tensor], Tensor]
    report: Callable[[str, float], None]
    usual: float = USUAL
    before: Tensor | None = None
    anchor: Anchor | None = None

    def due(self, syncs: int) -> bool:
        """
        Whether to check the engine.

        Args:
            syncs: The number of syncs so far.
        """
        if self.every == "first":
            return syncs == 1
        return (syncs - 1) % int(self.every) == 0

    def look_before(self, llm: Any) -> None:
        """
        Score the prompt by the engine before its first sync.

        Args:
            llm: The engine, as [`engine_logps`] takes it.
        """
        self.before = engine_logps(llm, self.token_ids)

    def check(self, llm: Any, syncs: int) -> Reading:
        """
        Compare engine and learner. All processes call it together.

        Args:
            llm: The engine, as [`engine_logps`] takes it.
            syncs: The number of syncs so far.

        Returns:
            What this process read.

        Raises:
            RuntimeError: in all processes if the engine of any is wrong or stale.
        """
        learner = self.score()

        failure: Exception | None = None
        try:
            engine = engine_logps(llm, self.token_ids).to(learner.plain.device)
        except Exception as error:
            # The other processes wait in the gather. NaN stops them, too.
            failure = error
            engine = torch.full_like(learner.plain, math.nan)

        reading = self._read(engine, learner)
        readings = self._gather(reading, engine.device)
        if failure is not None:
            raise failure

        # The same in all processes, so that all of them stop or none.
        worst = max(readings, key=lambda reading: (reading.wrong, reading.logp_diff))
        self._report(worst)
        if worst.wrong:
            raise RuntimeError(_refusal(worst, syncs))
        if self.anchor is None and worst.limit == math.inf:
            logger.warning(
                "verify_sync cannot tell whether the first sync reached the engine: "
                "the model answers almost as random weights do, "
                f"and rounding alone moves its log-probs by {worst.noise_floor:.4f}. Watch mismatch/logp_diff_mean."
            )

        self._move_anchor(engine, learner, reading)
        return reading

    def _read(self, engine: Tensor, learner: LearnerLogps) -> Reading:
        """Judge this process's engine."""
        if self.anchor is None:
            return read_first(engine, learner, self.before, self.usual)
        return read_later(engine, learner, self.anchor)

    def _gather(self, reading: Reading, device: torch.device) -> list[Reading]:
        """The readings of all processes."""
        row = [reading.logp_diff, reading.noise_floor, reading.limit, reading.followed]
        rows = self.gather(torch.tensor([row], device=device)).tolist()

        return [
            Reading(logp_diff=logp_diff, noise_floor=noise_floor, limit=limit, followed=followed)
            for logp_diff, noise_floor, limit, followed in rows
        ]

    def _report(self, worst: Reading) -> None:
        """Log the worst reading of all processes."""
        values = {"logp_diff": worst.logp_diff, "noise_floor": worst.noise_floor, "allowed": worst.limit}
        for name, value in values.items():
            # Neither NaN nor infinity says anything in a log, and JSON has neither.
            if value < math.inf:
                self.report(f"sync/verify_{name}", value)

    def _move_anchor(self, engine: Tensor, learner: LearnerLogps, reading: Reading) -> None:
        """Let the next checks compare with this one, which passed."""
        if self.anchor is None:
            ratio = max(self.usual / GROWTH, reading.logp_diff / reading.noise_floor)
            self.anchor = Anchor(engine, learner.plain, ratio)
            return

        # The anchor waits until the learner has moved visibly, so that small updates add up to a verdict.
        if not math.isnan(reading.followed):
            self.anchor = Anchor(engine, learner.plain, self.anchor.ratio)


def _refusal(worst: Reading, syncs: int) -> str:
    """The message of a check that failed."""
    if worst.stale:
        cause = (
            "The engine is stale: "
            f"it followed {100 * worst.followed:.0f} % of the learner's movement since the last clear check."
        )
    else:
        cause = (
            f"At most {worst.limit:.4f} is expected. In some layers the engine does not hold the synced weights, "
            "or it computes something else (scheme, rotary setting, attention variant)."
        )
    return (
        f"After sync {syncs} the engine's log-probs of the sync check prompt are "
        f"{worst.logp_diff:.4f} nats per token from the learner's. {cause} "
        "Try vllm_engine_kwargs={'enforce_eager': true}; verify_sync='off' skips this check."
    )
