"""The sync check: does the engine answer with the weights of the last sync?

Engine and learner score one fixed prompt, before the first sync of a run (while the engine holds random weights) and after it.
The mismatch must fall to a level that rounding explains, which is measured on the learner. Later checks also compare how the
log-probs of engine and learner moved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from accelerate.logging import get_logger
from torch import Tensor, nn

from ..quant.layer import LowBitLayer


logger = get_logger(__name__)

LENGTH = 128
SEED = 20260408
# bfloat16 keeps 8 significant bits: the relative difference of two kernels that round one sum differently.
ROUNDING = 2.0**-8
# Mismatches in noise floors. Healthy engines had at most 1.4 (docs/numerics.md). Up to USUAL a first sync passes; above TENFOLD, where
# kernels would be ten times as far apart, it fails. Between them the mismatch must fall below LEFT times that before the sync, since
# with 8-bit activations a missing layer stays below TENFOLD. Later mismatches may be GROWTH times the first.
USUAL, TENFOLD, LEFT, GROWTH = 3.0, 13.0, 0.2, 3.0
# Smallest noise floor in nats, for learners with nearly uniform answers.
RESOLUTION = 1e-4
# The check compares movements once the learner has moved this many standard deviations of noise since the anchor.
VISIBLE = 12.0


class Scores(NamedTuple):
    """Log-probs `(T - 1,)`, float32, of the prompt by the learner's low-bit model."""

    plain: Tensor  # without noise
    noisy: Tensor  # with [`rounding_noise`]; its mean distance from `plain` is the noise floor


def sync_check_tokens(tokenizer: Any, vocab_size: int, length: int = LENGTH) -> list[int]:
    """A fixed prompt: random tokens of a fixed seed, without special and added ones, which an engine may treat differently."""
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    ordinary = [token for token in range(min(vocab_size, len(tokenizer))) if token not in special]
    generator = torch.Generator().manual_seed(SEED)
    return [ordinary[i] for i in torch.randint(len(ordinary), (length,), generator=generator).tolist()]


def engine_logps(llm: Any, token_ids: Sequence[int]) -> Tensor:
    """The engine's log-probs `(T - 1,)`, float32, of a prompt's tokens after the first, at temperature 1."""
    if hasattr(llm, "prompt_logps"):  # a server
        return llm.prompt_logps(token_ids)
    from vllm import SamplingParams

    # For a request with prompt log-probs vLLM computes the prompt anew, without the prefix cache.
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": list(token_ids)}], params, use_tqdm=False)
    steps = zip(output.prompt_logprobs[1:], token_ids[1:], strict=True)
    return torch.tensor([step[token].logprob for step, token in steps])


@torch.no_grad()
def learner_logps(model: nn.Module, token_ids: Sequence[int]) -> Scores:
    """Score the prompt by the learner's low-bit model, even if training does not use it. Call it inside the learner's autocast."""
    ids = torch.tensor([token_ids], device=next(model.parameters()).device)
    with ExitStack() as stack:
        stack.callback(model.train, model.training)
        stack.enter_context(low_bit_forward(model.eval()))
        plain = _forward(model, ids)
        stack.enter_context(rounding_noise(model))
        return Scores(plain, _forward(model, ids))


def _forward(model: nn.Module, ids: Tensor) -> Tensor:
    """Log-probs `(T - 1,)` of `ids`, `(1, T)`."""
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    return logits[0, :-1].float().log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)


@contextmanager
def low_bit_forward(model: nn.Module, on: bool = True) -> Iterator[None]:
    """Run quantized layers in low bits (`on`) or in high precision, whatever `quantize_learner` says."""
    with ExitStack() as stack:
        for layer in (m for m in model.modules() if isinstance(m, LowBitLayer)):
            stack.enter_context(patch.object(layer, "quantized_forward", on))
        yield


@contextmanager
def rounding_noise(model: nn.Module) -> Iterator[None]:
    """Scale each output of each linear layer by `1 + u`, `u` uniform within one bfloat16 rounding; every call draws the same `u`."""
    generator = torch.Generator().manual_seed(SEED)

    def disturb(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        u = torch.rand(output.shape, generator=generator) * (2 * ROUNDING) - ROUNDING
        return (output.float() * (1 + u).to(output.device)).to(output.dtype)

    with ExitStack() as stack:
        for layer in (m for m in model.modules() if isinstance(m, (nn.Linear, LowBitLayer))):
            stack.enter_context(layer.register_forward_hook(disturb))
        yield


# The verdict -----------------------------------------------------------------------------------------------------------


class Reading(NamedTuple):
    """The result of one check in this process. Mismatches are mean absolute log-prob differences in nats per token."""

    logp_diff: float  # between engine and learner
    noise_floor: float  # between the learner without and with rounding noise
    limit: float  # largest mismatch that passes; infinite where the model's answers allow no verdict
    # Share of the learner's movement since the anchor that the engine also made: 1 with the new weights, 0 with the old. NaN
    # if the learner has not moved visibly.
    followed: float = math.nan

    @property
    def stale(self) -> bool:
        return self.followed < 0.5

    @property
    def wrong(self) -> bool:
        """Whether the check fails, also by a mismatch that is NaN or infinite."""
        return self.stale or not math.isfinite(self.logp_diff) or self.logp_diff > self.limit


class Anchor(NamedTuple):
    """Log-probs of engine and learner at a check that passed, and the first mismatch of the run in noise floors (at least 1)."""

    engine: Tensor
    learner: Tensor
    ratio: float


@dataclass
class SyncCheck:
    """Checks an engine against the learner after its syncs, by a fixed prompt."""

    token_ids: Sequence[int]
    every: str  # "first", or a number N: the first sync and then every N syncs
    score: Callable[[], Scores]  # scores the prompt by the learner; all processes call it together
    gather: Callable[[Tensor], Tensor]  # collects the values of all processes, so that they stop together
    report: Callable[[str, float], None]  # logs a metric by name and value
    # Log-probs of the engine before its first sync; `None` if it may hold weights of an earlier run.
    before: Tensor | None = None
    anchor: Anchor | None = None

    def due(self, syncs: int) -> bool:
        """Whether to check the engine after this many syncs."""
        return syncs == 1 if self.every == "first" else (syncs - 1) % int(self.every) == 0

    def look_before(self, llm: Any) -> None:
        """Score the prompt by the engine before its first sync."""
        self.before = engine_logps(llm, self.token_ids)

    def check(self, llm: Any, syncs: int) -> Reading:
        """Compare engine and learner, in every process; `RuntimeError` in all if the engine of any is wrong or stale."""
        anchor, learner, failure = self.anchor, self.score(), None
        engine = torch.full_like(learner.plain, math.nan)
        try:
            engine = engine_logps(llm, self.token_ids).to(engine.device)
        except Exception as error:  # the others wait in the gather; NaN stops them too
            failure = error
        reading = read_later(engine, learner, anchor) if anchor else read_first(engine, learner, self.before)
        rows = [Reading(*row) for row in self.gather(torch.tensor([reading], device=engine.device)).tolist()]
        if failure is not None:
            raise failure
        worst = max(rows, key=lambda row: (row.wrong, row.logp_diff))
        for name, value in zip(("logp_diff", "noise_floor", "allowed"), worst[:3], strict=True):
            if value < math.inf:
                self.report(f"sync/verify_{name}", value)
        if worst.wrong:
            cause = (
                f"At most {worst.limit:.4f} is expected. In some layers the engine does not hold the synced weights, or it "
                "computes something else (scheme, rotary setting, attention variant)."
            )
            if worst.stale:
                cause = f"The engine is stale: it followed {100 * worst.followed:.0f} % of the learner's movement since the last clear check."
            raise RuntimeError(
                f"After sync {syncs} the engine's log-probs of the sync check prompt are {worst.logp_diff:.4f} nats per token from "
                f"the learner's. {cause} Try vllm_engine_kwargs={{'enforce_eager': true}}; verify_sync='off' skips this check."
            )
        if not anchor and worst.limit == math.inf:
            logger.warning(
                "verify_sync cannot tell whether the first sync reached the engine: the model answers almost as random weights "
                f"do, and rounding alone moves its log-probs by {worst.noise_floor:.4f}. Watch mismatch/logp_diff_mean."
            )
        ratio = anchor.ratio if anchor else max(1.0, reading.logp_diff / reading.noise_floor)
        # Kept until the learner has moved visibly, so that small updates add up to a verdict.
        if not anchor or not math.isnan(reading.followed):
            self.anchor = Anchor(engine, learner.plain, ratio)
        return reading


def read_first(engine: Tensor, learner: Scores, before: Tensor | None) -> Reading:
    """Judge the first sync by the engine's log-probs `(T - 1,)` after and `before` it (`None`: a server that may hold an earlier run's weights)."""
    logp_diff, noise_floor = _logp_diffs(engine, learner)
    limit = TENFOLD * noise_floor
    if before is not None:
        logp_diff_before = (before.to(engine.device) - learner.plain).abs().mean().item()
        limit = max(USUAL * noise_floor, min(limit, LEFT * logp_diff_before))
        if limit >= logp_diff_before:  # an engine without the sync would pass too
            limit = math.inf
    return Reading(logp_diff, noise_floor, limit)


def read_later(engine: Tensor, learner: Scores, anchor: Anchor) -> Reading:
    """
    Judge the log-probs `(T - 1,)` of a later sync by the first mismatch of the run and by the learner's movement.

    An update may move log-probs less than two kernels differ, so the size of the mismatch cannot show a stale engine. But the
    engine's movement since the anchor, projected on the learner's, is as long as the learner's with the new weights and 0 with the
    old. Noise adds little in that one direction: if `T - 1` independent errors have norm `n`, the standard deviation is `n / sqrt(T - 1)`.
    Both readings of the engine have this error. So a movement of VISIBLE standard deviations is measured to
    `sqrt(2) / 12 = 0.12` of itself, and a share below one half is four standard deviations from 1.
    """
    logp_diff, noise_floor = _logp_diffs(engine, learner)
    moved = learner.plain - anchor.learner
    noise = max((learner.noisy - learner.plain).norm().item(), (anchor.engine - anchor.learner).norm().item())
    visible = moved.norm().item() > VISIBLE * noise / math.sqrt(len(moved))
    followed = ((engine - anchor.engine) @ moved / (moved @ moved)).item() if visible else math.nan
    return Reading(logp_diff, noise_floor, GROWTH * anchor.ratio * noise_floor, followed)


def _logp_diffs(engine: Tensor, learner: Scores) -> tuple[float, float]:
    logp_diff, noise_floor = ((other - learner.plain).abs().mean().item() for other in (engine, learner.noisy))
    return logp_diff, max(noise_floor, RESOLUTION)
