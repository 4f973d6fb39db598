"""Names to compressed-tensors' `QuantizationScheme`s, by the one table of what the learner can run."""

from __future__ import annotations

import torch
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
    QuantizationStrategy,
    preset_name_to_scheme,
)

from .table import ALIASES, GROUPS, SUPPORTED, SchemeSupport


# The dtype every weight is cast to before it is quantized, on every path (docs/numerics.md).
MASTER_CAST_DTYPE = torch.bfloat16
# Routers decide which expert sees a token: a flipped decision costs more than the few bytes saved.
DEFAULT_IGNORE = ("lm_head", r"re:.*mlp\.gate$", r"re:.*\.router$", r"re:.*shared_expert_gate$")


def is_off(scheme: str | QuantizationScheme | None) -> bool:
    """Whether `scheme` asks for no quantization at all: `None`, `"none"` or an empty string."""
    return scheme is None or (isinstance(scheme, str) and scheme.strip().lower() in ("none", ""))


def resolve_scheme(scheme: str | QuantizationScheme, group_size: int | None = None) -> QuantizationScheme:
    """
    A new `QuantizationScheme` with its `format` set, from a preset's name in any case or a scheme of compressed-tensors.

    `group_size` weights along the input dimension share one scale; `-1` is one per output channel, `None` the preset's own
    (128 for W4A16). `ValueError` for what the learner cannot run, and for a group size that the scheme does not take.
    """
    if isinstance(scheme, str):
        name = scheme.strip().upper()
        name = ALIASES.get(name, name)
        if name not in SUPPORTED:
            raise ValueError(
                f"quant_scheme={scheme!r} is not a scheme qarl_trl can train with. Use one of {sorted(SUPPORTED)}, or 'none'."
            )
        resolved = preset_name_to_scheme(name, targets=["Linear"])
    else:
        resolved = scheme.model_copy(deep=True)
    if group_size is not None:
        row = support_of(resolved)
        if group_size not in row.group_sizes:
            choice = f"choose one of {row.group_sizes} (-1: per channel)" if row.group_sizes else "leave it unset"
            raise ValueError(f"quant_group_size={group_size} does not fit the scheme {row.name}: {choice}.")
        resolved.weights.strategy, resolved.weights.group_size = _strategy_of(group_size)
    resolved.format = CompressionFormat(support_of(resolved).format)
    return resolved


def support_of(scheme: QuantizationScheme) -> SchemeSupport:
    """The row of `SUPPORTED` that `scheme` is an instance of; `ValueError` when no row fits."""
    weights, activations = scheme.weights, scheme.input_activations
    if scheme.output_activations is None and weights is not None and _is_round_to_nearest(weights):
        for row in SUPPORTED.values():
            if _fits(weights, activations, row):
                return row
    raise ValueError(
        f"The quantization scheme weights={weights}, input_activations={activations}, "
        f"output_activations={scheme.output_activations} has no learner forward. Choose one of {[*SUPPORTED]}, "
        "rounded to nearest between minimum and maximum (no other observer, actorder or scale_dtype)."
    )


def effective_group_size(scheme: QuantizationScheme) -> int | None:
    """Weights per scale along the input dimension, or `None` for one scale per output channel."""
    grouped = (QuantizationStrategy.GROUP, QuantizationStrategy.TENSOR_GROUP)
    return scheme.weights.group_size if scheme.weights.strategy in grouped else None


def has_global_scale(scheme: QuantizationScheme) -> bool:
    """Whether a float32 scale of the whole weight stands above the scales of its groups (NVFP4)."""
    return scheme.weights.strategy == QuantizationStrategy.TENSOR_GROUP


def check_divisible(name: str, in_features: int, scheme: QuantizationScheme, out_features: int | None = None) -> None:
    """Refuse a layer whose size the scheme's groups or blocks do not divide."""
    if scheme.weights.block_structure is not None:
        height, width = scheme.weights.block_structure
        # Blocks padded at the edge are stored alike, but engines that merge layers (q, k, v) cannot load them.
        if in_features % width or (out_features is not None and out_features % height):
            raise ValueError(
                f"Layer {name!r} has out_features={out_features} and in_features={in_features}, which blocks of "
                f"{height} x {width} do not divide. Add it to `quant_ignore`, or choose a scheme without blocks, such "
                "as FP8_DYNAMIC."
            )
    group_size = effective_group_size(scheme)
    if group_size is not None and in_features % group_size:
        fitting = [g for g in GROUPS if g > 0 and in_features % g == 0]
        raise ValueError(
            f"Layer {name!r} has in_features={in_features}, which group_size={group_size} does not divide. Add it to "
            f"`quant_ignore`, or choose a `quant_group_size` that divides it: {fitting or 'none of the group sizes'}, "
            "or -1 for one scale per channel."
        )


def _is_round_to_nearest(weights: QuantizationArgs) -> bool:
    """Whether `quantize_weight` does exactly what these arguments ask for."""
    scale_dtype = torch.float8_e4m3fn if weights.strategy == QuantizationStrategy.TENSOR_GROUP else None
    return (
        not weights.dynamic
        and weights.actorder is None
        and weights.scale_dtype == scale_dtype
        and (weights.observer is None or weights.observer.endswith("minmax"))
    )


def _fits(weights: QuantizationArgs, activations: QuantizationArgs | None, row: SchemeSupport) -> bool:
    """Whether the arguments are those of the row's preset, but for the choice of groups."""
    preset = preset_name_to_scheme(row.name, targets=["Linear"])
    own = preset.weights
    if quantized_key(activations) != quantized_key(preset.input_activations):
        return False
    groups = (weights.strategy, weights.group_size)
    if row.group_sizes and groups in {_strategy_of(size) for size in row.group_sizes}:
        weights = weights.model_copy(update={"strategy": own.strategy, "group_size": own.group_size})
    return quantized_key(weights) == quantized_key(own)


def quantized_key(args: QuantizationArgs | None) -> tuple | None:
    """The arguments that decide the quantized values, as a key; `None` for no quantization."""
    if args is None:
        return None
    blocks = None if args.block_structure is None else tuple(args.block_structure)
    return args.num_bits, args.type, args.symmetric, args.dynamic, args.strategy, args.group_size, blocks


def _strategy_of(group_size: int) -> tuple[QuantizationStrategy, int | None]:
    return (QuantizationStrategy.CHANNEL, None) if group_size == -1 else (QuantizationStrategy.GROUP, group_size)
