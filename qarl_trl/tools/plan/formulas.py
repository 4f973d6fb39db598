"""Bytes as functions of shapes, ranks, scheme and tokens, each compared with real tensors in tests/tools/plan.

`scheme` is a compressed-tensors `QuantizationScheme` with its format, `None` for high precision. A size is bytes per entry.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...quant.scheme import effective_group_size, has_global_scale, support_of


if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationScheme

# Logits exist as one tile: TRL's `kernels/chunked_logprob.py` multiplies this many tokens by this much of the vocabulary.
TILE = (4096, 32768)


# Weights ------------------------------------------------------------------------------------------------------------


def shard_entries(shape: Sequence[int], ranks: int) -> int:
    """Entries of a tensor on each of `ranks`: FSDP2 cuts dimension 0 and pads every part to the longest."""
    return math.ceil(shape[0] / ranks) * math.prod(shape[1:]) if shape else 1


def quantized_bytes(rows: int, columns: int, scheme: QuantizationScheme, pieces: int = 1) -> int:
    """Bytes of a low-bit weight `(rows, columns)` as a checkpoint stores it, in `pieces` layers of as many rows each."""
    weights, kind = scheme.weights, scheme.format
    if has_global_scale(scheme):
        return rows * columns // 2 + rows * columns // weights.group_size + 4 * pieces
    if weights.block_structure is not None:
        height, width = weights.block_structure
        scales = math.ceil(rows / height) * math.ceil(columns / width)
    else:
        scales = rows * (columns // (effective_group_size(scheme) or columns))
    if kind != "pack-quantized":
        return rows * columns + 2 * scales
    zero_points = 0 if weights.symmetric else 4 * math.ceil(rows / 8) * (scales // rows)
    return 4 * rows * math.ceil(columns * weights.num_bits / 32) + 2 * scales + zero_points + 16 * pieces


def optimizer_bytes(entries: int, size: int, tensors: int, optimizer: str) -> int:
    """State of `entries` in `tensors` parameters: of AdamW two moments and a float32 count of steps, of Muon a momentum."""
    return 2 * entries * size + 4 * tensors if optimizer == "adamw" else entries * size


# Activations, in bytes per token ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """
    A decoder layer of the Llama family (Qwen2, Qwen3, Qwen3-MoE, Mixtral, OLMoE).

    Attributes:
        hidden, heads, kv_heads, head_dim (`int`): Of the attention.
        inner (`int`): Width of the MLP, or of one expert.
        experts, top_k (`int`): 0 for a dense layer.
        query_norm (`bool`): Whether queries and keys are normed (Qwen3).
        attention, mlp (`QuantizationScheme`, *optional*): What their forward multiplies by.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    experts: int = 0
    top_k: int = 0
    query_norm: bool = False
    attention: QuantizationScheme | None = None
    mlp: QuantizationScheme | None = None


def input_saved(width: int, readers: int, scheme: QuantizationScheme | None, size: int, cast_to: int) -> float:
    """Saved for the backward of `readers` layers with one input of `width` entries of `size`, computing in `cast_to`."""
    if scheme is None:  # autocast casts for each reader anew
        return width * cast_to * (readers if size != cast_to else 1)
    kind = support_of(scheme).activations
    if kind == "none":  # the low-bit layers share the cast
        return width * cast_to
    quantized = 2 if kind == "int8_token_asymmetric" else 1
    return width * quantized + 4 * (width / 128 if kind == "fp8_group" else 1)


def norm_saved(width: int, size: int, rows: int = 1) -> int:
    """Of an RMSNorm over `rows` parts of `width` entries: its float32 input, the normed input, the inverse of its size."""
    return (4 + size) * width + 4 * rows


def layer_saved(layer: Layer, residual: int, compute: int) -> float:
    """Saved for the backward of a decoder layer without gradient checkpointing; entries of `residual` and `compute` bytes."""
    query, key = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    attention = norm_saved(layer.hidden, residual) + input_saved(layer.hidden, 3, layer.attention, residual, compute)
    if layer.query_norm:
        attention += norm_saved(query, compute, layer.heads) + norm_saved(key, compute, layer.kv_heads)
    # Queries, keys, values, output and the logarithm of the softmax's sums, then the output of all sequences as one.
    attention += (
        compute * (2 * query + 2 * key) + 4 * layer.heads + input_saved(query, 1, layer.attention, compute, compute)
    )
    mlp = _experts_saved if layer.experts else _mlp_saved
    return attention + norm_saved(layer.hidden, residual) + mlp(layer, residual, compute)


def _mlp_saved(layer: Layer, residual: int, compute: int) -> float:
    """Input, gate, its activation, up, and their product."""
    inputs = input_saved(layer.hidden, 2, layer.mlp, residual, compute)
    return inputs + 3 * compute * layer.inner + input_saved(layer.inner, 1, layer.mlp, compute, compute)


def _experts_saved(layer: Layer, residual: int, compute: int) -> float:
    """The router in float32, and of each choice: indices, input, gate and up, activation, product, output."""
    router = compute * layer.hidden + 4 * layer.experts + 8
    choice = input_saved(layer.hidden, 1, layer.mlp, compute, compute) + 3 * compute * layer.inner
    choice += input_saved(layer.inner, 1, layer.mlp, compute, compute) + compute * layer.hidden + 36
    return router + layer.top_k * choice


def head_saved(hidden: int, head_dim: int, residual: int) -> int:
    """Saved outside of the layers: the final norm and its output, rotary tables, labels and results of the fused head."""
    return norm_saved(hidden, residual) + residual * hidden + 2 * residual * head_dim + 26


def cache_bytes(layers: int, kv_heads: int, head_dim: int, ranks: int) -> int:
    """Keys and values of one token in the engine's bfloat16 cache, on one of `ranks` engine ranks."""
    return 2 * 2 * layers * max(1, kv_heads // ranks) * head_dim


def layer_work(layer: Layer, residual: int, compute: int) -> float:
    """Alive at once in the backward of a decoder layer: gradients within its MLP, and quantized values of its input as float32 numbers."""
    choices = layer.top_k or 1
    quantized = layer.mlp is not None and support_of(layer.mlp).activations != "none"
    inner = (3 * compute + 8 * quantized) * layer.inner + compute * layer.hidden * bool(layer.top_k)
    return (residual + compute) * layer.hidden + choices * inner
