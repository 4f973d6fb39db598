"""Attention within each sequence of a packed row, by transformers' own sdpa."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..quant.names import base_model


ATTENTION = "qarl_packed_sdpa"


class LostSequences(RuntimeError):
    """A model's layers did not pass on `sequence_lengths` to their attention."""


def use_packed_attention(model: nn.Module) -> None:
    """Make a `model` with transformers' sdpa attend within each sequence of a packed row; with a mask it is stock sdpa."""
    causal_lm = base_model(model)
    if causal_lm.config._attn_implementation == "sdpa":
        causal_lm.set_attn_implementation(ATTENTION)


def sequence_arguments(model: nn.Module, lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    """Keyword arguments of the forward that give the attention of `model` the lengths of the sequences in a packed row."""
    if "flash" not in (base_model(model).config._attn_implementation or ""):
        return {"sequence_lengths": tuple(lengths)}  # numbers: every layer would have to read back a tensor
    starts = torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)
    longest = max(lengths)
    return {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest, "max_length_k": longest}


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    sequence_lengths: tuple[int, ...] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Stock sdpa on `(batch, heads, tokens, head_dim)`; with `sequence_lengths` on each sequence separately."""
    mask = None if attention_mask is None or attention_mask.numel() == 0 else attention_mask
    if sequence_lengths is None:
        if mask is not attention_mask:
            raise LostSequences("The attention got no sequence_lengths: it would reach across the sequences of a row.")
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    # `split` instead of slices: the backward of each slice would make a gradient of the whole row, S sequences times T tokens.
    parts = zip(*(t.split(sequence_lengths, dim=2) for t in (query, key, value)), strict=True)
    outputs, start = [], 0
    for (q, k, v), length in zip(parts, sequence_lengths, strict=True):
        here = slice(start, start + length)
        own_mask = None if mask is None else mask[:, :, here, here]
        outputs.append(sdpa_attention_forward(module, q, k, v, own_mask, **kwargs)[0])
        start += length
    return torch.cat(outputs, dim=1), None


def _mask(batch_size: int, q_length: int, kv_length: int, **kwargs: Any) -> Tensor | None:
    """
    Stock sdpa's mask, but for a packed row an empty one, which means "causal within each sequence" and needs no quadratic memory.

    When positions restart, transformers asks for a mask that it cannot leave out, although there is no padding. A sliding
    window sets `local_size`, a model's own mask `use_vmap`.
    """
    kept = kwargs.get("attention_mask") is None and not kwargs.get("allow_is_causal_skip", True)
    if kept and q_length == kv_length > 1 and kwargs.get("local_size") is None and not kwargs.get("use_vmap"):
        return torch.empty(batch_size, 1, 0, 0, dtype=torch.bool, device=kwargs.get("device"))
    return sdpa_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length, **kwargs)


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _mask)
