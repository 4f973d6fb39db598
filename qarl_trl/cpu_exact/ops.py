"""Norms, residual sums, rotary embedding and attention for the learner, rounded where the CPU engine rounds.

transformers rounds at other places, and 8-bit activations amplify the difference layer by layer. With these operations
and the engine's GEMMs the log-probs of sampled tokens equal those of a colocated CPU engine bit for bit (paper Sec.
3.1). Gradients are those of the unrounded operations, in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import flash_attention_mask

from ..quant.kv_cache import register_with_cache, round_to_cache
from ..quant.rest import leave_with_rest, rounded
from . import kernels
from .arithmetic import choose_arithmetic


# The name of `engine_attention` among transformers' attention implementations.
ATTENTION = "qarl_cpu_engine"
# Decoder layers of one form: norm, attention, sum, norm, MLP, sum. Tests compare a model of each type with the engine.
MODEL_TYPES = ("llama", "qwen2", "qwen3")


# A model on the engine's operations ----------------------------------------------------------------------------------


def unsupported(config: PretrainedConfig) -> str | None:
    """
    Why a model cannot run on the engine's operations.

    Args:
        config: The config of its decoder.

    Returns:
        The reason, a part of a sentence; `None` if it can.
    """
    if config.model_type not in MODEL_TYPES:
        return f"model_type {config.model_type!r} is none of {', '.join(MODEL_TYPES)}"

    layer_types = getattr(config, "layer_types", None) or ()
    if any(layer_type != "full_attention" for layer_type in layer_types):
        return "it has sliding-window attention"

    if config.attention_dropout:
        return f"attention_dropout is {config.attention_dropout}"
    return None


def use_engine_ops(model: nn.Module) -> None:
    """
    Make a model compute as the CPU engine. Names, parameters and the saved config stay; a second call changes nothing.

    Args:
        model: A transformers model in bfloat16 or under autocast, also inside a `PeftModel`.

    Raises:
        ValueError: if it cannot.
    """
    if has_engine_ops(model):
        return
    choose_arithmetic()
    decoder = _supported_decoder(model)

    decoder.qarl_attention_before = decoder.config._attn_implementation
    decoder.set_attn_implementation(ATTENTION)
    decoder.register_forward_pre_hook(_count_positions_without_padding, with_kwargs=True)
    # Cosine and sine have the values of the engine's bfloat16 table; the rotation runs in float32.
    decoder.rotary_emb.register_forward_hook(_round_tables)
    decoder.embed_tokens.register_forward_hook(_round_output)

    # Modules keep their parameters and names, and get another forward.
    for module in decoder.modules():
        is_rms_norm = hasattr(module, "variance_epsilon")
        if is_rms_norm:
            module.__class__ = _form_of(module.__class__, EngineRMSNorm)
    for layer in decoder.layers:
        layer.__class__ = _form_of(layer.__class__, EngineDecoderLayer)


def leave_engine_ops(model: nn.Module) -> None:
    """
    Undo `use_engine_ops`, which an earlier trainer may have called on the model.

    Args:
        model: Any module. One without these operations is left alone.
    """
    for module in model.modules():
        if isinstance(module, EngineRMSNorm | EngineDecoderLayer):
            _, stock = type(module).__bases__
            module.__class__ = stock

        # By their functions, because a copied model has copies of the hooks.
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            ours = [number for number, hook in hooks.items() if hook in _HOOKS]
            for number in ours:
                del hooks[number]
                module._forward_pre_hooks_with_kwargs.pop(number, None)

        before = module.__dict__.pop("qarl_attention_before", None)
        if before is not None:
            decoder: Any = module
            decoder.set_attn_implementation(before)


def has_engine_ops(model: nn.Module) -> bool:
    """Whether `use_engine_ops` was called on `model`."""
    return any(isinstance(module, EngineDecoderLayer) for module in model.modules())


def _supported_decoder(model: nn.Module) -> Any:
    """The decoder in `model`; `ValueError` if there is none, or if it cannot run on the engine's operations."""
    decoder = None
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and hasattr(module, "layers"):
            decoder = module
            break

    reason = "it has no decoder layers" if decoder is None else unsupported(decoder.config)
    if reason is not None:
        name = type(decoder or model).__name__
        raise ValueError(f"The CPU engine's operations cannot run a {name}: {reason}. Use learner_ops='stock'.")
    return decoder


@cache
def _form_of(stock: type[nn.Module], form: type[nn.Module]) -> type[nn.Module]:
    """`stock` with the forward of `form`."""
    # One class with the same name for all layers, because FSDP finds layers by both.
    return type(stock.__name__, (form, stock), {"__module__": stock.__module__})


def _count_positions_without_padding(
    decoder: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give the first real token position 0, as in the engine; without this padding on the left would shift it."""
    kwargs = dict(kwargs)
    mask = kwargs.get("attention_mask")
    positions = kwargs.get("position_ids")

    # Positions that begin again are those of several sequences in a row.
    if mask is None and positions is not None and "sequence_lengths" not in kwargs and (positions.diff() != 1).any():
        raise RuntimeError("The attention got no sequence_lengths: it would reach across the sequences of a row.")

    # A mask of four dimensions says nothing of padding.
    if isinstance(mask, Tensor) and mask.dim() == 2 and positions is None:
        kwargs["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
    return args, kwargs


def _round_tables(rotary: nn.Module, args: tuple[Any, ...], tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Round the cosine and sine of a rotary embedding."""
    return tuple(rounded(table) for table in tables)


def _round_output(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """Round the output of a module."""
    return rounded(output)


_HOOKS = (_count_positions_without_padding, _round_tables, _round_output)


# Norms and sums ------------------------------------------------------------------------------------------------------


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
        branch, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = residual + branch.float()

        residual = rounded(hidden_states)
        branch = self.mlp(self.post_attention_layernorm(hidden_states))
        return residual + branch.float()


# Attention -----------------------------------------------------------------------------------------------------------


def engine_attention(
    module: nn.Module | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    sequence_lengths: tuple[int, ...] | None = None,
    cache_dtype: str | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """
    Causal attention by the engine's kernel, behind transformers' attention interface.

    Give either `mask` or `sequence_lengths`; without both each row is one sequence.

    Args:
        module: The attention layer, unused.
        query: `(B, heads, T, head_dim)`.
        key: `(B, kv_heads, T, head_dim)`.
        value: As `key`.
        mask: `(B, T)`, 0 for padding.
        scaling: Factor of the scores.
        sequence_lengths: Number of tokens of each sequence in a row without padding, the same for all rows.
        cache_dtype: The engine's FP8 cache; `None`: its cache is in bfloat16.
        kwargs: Whatever else transformers passes, unused.

    Returns:
        Bfloat16 `(B, T, heads, head_dim)`, zero at padding, and no attention weights.

    Raises:
        RuntimeError: with keys of earlier tokens, from a cache.
    """
    batch, heads, tokens, head_dim = query.shape
    if tokens != key.shape[2]:
        raise RuntimeError("A model on the CPU engine's operations has no cache. Generate with use_cache=False.")

    real = torch.ones(batch, tokens, dtype=torch.bool) if mask is None else mask.bool()
    if sequence_lengths is None:
        lengths = [length for length in real.sum(-1).tolist() if length > 0]
    else:
        lengths = [*sequence_lengths] * batch

    # The kernel knows no padding: the real tokens of all rows, `(tokens, heads, head_dim)`, one sequence after the
    # other.
    real_query, real_key, real_value = (states.transpose(1, 2)[real] for states in (query, key, value))
    output = query.new_zeros(batch, tokens, heads, head_dim, dtype=torch.bfloat16)
    output[real] = _EngineAttention.apply(real_query, real_key, real_value, lengths, scaling, cache_dtype)
    return output, None


class _EngineAttention(torch.autograd.Function):
    """
    Causal attention within each sequence, `(tokens, heads, head_dim)`; sequences of `lengths` follow each other.

    The forward rounds queries and keys as the engine's rotary kernel does, keys and values as its cache does, and
    calls the engine's kernel; the backward is float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: list[int],
        scale: float,
        cache_dtype: str | None,
    ) -> Tensor:
        ctx.dtypes = (query.dtype, key.dtype, value.dtype)
        ctx.lengths = lengths
        ctx.scale = scale

        to_bfloat16 = kernels.rounding()
        query = to_bfloat16(query)
        key = to_bfloat16(key)
        value = value.to(torch.bfloat16)
        if cache_dtype is not None:
            key = round_to_cache(key, cache_dtype)
            value = round_to_cache(value, cache_dtype)
        # The gradient is that of exact attention at these rounded inputs.
        ctx.save_for_backward(query, key, value)
        return kernels.attention(query, key, value, lengths, scale, cache_dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # A backward runs without gradients, and autocast would make the products bfloat16.
        with torch.enable_grad(), torch.autocast(grad.device.type, enabled=False):
            query, key, value = (tensor.float().requires_grad_() for tensor in ctx.saved_tensors)
            output = _exact_attention(query, key, value, ctx.lengths, ctx.scale)
            grads = torch.autograd.grad(output, (query, key, value), grad.float())

        cast = [input_grad.to(dtype) for input_grad, dtype in zip(grads, ctx.dtypes, strict=True)]
        return *cast, None, None, None


def _exact_attention(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float) -> Tensor:
    """The attention of `_EngineAttention` by torch, in float32."""
    # With a batch of one: for three dimensions torch uses a kernel with quadratic memory.
    by_sequence = []
    for states in (query, key, value):
        by_sequence.append(states.transpose(0, 1)[None].split(lengths, dim=2))

    outputs = []
    for sequence_query, sequence_key, sequence_value in zip(*by_sequence, strict=True):
        output = F.scaled_dot_product_attention(
            sequence_query, sequence_key, sequence_value, is_causal=True, scale=scale, enable_gqa=True
        )
        outputs.append(output)
    return torch.cat(outputs, dim=2)[0].transpose(0, 1)


AttentionInterface.register(ATTENTION, engine_attention)
AttentionMaskInterface.register(ATTENTION, flash_attention_mask)  # the padding mask itself, or None
register_with_cache(ATTENTION, engine_attention, flash_attention_mask)
leave_with_rest(leave_engine_ops)
