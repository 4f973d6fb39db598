"""The sync check: does the engine answer with the weights of the last sync?

Engine and learner score one fixed prompt, before the first sync of a run (while the engine holds random weights) and
after it. The mismatch must fall to a level that rounding explains, which is measured on the learner. Later checks also
compare how the log-probs of engine and learner moved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from accelerate.logging import get_logger
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..quant.layers.experts import QuantExperts
from ..quant.layers.layer import LowBitLayer
from ..quant.sharding.shards import shape_of
from .prompt_logps import engine_logps
from .sync_verdict import GROWTH, USUAL, Anchor, Reading, read_first, read_later
from .sync_verdict import Scores as Scores  # the trainer's function returns them


logger = get_logger(__name__)

# Number of tokens of the prompt, and the seed of the prompt and of the noise.
LENGTH = 128
SEED = 20260408
# bfloat16 keeps 8 significant bits: the relative difference of two kernels that round one sum differently.
ROUNDING = 2.0**-8


# The scores ----------------------------------------------------------------------------------------------------------


def sync_check_tokens(tokenizer: Any, vocab_size: int, length: int = LENGTH) -> list[int]:
    """
    A fixed prompt: random tokens of a fixed seed.

    Args:
        tokenizer: The model's tokenizer. Its special and added tokens are left out, because an engine may treat them
            differently.
        vocab_size: The number of tokens that the model knows.
        length: The number of tokens of the prompt.
    """
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    known = min(vocab_size, len(tokenizer))
    ordinary = [token for token in range(known) if token not in special]

    generator = torch.Generator().manual_seed(SEED)
    chosen = torch.randint(len(ordinary), (length,), generator=generator)
    return [ordinary[index] for index in chosen.tolist()]


@torch.no_grad()
def learner_logps(model: nn.Module, token_ids: Sequence[int]) -> Scores:
    """
    Score the prompt by the learner's low-bit model, even if training does not use it.

    Call it inside the learner's autocast. It leaves the model as it was.

    Args:
        model: The learner's model.
        token_ids: The prompt, `T` tokens.
    """
    ids = torch.tensor([token_ids], device=next(model.parameters()).device)

    was_training = model.training
    try:
        model.eval()
        with low_bit_forward(model):
            plain = _forward(model, ids)
            with rounding_noise(model):
                noisy = _forward(model, ids)
    finally:
        model.train(was_training)
    return Scores(plain=plain, noisy=noisy)


def _forward(model: nn.Module, ids: Tensor) -> Tensor:
    """Log-probs `(T - 1,)` of `ids`, `(1, T)`."""
    # Without a cache: nothing is generated from it.
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    logps = logits[0, :-1].float().log_softmax(-1)
    return logps.gather(-1, ids[0, 1:, None]).squeeze(-1)


@contextmanager
def low_bit_forward(model: nn.Module, on: bool = True) -> Iterator[None]:
    """
    Run quantized layers in low bits or in high precision, whatever `quantize_learner` says.

    Args:
        model: The learner's model.
        on: Run them in low bits.
    """
    layers = [module for module in model.modules() if isinstance(module, LowBitLayer)]
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(patch.object(layer, "quantized_forward", on))
        yield


@contextmanager
def rounding_noise(model: nn.Module) -> Iterator[None]:
    """
    Scale each product of each linear layer by `1 + u`, where `u` is uniform within one bfloat16 rounding.

    In a mixture these are also the router's logits, of which a small error chooses another expert, and the outputs of
    experts; of quantized experts both products, too.

    Args:
        model: The learner's model. Each context draws the same `u` for it.
    """
    generator = torch.Generator().manual_seed(SEED)

    def disturbed(output: Tensor) -> Tensor:
        # Drawn on the CPU, so that every device gets the same noise.
        u = torch.rand(output.shape, generator=generator) * (2 * ROUNDING) - ROUNDING
        factor = (1 + u).to(output.device)
        return (output.float() * factor).to(output.dtype)

    def disturb(module: nn.Module, args: Any, output: Any) -> Any:
        # Other modules with parameters of three dimensions may return more than a tensor.
        return disturbed(output) if isinstance(output, Tensor) else output

    with ExitStack() as stack:
        for module in model.modules():
            # Also the head, which is not quantized: the engine's kernel rounds its sums, too.
            if isinstance(module, (nn.Linear, LowBitLayer)) or _has_parameter(module, dimensions=3):
                stack.enter_context(module.register_forward_hook(disturb))
            elif _has_parameter(module, dimensions=2) and not isinstance(module, nn.Embedding):
                stack.enter_context(_changed_products(module, disturbed))
            if isinstance(module, QuantExperts):
                multiply = module._matmul
                stack.enter_context(patch.object(module, "_matmul", _then(multiply, disturbed)))
        yield


def _has_parameter(module: nn.Module, dimensions: int) -> bool:
    """Whether a module has a parameter of so many dimensions of its own: 3 as experts, 2 as a router."""
    return any(len(shape_of(param)) == dimensions for param in module.parameters(recurse=False))


def _then(function: Callable[..., Tensor], change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """A function whose result is changed."""
    return lambda *args: change(function(*args))


@contextmanager
def _changed_products(module: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Change the products inside of the forward of a router, which returns more than its logits."""
    forward = module.forward

    def forward_with_changes(*args: Any, **kwargs: Any) -> Any:
        with _ChangedProducts(change):
            return forward(*args, **kwargs)

    with patch.object(module, "forward", forward_with_changes):
        yield


class _ChangedProducts(TorchFunctionMode):
    """Changes the results of `F.linear` in the block."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._change = change

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        return self._change(output) if function is F.linear else output


# The check -----------------------------------------------------------------------------------------------------------


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
        usual: Mismatch that always passes, in noise floors; see `sync_verdict`.
        before: The engine's log-probs before its first sync, `(T - 1,)` float32; `None` if it may hold weights of an
            earlier run.
        anchor: What the next check compares with; `None` before the first check.
    """

    token_ids: Sequence[int]
    every: str
    score: Callable[[], Scores]
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

    def _read(self, engine: Tensor, learner: Scores) -> Reading:
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

    def _move_anchor(self, engine: Tensor, learner: Scores, reading: Reading) -> None:
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
