"""Attention within each sequence of a packed row, by transformers' own sdpa."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..quant.kv_cache import from_cache, register_with_cache, with_cache, without_cache
from ..quant.names import base_model


# transformers knows the attention and its mask by this name.
ATTENTION = "qarl_packed_sdpa"


class LostSequences(RuntimeError):
    """A model's layers did not pass on `sequence_lengths` to their attention."""


def use_packed_attention(model: nn.Module) -> None:
    """
    Make a model with transformers' sdpa attend within each sequence of a packed row.

    Padded rows and generation stay stock sdpa, bit for bit. A model with another attention is left alone.

    Args:
        model: A causal language model, also inside of a `PeftModel`.
    """
    causal_lm = base_model(model)
    if causal_lm.config._attn_implementation == "sdpa":
        causal_lm.set_attn_implementation(ATTENTION)


def attend_from_cache(model: nn.Module, cache_dtype: str) -> None:
    """
    Make all layers attend to keys and values as the engine's FP8 cache holds them, in packed and in padded rows.

    Args:
        model: A causal language model with transformers' sdpa or the CPU engine's attention, also inside of a
            `PeftModel`.
        cache_dtype: One of `FORMATS` of `quant/kv_cache.py`.

    Raises:
        ValueError: if it has another attention.
    """
    causal_lm = base_model(model)
    stock = without_cache(causal_lm.config._attn_implementation)
    name = with_cache(stock, cache_dtype)
    if name not in ALL_ATTENTION_FUNCTIONS:
        raise ValueError(
            f"kv_cache_dtype={cache_dtype!r} needs attn_implementation: sdpa, where the learner rounds keys and "
            f"values, got {stock!r}. Set it, or quantize_learner_kv: false."
        )
    causal_lm.set_attn_implementation(name)


@contextmanager
def attending_from_cache(model: nn.Module, cache_dtype: str | None) -> Iterator[None]:
    """
    [`attend_from_cache`] in the block, and then the attention of before.

    Args:
        model: As for [`attend_from_cache`].
        cache_dtype: As for [`attend_from_cache`]; `None` changes nothing.
    """
    if cache_dtype is None:
        yield
        return

    causal_lm = base_model(model)
    stock = causal_lm.config._attn_implementation
    attend_from_cache(model, cache_dtype)
    try:
        yield
    finally:
        causal_lm.set_attn_implementation(stock)


def sequence_arguments(model: nn.Module, lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    """
    Keyword arguments of a model's forward that tell its attention where the sequences of a packed row start.

    Args:
        model: A causal language model after [`use_packed_attention`].
        lengths: Number of tokens of each sequence.
        device: Where flash attention reads the starts.
    """
    implementation = base_model(model).config._attn_implementation or ""
    if "flash" not in implementation:
        # Numbers, not a tensor: every layer would have to read it back from the device.
        return {"sequence_lengths": tuple(lengths)}

    starts = torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)
    longest = max(lengths)
    return {
        "cu_seq_lens_q": starts,
        "cu_seq_lens_k": starts,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    sequence_lengths: tuple[int, ...] | None = None,
    cache_dtype: str | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """
    Stock sdpa, or with `sequence_lengths` stock sdpa on each sequence of a packed row by itself.

    Args:
        module: The attention layer.
        query: `(batch, heads, tokens, head_dim)`.
        key: `(batch, key heads, tokens, head_dim)`.
        value: `(batch, key heads, tokens, head_dim)`.
        attention_mask: `(batch, 1, tokens, tokens)`, without elements from [`packed_mask`], or `None`.
        sequence_lengths: Number of tokens of each sequence of a packed row.
        cache_dtype: The engine's FP8 cache, by which keys and values are rounded first; `None` leaves them.
        kwargs: Further arguments of stock sdpa.

    Returns:
        `(batch, tokens, heads, head_dim)`, and no attention weights.

    Raises:
        LostSequences: if the mask is one for packed rows and there are no lengths.
    """
    # Before the rows are split: also in its prefill the engine reads keys and values from its cache.
    if cache_dtype is not None:
        key = from_cache(key, cache_dtype)
        value = from_cache(value, cache_dtype)

    # Stock sdpa cannot apply a mask without elements. `None` means causal to it.
    is_packed_mask = attention_mask is not None and attention_mask.numel() == 0
    mask = None if is_packed_mask else attention_mask

    if sequence_lengths is not None:
        return _attend_within_each(module, query, key, value, mask, sequence_lengths, **kwargs), None

    if is_packed_mask:
        raise LostSequences("The attention got no sequence_lengths: it would reach across the sequences of a row.")
    return sdpa_attention_forward(module, query, key, value, mask, **kwargs)


def _attend_within_each(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    sequence_lengths: tuple[int, ...],
    **kwargs: Any,
) -> Tensor:
    """Stock sdpa on each sequence, by the kernel of a training pass; the outputs one after the other."""
    # One level of recursion: with gradients on, the call below takes the other path.
    if not torch.is_grad_enabled():
        query, key, value = (_as_in_training(tensor) for tensor in (query, key, value))
        with torch.enable_grad():
            output = _attend_within_each(module, query, key, value, attention_mask, sequence_lengths, **kwargs)
        return output.detach()

    # `split` instead of slices: the backward of each slice would make a gradient of the whole row, S sequences times
    # T tokens.
    queries = query.split(sequence_lengths, dim=2)
    keys = key.split(sequence_lengths, dim=2)
    values = value.split(sequence_lengths, dim=2)

    outputs = []
    start = 0
    for index, length in enumerate(sequence_lengths):
        tokens = slice(start, start + length)
        mask = None if attention_mask is None else attention_mask[:, :, tokens, tokens]
        output, _ = sdpa_attention_forward(module, queries[index], keys[index], values[index], mask, **kwargs)
        outputs.append(output)
        start += length

    return torch.cat(outputs, dim=1)


def _as_in_training(tensor: Tensor) -> Tensor:
    """
    The same numbers, needing a gradient.

    `old` is scored without gradients, and its kernels must round as those of the loss do. torch asks whether a
    gradient is needed when it chooses a backend of sdpa (flash attention takes heads above 192 on some GPUs only
    without one), and cuDNN and the memory-efficient backend run another kernel when they also return the sums that a
    backward needs.
    """
    return tensor.detach().requires_grad_()


def packed_mask(batch_size: int, q_length: int, kv_length: int, **kwargs: Any) -> Tensor | None:
    """
    Stock sdpa's mask, but for a packed row one without elements.

    [`packed_attention`] reads a mask without elements as "causal within each sequence".

    Args:
        batch_size: Number of rows.
        q_length: Number of queries in a row.
        kv_length: Number of keys in a row.
        kwargs: Further arguments of transformers' `sdpa_mask`.

    Returns:
        Bool `(batch, 1, queries, keys)`, `(batch, 1, 0, 0)` for a packed row, or `None` for plain causal rows.
    """
    if not _is_packed(q_length, kv_length, kwargs):
        return sdpa_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length, **kwargs)

    # A mask of the row would take memory that is quadratic in its tokens.
    return torch.empty(batch_size, 1, 0, 0, dtype=torch.bool, device=kwargs.get("device"))


def _is_packed(q_length: int, kv_length: int, mask_arguments: dict[str, Any]) -> bool:
    """Whether transformers asks for the mask of a packed row that needs nothing but causality within each sequence."""
    # When positions restart, transformers asks for a mask that it cannot leave out, although there is no padding.
    no_padding = mask_arguments.get("attention_mask") is None
    positions_restart = no_padding and not mask_arguments.get("allow_is_causal_skip", True)

    # A step of generation has one query.
    whole_rows = q_length == kv_length > 1

    # A sliding window sets `local_size`, a model's own mask `use_vmap`: those need their elements.
    plainly_causal = mask_arguments.get("local_size") is None and not mask_arguments.get("use_vmap")
    return positions_restart and whole_rows and plainly_causal


AttentionInterface.register(ATTENTION, packed_attention)
AttentionMaskInterface.register(ATTENTION, packed_mask)
register_with_cache(ATTENTION, packed_attention, packed_mask)
# Under this name transformers' own sdpa would not round.
register_with_cache("sdpa", packed_attention, packed_mask)
