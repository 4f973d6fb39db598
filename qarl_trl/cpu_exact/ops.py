"""Norms, residual sums, rotary embedding and attention for the learner, rounded where the CPU engine rounds.

transformers rounds at other places, and 8-bit activations amplify the difference layer by layer. With these operations and the
engine's GEMMs the log-probs of sampled tokens equal those of a colocated CPU engine bit for bit (paper Sec. 3.1). Gradients
are those of the unrounded operations, in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import flash_attention_mask

from . import kernels
from .arithmetic import choose_arithmetic


ATTENTION = "qarl_cpu_engine"
# Decoder layers of one form: norm, attention, sum, norm, MLP, sum. Tests compare a model of each type with the engine.
MODEL_TYPES = ("llama", "qwen2", "qwen3")


def unsupported(config: PretrainedConfig) -> str | None:
    """Why a model with this `config` cannot run on the engine's operations; `None` if it can."""
    if config.model_type not in MODEL_TYPES:
        return f"model_type {config.model_type!r} is none of {', '.join(MODEL_TYPES)}"
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        return "it has sliding-window attention"
    if config.attention_dropout:
        return f"attention_dropout is {config.attention_dropout}"
    return None


def use_engine_ops(model: nn.Module) -> None:
    """Make `model` (also inside a `PeftModel`) compute as the CPU engine, in bfloat16 or under autocast; `ValueError` if it cannot."""
    if has_engine_ops(model):
        return
    choose_arithmetic()
    decoders = (m for m in model.modules() if isinstance(m, PreTrainedModel) and hasattr(m, "layers"))
    decoder: Any = next(decoders, None)
    reason = "it has no decoder layers" if decoder is None else unsupported(decoder.config)
    if reason is not None:
        name = type(decoder or model).__name__
        raise ValueError(f"The CPU engine's operations cannot run a {name}: {reason}. Use learner_ops='stock'.")
    decoder.set_attn_implementation(ATTENTION)
    decoder.register_forward_pre_hook(_count_positions_without_padding, with_kwargs=True)
    # Cosine and sine have the values of the engine's bfloat16 table; the rotation runs in float32.
    decoder.rotary_emb.register_forward_hook(lambda *call: tuple(rounded(table) for table in call[-1]))
    decoder.embed_tokens.register_forward_hook(lambda *call: rounded(call[-1]))
    for module in decoder.modules():
        if hasattr(module, "variance_epsilon"):
            module.__class__ = _form_of(module.__class__, EngineRMSNorm)
    for layer in decoder.layers:
        layer.__class__ = _form_of(layer.__class__, EngineDecoderLayer)


def has_engine_ops(model: nn.Module) -> bool:
    """Whether `use_engine_ops` was called on `model`."""
    return any(isinstance(module, EngineDecoderLayer) for module in model.modules())


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def rounded(x: Tensor) -> Tensor:
    """Round `x` to bfloat16 values, kept in float32; the gradient passes unrounded."""
    return _Rounded.apply(x.float())


class EngineRMSNorm(nn.Module):
    """An RMS norm whose input may be an unrounded float32 sum; rounds the normalized values and the product."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (rounded(x) * rounded(self.weight)).to(torch.bfloat16)


class EngineDecoderLayer(nn.Module):
    """
    A pre-norm decoder layer whose norms get the unrounded sum of residual and branch, as vLLM's fused norm does.

    The next residual is the rounded sum. The layer returns the unrounded one, because the next norm needs it.
    """

    def forward(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        residual = rounded(hidden_states)
        x, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = residual + x.float()
        residual = rounded(hidden_states)
        return residual + self.mlp(self.post_attention_layernorm(hidden_states)).float()


class _EngineAttention(torch.autograd.Function):
    """
    Causal attention within each sequence, `(tokens, heads, head_dim)` bfloat16; sequences of `lengths` follow each other.

    The forward rounds queries and keys as the engine's rotary kernel does and calls the engine's kernel; the backward is float32.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float) -> Tensor:
        to_bfloat16 = kernels.rounding()
        ctx.dtypes, ctx.lengths, ctx.scale = (query.dtype, key.dtype, value.dtype), lengths, scale
        query, key, value = to_bfloat16(query), to_bfloat16(key), value.to(torch.bfloat16)
        ctx.save_for_backward(query, key, value)
        return kernels.attention(query, key, value, lengths, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad(), torch.autocast(grad.device.type, enabled=False):
            inputs = [t.float().requires_grad_() for t in ctx.saved_tensors]
            # With a batch of one: for three dimensions torch uses a kernel with quadratic memory.
            sequences = zip(*(t.transpose(0, 1)[None].split(ctx.lengths, dim=2) for t in inputs), strict=True)
            exact = partial(F.scaled_dot_product_attention, is_causal=True, scale=ctx.scale, enable_gqa=True)
            outputs = [exact(*sequence) for sequence in sequences]
            grads = torch.autograd.grad(torch.cat(outputs, dim=2)[0].transpose(0, 1), inputs, grad.float())
        return *(g.to(dtype) for g, dtype in zip(grads, ctx.dtypes, strict=True)), None, None


def engine_attention(
    module: nn.Module | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    sequence_lengths: tuple[int, ...] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """
    transformers' attention interface; returns `(batch, tokens, heads, head_dim)`, zero at padding, and no weights.

    Inputs are `(batch, heads, tokens, head_dim)`; key and value may have fewer heads. Give either `mask` `(batch, tokens)`, 0 for
    padding, or the `sequence_lengths` of each row without padding.
    """
    batch, heads, tokens, head_dim = query.shape
    if tokens != key.shape[2]:
        raise RuntimeError("A model on the CPU engine's operations has no cache. Generate with use_cache=False.")
    real = torch.ones(batch, tokens, dtype=torch.bool) if mask is None else mask.bool()
    lengths = [n for n in real.sum(-1).tolist() if n] if sequence_lengths is None else [*sequence_lengths] * batch
    y = query.new_zeros(batch, tokens, heads, head_dim, dtype=torch.bfloat16)
    y[real] = _EngineAttention.apply(*(t.transpose(1, 2)[real] for t in (query, key, value)), lengths, scaling)
    return y, None


AttentionInterface.register(ATTENTION, engine_attention)
AttentionMaskInterface.register(ATTENTION, flash_attention_mask)  # the padding mask itself, or None


@cache
def _form_of(stock: type[nn.Module], form: type[nn.Module]) -> type[nn.Module]:
    """`stock` with the forward of `form`: one class with the same name for all layers, because FSDP finds layers by both."""
    return type(stock.__name__, (form, stock), {"__module__": stock.__module__})


def _count_positions_without_padding(
    decoder: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give the first real token position 0, as in the engine; without this padding on the left would shift it."""
    mask, kwargs, positions = kwargs.get("attention_mask"), dict(kwargs), kwargs.get("position_ids")
    if mask is None and positions is not None and "sequence_lengths" not in kwargs and (positions.diff() != 1).any():
        raise RuntimeError("The attention got no sequence_lengths: it would reach across the sequences of a row.")
    if isinstance(mask, Tensor) and mask.dim() == 2 and positions is None:
        kwargs["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
    return args, kwargs
