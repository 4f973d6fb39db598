"""The learner's log-probs of the prompt, by the weights that the engine should have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...quant.layers.layer import multiplying
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
        with multiplying(model, low_bits=True):
            plain = _forward(model, ids)
            with rounding_noise(model):
                noisy = _forward(model, ids)
    finally:
        model.train(was_training)
    return LearnerLogps(plain=plain, noisy=noisy)


def _forward(model: nn.Module, ids: Tensor) -> Tensor:
    """Log-probs `(T - 1,)` of the tokens of `ids`, `(1, T)`, after the first."""
    # Without a cache: nothing is generated from it.
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    # In float32: around -3 bfloat16 numbers are up to 0.016 apart, more than many noise floors.
    logps = logits[0, :-1].float().log_softmax(-1)
    return logps.gather(-1, ids[0, 1:, None]).squeeze(-1)
