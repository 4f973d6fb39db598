"""The canary: does the engine answer with the weights that were just published?

After a publish, engine and learner score the same fixed tokens. Invariant: the verdict has no threshold in nats. The gap is
measured against what one more rounding per layer does to the learner's own log-probs (`rounding_noise`), a yardstick that
grows with depth, vocabulary and activation quantization as honest kernel differences do (paper Sec. 3.1: rollout and
learner run the same low-bit model).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..quant.linear import LowBitLayer


LENGTH = 128
SEED = 20260408
# bfloat16 keeps 8 significant bits: two kernels that round one sum differently are this far apart, relatively.
ROUNDING = 2.0**-8
# Measured on toy models, in yardsticks (docs/numerics.md): honest engines 0.98 to 1.33, and one wrong v, o, gate, up or
# down layer at least 5.3 (FP8_DYNAMIC) to 35 (W4A16).
ALLOWED = 3.0
# The movement of the learner since the anchor must stand out this far before the engine's is measured along it.
VISIBLE = 8.0


@dataclass(frozen=True)
class Reading:
    """
    What one check found on this process.

    Attributes:
        gap (`float`): Mean absolute log-prob difference of engine and learner, nats per token.
        allowed (`float`): Largest honest gap, nats per token.
        followed (`float`): Share of the learner's movement since the anchor that the engine made too: 1 for an engine
            with the new weights, 0 for one with the old. NaN where the learner has not moved visibly.
    """

    gap: float
    allowed: float
    followed: float = float("nan")

    @property
    def corrupted(self) -> bool:
        """NaN counts as too large."""
        return not self.gap <= self.allowed

    @property
    def stale(self) -> bool:
        return self.followed < 0.5


class Canary:
    """
    Checks an engine against the learner after its publishes.

    Args:
        token_ids (`Sequence[int]`): The fixed prompt, see [`canary_tokens`].
        every (`str` or `int`): `"first"`, or every so many publishes, the first one included.
        score (`Callable[[], tuple[Tensor, Tensor]]`): Learner log-probs `(T - 1,)` of the prompt, without and with
            [`rounding_noise`]; collective where the model is sharded.
        gather (`Callable[[Tensor], Tensor]`): Values of all processes, so that all of them stop together.
        report (`Callable[[str, float], None]`): Takes `publish/verify_gap` and `publish/verify_allowed`.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        every: str | int,
        score: Callable[[], tuple[Tensor, Tensor]],
        gather: Callable[[Tensor], Tensor],
        report: Callable[[str, float], None],
    ) -> None:
        self.token_ids = list(token_ids)
        self.every = every
        self._score, self._gather, self._report = score, gather, report
        self._anchor: Tensor | None = None

    def due(self, publishes: int) -> bool:
        """Whether the engine is to be checked after this many publishes."""
        return publishes == 1 if self.every == "first" else (publishes - 1) % self.every == 0

    def check(self, llm: Any, publishes: int) -> Reading:
        """
        Compare engine and learner now. Every process has to call this.

        Raises:
            RuntimeError: on all processes when the engine of any is stale or corrupted.
        """
        engine = engine_logps(llm, self.token_ids)
        learner, noisy = self._score()
        reading = read(engine.to(learner.device), learner, noisy, self._anchor)
        numbers = [reading.gap, reading.allowed, reading.followed, float(reading.corrupted or reading.stale)]
        rows = self._gather(torch.tensor([numbers], device=learner.device)).cpu()
        worst = rows[rows[:, 3].argmax()]
        self._report("publish/verify_gap", rows[:, 0].max().item())
        self._report("publish/verify_allowed", rows[:, 1].min().item())
        if worst[3]:
            raise RuntimeError(diagnosis(Reading(*worst[:3].tolist()), publishes, int(rows[:, 3].sum()), len(rows)))
        if self._anchor is None or not math.isnan(reading.followed):
            # Kept until the learner has moved visibly, so that small updates add up to a verdict.
            self._anchor = learner
        return reading


def read(engine: Tensor, learner: Tensor, noisy: Tensor, anchor: Tensor | None = None) -> Reading:
    """
    Judge log-probs of the same tokens, all `(T,)`.

    Args:
        engine (`Tensor`): By the engine.
        learner (`Tensor`): By the learner's low-bit model.
        noisy (`Tensor`): By the same model with one more rounding per layer.
        anchor (`Tensor`, *optional*): By the learner at an earlier check, when the engine had its weights.
    """
    engine, learner, noisy = engine.double(), learner.double(), noisy.double()
    noise = noisy - learner
    gap, allowed = (engine - learner).abs().mean().item(), ALLOWED * noise.abs().mean().item()
    if anchor is None:
        return Reading(gap, allowed)
    moved = learner - anchor.double()
    # The standard deviation of the share below is at most that of the noise, per token, over the length of the way.
    if not moved.norm() > VISIBLE * noise.square().mean().sqrt():
        return Reading(gap, allowed)
    return Reading(gap, allowed, ((engine - anchor.double()) @ moved / (moved @ moved)).item())


def diagnosis(reading: Reading, publishes: int, failed: int, processes: int) -> str:
    """What to tell the user about a failed check."""
    found = (
        f"After publish {publishes} the engine's log-probs of the canary prompt are {reading.gap:.4f} nats per token from "
        f"the learner's; kernels explain at most {reading.allowed:.4f}."
    )
    if processes > 1:
        found += f" ({failed} of {processes} processes; the worst is shown.)"
    if reading.stale:
        cause = (
            f" It followed {100 * reading.followed:.0f} % of the learner's movement since the last clear check: the engine "
            "is stale and answers from earlier weights."
        )
    else:
        cause = (
            " Some layer of the engine holds other weights than the published ones, or runs another scheme, rotary "
            "setting or attention variant than the learner."
        )
    return (
        found + cause + " Rollouts from it would be off-policy without a word. Repeat with vllm_engine_kwargs="
        "{'enforce_eager': true} to see whether compiled code is at fault, compare with quant_scheme='none', and report the "
        "model and versions. publish_verify='off' skips this check."
    )


def canary_tokens(tokenizer: Any, vocab_size: int, length: int = LENGTH) -> list[int]:
    """
    A fixed prompt: ordinary tokens of the vocabulary, drawn by a fixed seed.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Its special and added tokens are left out, since an engine may act on them.
        vocab_size (`int`): Rows of the embedding.
        length (`int`, *optional*, defaults to 128): Number of tokens.
    """
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    ordinary = [token for token in range(min(vocab_size, len(tokenizer))) if token not in special]
    generator = torch.Generator().manual_seed(SEED)
    return [ordinary[i] for i in torch.randint(len(ordinary), (length,), generator=generator).tolist()]


def engine_logps(llm: Any, token_ids: Sequence[int]) -> Tensor:
    """Log-probs `(T - 1,)`, float32, of a prompt's tokens after the first, by the engine at temperature 1."""
    from vllm import SamplingParams

    # A prompt whose log-probs are asked for is computed anew, never read from the prefix cache.
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": list(token_ids)}], params, use_tqdm=False)
    steps = zip(output.prompt_logprobs[1:], token_ids[1:], strict=True)
    return torch.tensor([step[token].logprob for step, token in steps])


@torch.no_grad()
def learner_logps(model: nn.Module, token_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """
    Log-probs `(T - 1,)`, float32, of the same tokens by the learner's low-bit model, without and with rounding noise.

    Call inside the learner's autocast. The low-bit forward runs also where training does not use it.
    """
    ids = torch.tensor([token_ids], device=next(model.parameters()).device)
    training = model.training
    model.eval()
    try:
        with low_bit_forward(model):
            plain = _forward(model, ids)
            with rounding_noise(model):
                return plain, _forward(model, ids)
    finally:
        model.train(training)


def _forward(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    return logits[0, :-1].float().log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)


@contextmanager
def low_bit_forward(model: nn.Module) -> Iterator[None]:
    """Run quantized layers in low bits, whatever training does (`quant_learner=False`)."""
    off = [m for m in model.modules() if isinstance(m, LowBitLayer) and not m.quantized_forward]
    for module in off:
        module.quantized_forward = True
    try:
        yield
    finally:
        for module in off:
            module.quantized_forward = False


@contextmanager
def rounding_noise(model: nn.Module) -> Iterator[None]:
    """Scale each output of each linear layer by `1 + u`, `u` uniform in one bfloat16 rounding; the same on every call."""
    generator = torch.Generator().manual_seed(SEED)

    def disturb(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        u = torch.rand(output.shape, generator=generator) * (2 * ROUNDING) - ROUNDING
        return (output.float() * (1 + u).to(output.device)).to(output.dtype)

    hooks = [m.register_forward_hook(disturb) for m in model.modules() if isinstance(m, (nn.Linear, LowBitLayer))]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
