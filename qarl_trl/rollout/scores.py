"""Log-probs of one fixed prompt: by the engine, by the learner, and by the learner with rounding noise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn

from ..quant.linear import LowBitLayer


LENGTH = 128
SEED = 20260408
# bfloat16 keeps 8 significant bits: two kernels that round one sum differently are this far apart, relatively.
ROUNDING = 2.0**-8


class Scores(NamedTuple):
    """Log-probs `(T - 1,)`, float32, of the prompt by the learner's low-bit model."""

    plain: Tensor  # as it is
    noisy: Tensor  # with [`rounding_noise`]; its mean distance from `plain` is the noise floor


def sync_check_tokens(tokenizer: Any, vocab_size: int, length: int = LENGTH) -> list[int]:
    """A fixed prompt: tokens drawn by a fixed seed, without special and added ones, since an engine may act on them."""
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    ordinary = [token for token in range(min(vocab_size, len(tokenizer))) if token not in special]
    generator = torch.Generator().manual_seed(SEED)
    return [ordinary[i] for i in torch.randint(len(ordinary), (length,), generator=generator).tolist()]


def engine_logps(llm: Any, token_ids: Sequence[int]) -> Tensor:
    """Log-probs `(T - 1,)`, float32, of a prompt's tokens after the first, by the engine at temperature 1."""
    if hasattr(llm, "prompt_logps"):  # a server
        return llm.prompt_logps(token_ids)
    from vllm import SamplingParams

    # A prompt whose log-probs are asked for is computed anew, never read from the prefix cache.
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": list(token_ids)}], params, use_tqdm=False)
    steps = zip(output.prompt_logprobs[1:], token_ids[1:], strict=True)
    return torch.tensor([step[token].logprob for step, token in steps])


@torch.no_grad()
def learner_logps(model: nn.Module, token_ids: Sequence[int]) -> Scores:
    """Score the prompt by the learner's low-bit model, also where training does not use it. Call inside the learner's autocast."""
    ids = torch.tensor([token_ids], device=next(model.parameters()).device)
    training = model.training
    model.eval()
    try:
        with low_bit_forward(model):
            plain = _forward(model, ids)
            with rounding_noise(model):
                return Scores(plain, _forward(model, ids))
    finally:
        model.train(training)


def _forward(model: nn.Module, ids: Tensor) -> Tensor:
    """Log-probs `(T - 1,)` of `ids`, `(1, T)`."""
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    return logits[0, :-1].float().log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)


@contextmanager
def low_bit_forward(model: nn.Module, on: bool = True) -> Iterator[None]:
    """Run quantized layers in low bits, or not, whatever training does (`quantize_learner`)."""
    with ExitStack() as stack:
        for layer in (m for m in model.modules() if isinstance(m, LowBitLayer)):
            stack.enter_context(patch.object(layer, "quantized_forward", on))
        yield


@contextmanager
def rounding_noise(model: nn.Module) -> Iterator[None]:
    """Scale each output of each linear layer by `1 + u`, `u` uniform in one bfloat16 rounding; the same on every call."""
    generator = torch.Generator().manual_seed(SEED)

    def disturb(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        u = torch.rand(output.shape, generator=generator) * (2 * ROUNDING) - ROUNDING
        return (output.float() * (1 + u).to(output.device)).to(output.dtype)

    layers = (m for m in model.modules() if isinstance(m, (nn.Linear, LowBitLayer)))
    handles = [layer.register_forward_hook(disturb) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
