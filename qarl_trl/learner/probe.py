"""Whether a model keeps the sequences of a packed row apart, by its config and by a measurement."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from ..quant.experts import num_experts
from ..quant.names import base_model


LENGTH = 12
# Layers whose attention transformers masks by the positions of a row. State spaces and convolutions run across sequences;
# chunked attention counts from the start of the row.
ATTENTION_LAYERS = ("full_attention", "sliding_attention")
# Tolerance for rounding, relative to the change when attention sees the neighbour. A mixture needs it, because its experts get other
# numbers of tokens when a neighbour changes. Measured on toys: 2e-6 in float32, 0 in bfloat16; 1 if attention reaches across.
NOISE = 0.25


def unfit(model: nn.Module) -> str | None:
    """Why packed rows of `model` would be wrong, by its config and signature; `None` if nothing is wrong."""
    causal_lm = base_model(model)
    config = causal_lm.config
    if config.get_text_config() is not config:
        return "it has other parts than a text model, which count positions in their own way"
    if other := sorted(set(getattr(config, "layer_types", None) or ()) - set(ATTENTION_LAYERS)):
        return f"it has layers of type {', '.join(map(repr, other))}, which run on into the next sequence"
    if "position_ids" not in inspect.signature(causal_lm.base_model.forward).parameters:
        return "it takes no position_ids"
    if config._attn_implementation in ("eager", "flex_attention"):
        return f"its {config._attn_implementation} attention would compute the square of a row; take sdpa or a flash attention"
    adapter = getattr(model, "active_peft_config", None)
    if adapter is not None and adapter.is_prompt_learning:
        return "its adapter puts learned tokens before each row"
    return None


def crossing(model: nn.Module, score: Callable[[Tensor, int], Tensor], config: PretrainedConfig) -> str | None:
    """
    Describe the error if packing is wrong: a sequence's log-probs change with its neighbour, or when it is packed. Otherwise `None`.

    `score` returns, for ids `(B, L)`, the log-probs `(B, n)` of the last `n`, in one packed pass; evaluation mode, no gradients.
    """
    generator = torch.Generator().manual_seed(0)
    first, other, last = torch.randint(config.get_text_config().vocab_size, (3, 1, LENGTH), generator=generator)
    keep = LENGTH - 1
    with torch.no_grad(), ExitStack() as stack:
        stack.callback(model.train, model.training)
        model.eval()
        beside_first = score(torch.cat((first, last)), keep)[1]
        beside_other = score(torch.cat((other, last)), keep)[1]
        alone = score(last, keep)[0]
        continued = score(torch.cat((first, last), dim=1), keep)[0]  # its log-probs if it sees the first
    seen = (continued - alone).abs().mean() * NOISE
    change = (beside_first - beside_other).abs().mean()
    if change > (seen if num_experts(config) else 0):
        return f"a sequence's log-probs change by {change:.1e} with its neighbour"
    change = (beside_first - alone).abs().mean()
    if not change <= seen:
        return f"a sequence's log-probs change by {change:.1e} when it is packed"
    return None
