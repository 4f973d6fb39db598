"""When the sync check looks at an engine, and how all processes of a run stop together for one that is wrong.

Before the first sync the engine holds random weights: the check keeps what it answers then. After the first sync the
mismatch between engine and learner must have fallen to a level that rounding explains. After later ones it must not
have grown, and the engine must have moved where the learner did. The rules are in `verdict`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from accelerate.logging import get_logger
from torch import Tensor, nn

from ...quant.layers.experts import expert_modules, num_experts
from .learner_logps import LearnerLogps
from .verdict import (
    RESOLUTION,
    USUAL,
    USUAL_OF_WEIGHT_ONLY_EXPERTS,
    Anchor,
    Reading,
    first_anchor,
    read_first,
    read_later,
)


# The log-probs that an engine gives a prompt: from `T` token ids to `(T - 1,)` float32.
EngineLogps = Callable[[Sequence[int]], Tensor]

logger = get_logger(__name__)

# A mismatch of rollouts so many times the first one, or the last one that rose, asks for a check.
RISEN = 3.0


def usual_mismatch(model: nn.Module) -> float:
    """
    The mismatch that always passes, in noise floors, for the kernels that an engine has for a model.

    Args:
        model: The learner's model; in a low-bit run after `apply_quantization`.
    """
    if not num_experts(model.config):
        return USUAL

    schemes = [getattr(experts, "scheme", None) for _, experts in expert_modules(model)]
    quantize_inputs = [scheme is not None and scheme.input_activations is not None for scheme in schemes]
    if schemes and all(quantize_inputs):
        return USUAL
    return USUAL_OF_WEIGHT_ONLY_EXPERTS


@dataclass
class SyncCheck:
    """
    Checks an engine against the learner after its syncs, by a fixed prompt.

    Args:
        token_ids: The prompt, `T` tokens.
        every: `"first"`, or a number N: the first sync and then every N syncs.
        score: Scores the prompt by the learner. All processes call it together.
        gather: Collects the rows `(1, 4)` of all processes, so that they stop together.
        report: Logs a metric by name and value.
        usual: Mismatch that always passes, in noise floors, from [`usual_mismatch`].
        watched: Mismatch that later rollouts are compared with, in nats per token: the first, or the last that rose;
            `None` before the first rollout.
        scores_as_trained: Whether `score` computes as the learner that trains. A bfloat16 learner beside a low-bit
            engine is expected to be far from it.
        limit: The largest mismatch that the last check let pass, in nats per token; infinite before the first.
        asked: Whether the next sync is checked whatever `every` says.
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
    watched: float | None = None
    scores_as_trained: bool = True
    limit: float = math.inf
    asked: bool = False
    before: Tensor | None = None
    anchor: Anchor | None = None

    def look_before(self, engine_logps: EngineLogps) -> None:
        """
        Score the prompt by the engine before its first sync.

        Args:
            engine_logps: Scores a prompt by the engine.
        """
        self.before = engine_logps(self.token_ids)

    def due(self, syncs: int) -> bool:
        """
        Whether to check the engine.

        Args:
            syncs: The number of syncs so far.
        """
        if self.asked:
            return True
        if self.every == "first":
            return syncs == 1
        return (syncs - 1) % int(self.every) == 0

    def watch(self, mismatch: float) -> None:
        """
        Ask for a check after the next sync if the mismatch of rollouts has grown `RISEN`-fold over `watched`.

        A fault may show only when weights have moved: at the first sync an engine that has one copy of a weight is
        equal to a learner that has two.

        Args:
            mismatch: Of a rollout batch, over all processes: mean absolute log-prob difference in nats per token.
        """
        if self.watched is None:
            self.watched = mismatch
            self._compare_with_prompt(mismatch)
        elif mismatch > RISEN * max(self.watched, RESOLUTION):
            logger.warning(
                f"The mismatch between engine and learner rose from {self.watched:.2g} to {mismatch:.2g} nats per "
                "token: the sync check runs again after the next sync."
            )
            # So a mismatch that goes on growing is checked at each multiple.
            self.watched = mismatch
            self.asked = True

    def _compare_with_prompt(self, mismatch: float) -> None:
        """Warn if the first answers are far from the learner although the prompt of the check is near."""
        if self.scores_as_trained and mismatch > RISEN * max(self.limit, RESOLUTION):
            logger.warning(
                f"The first answers of the engine are {mismatch:.2g} nats per token from the learner, where the sync "
                f"check's prompt may be {self.limit:.2g}: the engine computes the tokens that it samples "
                "differently from those of a prompt. Compare with vllm_engine_kwargs={'enforce_eager': true}."
            )

    def check(self, engine_logps: EngineLogps, syncs: int) -> Reading:
        """
        Compare engine and learner. All processes call it together.

        Args:
            engine_logps: Scores a prompt by the engine.
            syncs: The number of syncs so far.

        Returns:
            What this process read.

        Raises:
            RuntimeError: in all processes if the engine of any is wrong or stale.
        """
        self.asked = False
        learner = self.score()

        failure: Exception | None = None
        try:
            engine = engine_logps(self.token_ids).to(learner.plain.device)
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
        self.limit = worst.limit
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
            self.anchor = first_anchor(engine, learner, reading, self.usual)
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
