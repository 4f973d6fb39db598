"""Norms, residual sums, rotary embedding and attention of the learner, rounded where the CPU engine rounds.

transformers rounds elsewhere, and quantized values of 8-bit activations amplify that layer by layer. With these operations and the
engine's GEMMs the log-probs of sampled tokens are a colocated CPU engine's bit for bit (paper Sec. 3.1). Gradients are
those of the unrounded operations, in float32.
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

from . import _vllm_cpu
from .cpu import choose_arithmetic


ATTENTION = "qarl_cpu_engine"
# Decoders of one form: norm, attention, sum, norm, MLP, sum. The tests run a model of each beside the engine.
MODEL_TYPES = ("llama", "qwen2", "qwen3")


def unsupported(config: PretrainedConfig) -> str | None:
    """Why a model of this `config` cannot run on the engine's operations; `None` when it can."""
    if config.model_type not in MODEL_TYPES:
        return f"model_type {config.model_type!r} is none of {', '.join(MODEL_TYPES)}"
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        return "it has sliding-window attention"
    if config.attention_dropout:
        return f"attention_dropout is {config.attention_dropout}"
    return None


def use_engine_ops(model: nn.Module) -> None:
    """Let `model`, also inside a `PeftModel`, compute as the CPU engine does, in bfloat16 or under autocast; `ValueError` where it cannot."""
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
    # Cosine and sine in the values of the engine's bfloat16 table, the rotation itself in float32.
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
    """`x` in float32 with the values of bfloat16; the gradient passes unrounded."""
    return _Rounded.apply(x.float())


class EngineRMSNorm(nn.Module):
    """An RMS norm whose input may be an unrounded float32 sum; rounds what it has normalized, and the product."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (rounded(x) * rounded(self.weight)).to(torch.bfloat16)


class EngineDecoderLayer(nn.Module):
    """
    A pre-norm decoder layer whose norms see the sum of residual and branch before it is rounded, as vLLM's fused norm does.

    The next residual is the rounded sum. Layers hand the unrounded one on, since the next norm wants it.
    """

    def forward(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        residual = rounded(hidden_states)
        x, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = residual + x.float()
        residual = rounded(hidden_states)
        return residual + self.mlp(self.post_attention_layernorm(hidden_states)).float()


class _EngineAttention(torch.autograd.Function):
    """
    Causal attention within each sequence, `(tokens, heads, head_dim)` bfloat16: one sequence of `lengths` after the other.

    Forward by the engine's kernel on queries and keys rounded as its rotary kernel rounds; backward in float32.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float) -> Tensor:
        to_bfloat16 = _vllm_cpu.rounding()
        ctx.dtypes, ctx.lengths, ctx.scale = (query.dtype, key.dtype, value.dtype), lengths, scale
        query, key, value = to_bfloat16(query), to_bfloat16(key), value.to(torch.bfloat16)
        ctx.save_for_backward(query, key, value)
        return _vllm_cpu.attention(query, key, value, lengths, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad(), torch.autocast(grad.device.type, enabled=False):
            inputs = [t.float().requires_grad_() for t in ctx.saved_tensors]
            # With a batch of one: on three dimensions torch takes a kernel that keeps the square of a sequence.
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
    transformers' signature of an attention implementation: `(batch, tokens, heads, head_dim)` and no weights; zero where padded.

    Of `(batch, heads, tokens, head_dim)`, key and value with fewer heads. Either `mask` `(batch, tokens)`, 0 for padding, or
    `sequence_lengths` within each row, which are then all that it holds.
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
    """`stock` with the forward of `form`: one class for all layers, of the same name, since FSDP looks layers up by both."""
    return type(stock.__name__, (form, stock), {"__module__": stock.__module__})


def _count_positions_without_padding(
    decoder: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The engine's first token has position 0, a left-padded one here the width of the padding."""
    mask, kwargs, positions = kwargs.get("attention_mask"), dict(kwargs), kwargs.get("position_ids")
    if mask is None and positions is not None and "sequence_lengths" not in kwargs and (positions.diff() != 1).any():
        raise RuntimeError(
            "A row holds several sequences, but the attention did not get sequence_lengths: it would reach across them."
        )
    if isinstance(mask, Tensor) and mask.dim() == 2 and positions is None:
        kwargs["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
    return args, kwargs
