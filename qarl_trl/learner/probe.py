"""Whether a model keeps the sequences of a packed row apart: what its config says, and what a measurement says."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from ..quant.layers.experts import num_experts
from ..quant.names import base_model


# Tokens of each sequence of the measurement.
LENGTH = 12

# Layers whose attention transformers masks by the positions of a row. State spaces and convolutions run across
# sequences; chunked attention counts from the start of the row.
ATTENTION_LAYERS = ("full_attention", "sliding_attention")
# Models without attention, whose configs name no types of layers.
RECURRENT_MODELS = ("mamba", "mamba2", "rwkv", "xlstm")

# Tolerance for rounding, relative to the change when attention sees the neighbour. A mixture needs it, because its
# experts get other numbers of tokens when a neighbour changes. Measured on toys: 2e-6 in float32, 0 in bfloat16; 1 if
# attention reaches across.
NOISE = 0.25


def unfit(model: nn.Module) -> str | None:
    """
    Why packed rows of a model would be wrong or slow, by its config and signature.

    Args:
        model: A causal language model, also inside of a `PeftModel`.

    Returns:
        The reason, for the end of a sentence; `None` if nothing speaks against packing.
    """
    causal_lm = base_model(model)
    config = causal_lm.config

    if config.get_text_config() is not config:
        return "it has other parts than a text model, which count positions in their own way"

    run_on = layers_that_run_on(config)
    if run_on is not None:
        return run_on

    forward = inspect.signature(causal_lm.base_model.forward)
    if "position_ids" not in forward.parameters:
        return "it takes no position_ids"

    attention = config._attn_implementation
    if attention in ("eager", "flex_attention"):
        return f"its {attention} attention would compute the square of a row; take sdpa or a flash attention"

    adapter = getattr(model, "active_peft_config", None)
    if adapter is not None and adapter.is_prompt_learning:
        return "its adapter puts learned tokens before each row"
    return None


def layers_that_run_on(config: PretrainedConfig) -> str | None:
    """
    Which layers of a model do not keep the sequences of a packed row apart, by its config.

    Args:
        config: The model's config.

    Returns:
        The reason, for the end of a sentence; `None` if all layers attend.
    """
    if config.model_type in RECURRENT_MODELS:
        return f"a {config.model_type} runs on into the next sequence"

    # RecurrentGemma has the second name, and calls attention without a kind.
    layer_types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    other_types = sorted(set(layer_types) - {"attention", *ATTENTION_LAYERS})
    if not other_types:
        return None
    return f"it has layers of type {', '.join(map(repr, other_types))}, which run on into the next sequence"


def crossing(
    model: nn.Module, score: Callable[[Tensor, int], Tensor], config: PretrainedConfig, exact: bool = True
) -> str | None:
    """
    Measure whether the sequences of a packed row cross: log-probs change with a neighbour, or by packing.

    Runs the model four times, in evaluation mode and without gradients.

    Args:
        model: The model that `score` runs.
        score: Returns for token ids `(B, L)` and a number `n` the log-probs `(B, n)` of the last `n` tokens of each
            row, by one packed pass.
        config: The model's config.
        exact: Whether a neighbour may not change a bit of a dense model's log-probs.

    Returns:
        What is wrong, for the end of a sentence; `None` if the sequences stay apart.
    """
    first, other, last = _random_sequences(config)
    keep = LENGTH - 1

    # Dropout would change log-probs by itself.
    with torch.no_grad(), _evaluation_mode(model):
        # `last` stands second in the row, behind a neighbour; `[1]` are its log-probs.
        beside_first = score(torch.cat((first, last)), keep)[1]
        beside_other = score(torch.cat((other, last)), keep)[1]
        alone = score(last, keep)[0]
        # One sequence of twice the length: the log-probs of `last` when it does see `first`.
        after_first = score(torch.cat((first, last), dim=1), keep)[0]

    # Relative to what seeing a neighbour does, so that it fits any model, dtype and size of log-probs.
    tolerance = NOISE * _mean_change(after_first, alone)

    # Of a dense model the two are the same operations on the same numbers.
    by_neighbour = _mean_change(beside_first, beside_other)
    allowed = 0 if exact and not num_experts(config) else tolerance
    if by_neighbour > allowed:
        return f"a sequence's log-probs change by {by_neighbour:.1e} with its neighbour"

    by_packing = _mean_change(beside_first, alone)
    # Not `>`, which a NaN would pass.
    if not by_packing <= tolerance:
        return f"a sequence's log-probs change by {by_packing:.1e} when it is packed"
    return None


def _random_sequences(config: PretrainedConfig) -> Tensor:
    """Three sequences of token ids, `(3, 1, LENGTH)`; the same in every process, which must agree on the result."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(config.get_text_config().vocab_size, (3, 1, LENGTH), generator=generator)


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode in the block, and then the mode of before."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _mean_change(logps: Tensor, others: Tensor) -> Tensor:
    return (logps - others).abs().mean()
