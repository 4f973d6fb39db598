"""The learner's log-probs of the prompt, by the weights that the engine should have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor, nn

from ...quant.layers.layer import LowBitLayer
from .rounding_noise import rounding_noise


@dataclass(frozen=True)
class LearnerLogps:
    """
    Log-probs of the prompt by the learner's low-bit model.

    Args:
        plain: Without noise, `(T - 1,)` float32.
        noisy: With rounding noise, `(T - 1,)` float32. Its mean distance from `plain` is the noise floor.
    """

    plain: Tensor
    noisy: Tensor


@torch.no_grad()
def learner_logps(model: nn.Module, token_ids: Sequence[int]) -> LearnerLogps:
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
    return LearnerLogps(plain=plain, noisy=noisy)


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


def _forward(model: nn.Module, ids: Tensor) -> Tensor:
    """Log-probs `(T - 1,)` of the tokens of `ids`, `(1, T)`, after the first."""
    # Without a cache: nothing is generated from it.
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    # In float32: around -3 bfloat16 numbers are up to 0.016 apart, more than many noise floors.
    logps = logits[0, :-1].float().log_softmax(-1)
    return logps.gather(-1, ids[0, 1:, None]).squeeze(-1)
