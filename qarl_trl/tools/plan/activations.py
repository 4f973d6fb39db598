"""What a decoder layer of the Llama family saves for its backward, in bytes per token; compared with autograd's own in tests/tools/plan."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...quant.scheme import support_of


class Layer(NamedTuple):
    """Sizes of a decoder layer (Llama, Qwen2, Qwen3, Qwen3-MoE, Mixtral, OLMoE)."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int  # of the MLP, or of one expert
    experts: int = 0  # 0: a dense layer
    top_k: int = 1  # experts of a token
    query_norm: bool = False  # queries and keys are normed (Qwen3)
    attention: Any = None  # the `QuantizationScheme` that the forward multiplies by; `None`: high precision
    mlp: Any = None


def layer_saved(layer: Layer, residual: int, compute: int) -> float:
    """Saved by a layer without gradient checkpointing; an entry has `residual` bytes between layers, `compute` within."""
    hidden, query, key = layer.hidden, layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    saved = 2 * _norm_saved(hidden, residual) + _input_saved(hidden, 3, layer.attention, residual, compute)
    if layer.query_norm:
        saved += _norm_saved(query, compute, layer.heads) + _norm_saved(key, compute, layer.kv_heads)
    # Queries, keys, values, output and the logarithm of the softmax's sums, then the output of all sequences as one.
    saved += compute * (2 * query + 2 * key) + 4 * layer.heads
    saved += _input_saved(query, 1, layer.attention, compute, compute)
    # Gate, its activation, up, and their product.
    inner = 3 * compute * layer.inner + _input_saved(layer.inner, 1, layer.mlp, compute, compute)
    if not layer.experts:
        return saved + _input_saved(hidden, 2, layer.mlp, residual, compute) + inner
    # The router in float32; of each choice also indices, its input and its output.
    choice = _input_saved(hidden, 1, layer.mlp, compute, compute) + inner + compute * hidden + 36
    return saved + compute * hidden + 4 * layer.experts + 8 + layer.top_k * choice


def head_saved(layer: Layer, residual: int) -> int:
    """Saved outside of the layers: the final norm and its output, rotary tables, labels and results of the fused head."""
    return _norm_saved(layer.hidden, residual) + residual * (layer.hidden + 2 * layer.head_dim) + 26


def layer_work(layer: Layer, residual: int, compute: int) -> float:
    """Alive at once in a layer's backward: gradients within its MLP, and quantized values of its input as float32 numbers."""
    quantized = layer.mlp is not None and support_of(layer.mlp).activations != "none"
    inner = (3 * compute + 8 * quantized) * layer.inner + compute * layer.hidden * bool(layer.experts)
    return (residual + compute) * layer.hidden + layer.top_k * inner


def _input_saved(width: int, readers: int, scheme: Any, size: int, cast_to: int) -> float:
    """Saved by `readers` layers with one input of `width` entries of `size` bytes, computing in `cast_to`."""
    if scheme is None:  # autocast casts for each reader anew
        return width * cast_to * (readers if size != cast_to else 1)
    kind = support_of(scheme).activations
    if kind == "none":  # the low-bit layers share the cast
        return width * cast_to
    return width * (2 if kind == "int8_token_asymmetric" else 1) + 4 * (width / 128 if kind == "fp8_group" else 1)


def _norm_saved(width: int, size: int, rows: int = 1) -> int:
    """Of an RMSNorm over `rows` parts of `width` entries: its float32 input, the normed input, the inverse of its size."""
    return (4 + size) * width + 4 * rows
