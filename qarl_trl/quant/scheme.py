"""Schemes and plans: names to compressed-tensors' `QuantizationScheme`s, and which layer gets which (paper Sec. 3.1).

What the learner can run stands in one table, `table.py`. A plan is a compressed-tensors `QuantizationConfig`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStrategy,
    QuantizationType,
    preset_name_to_scheme,
)
from compressed_tensors.utils import match_targets
from torch import nn

from .table import ALIASES, SUPPORTED, SchemeSupport


# The dtype every weight is cast to before it is quantized, on every path (docs/numerics.md).
MASTER_CAST_DTYPE = torch.bfloat16
# Routers decide which expert sees a token: a flipped decision costs more than the few bytes saved.
DEFAULT_IGNORE = ("lm_head", r"re:.*mlp\.gate$", r"re:.*\.router$", r"re:.*shared_expert_gate$")
# llm-compressor's name for the minimum and maximum of the weight as it is, which is what `quantize_weight` takes.
MINMAX = "memoryless_minmax"


# Schemes ------------------------------------------------------------------------------------------------------------


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
        name = ALIASES.get(scheme.strip().upper(), scheme.strip().upper())
        if name not in SUPPORTED:
            raise ValueError(f"quant_scheme={scheme!r} must be one of {sorted(SUPPORTED)}, or 'none'.")
        resolved = preset_name_to_scheme(name, targets=["Linear"])
    else:
        resolved = scheme.model_copy(deep=True)
    row = support_of(resolved)
    if group_size is not None:
        if group_size not in row.group_sizes:
            choice = f"choose one of {row.group_sizes} (-1: per channel)" if row.group_sizes else "leave it unset"
            raise ValueError(f"quant_group_size={group_size} does not fit the scheme {row.name}: {choice}.")
        resolved.weights = _in_groups(resolved.weights, group_size)
    resolved.format = CompressionFormat(row.format)
    return resolved


def support_of(scheme: QuantizationScheme) -> SchemeSupport:
    """The row of `SUPPORTED` that `scheme` is an instance of; `ValueError` when no row fits."""
    weights, row = scheme.weights, None
    # What `quantize_weight` does: rounding to nearest between minimum and maximum, columns in the order they have.
    nearest = weights is not None and weights.actorder is None and (weights.observer or MINMAX).endswith("minmax")
    if nearest and scheme.output_activations is None:
        row = _rows().get((quantized_key(weights), weights.scale_dtype, quantized_key(scheme.input_activations)))
    if row is None:
        raise ValueError(
            f"The quantization scheme weights={weights}, input_activations={scheme.input_activations}, "
            f"output_activations={scheme.output_activations} has no learner forward. Choose one of {[*SUPPORTED]}, "
            "rounded to nearest between minimum and maximum (no other observer, actorder or scale_dtype)."
        )
    return row


@cache
def _rows() -> dict[tuple, SchemeSupport]:
    """The rows of the table, each in all of its group sizes, by the arguments that decide the quantized values."""
    rows = {}
    for name, row in SUPPORTED.items():
        preset = preset_name_to_scheme(name, targets=["Linear"])
        for size in row.group_sizes or (None,):
            weights = preset.weights if size is None else _in_groups(preset.weights, size)
            rows[quantized_key(weights), weights.scale_dtype, quantized_key(preset.input_activations)] = row
    return rows


def _in_groups(weights: QuantizationArgs, size: int) -> QuantizationArgs:
    strategy, size = (QuantizationStrategy.CHANNEL, None) if size == -1 else (QuantizationStrategy.GROUP, size)
    return weights.model_copy(update={"strategy": strategy, "group_size": size})


def quantized_key(args: QuantizationArgs | None) -> tuple | None:
    """The arguments that decide the quantized values, as a key; `None` for no quantization."""
    if args is None:
        return None
    blocks = None if args.block_structure is None else tuple(args.block_structure)
    return args.num_bits, args.type, args.symmetric, args.dynamic, args.strategy, args.group_size, blocks


def effective_group_size(scheme: QuantizationScheme) -> int | None:
    """Weights per scale along the input dimension, or `None` for one scale per output channel."""
    grouped = (QuantizationStrategy.GROUP, QuantizationStrategy.TENSOR_GROUP)
    return scheme.weights.group_size if scheme.weights.strategy in grouped else None


def has_global_scale(scheme: QuantizationScheme) -> bool:
    """Whether a float32 scale of the whole weight stands above the scales of its groups (NVFP4)."""
    return scheme.weights.strategy == QuantizationStrategy.TENSOR_GROUP


def describe_scheme(scheme: QuantizationScheme) -> str:
    """What a scheme computes, in words: equal for two schemes whose numbers are interchangeable."""
    parts = []
    for side, args in (("weights", scheme.weights), ("activations", scheme.input_activations)):
        if args is None:
            continue
        kind, per = QuantizationType(args.type).value, QuantizationStrategy(args.strategy).value
        size = args.group_size if args.strategy == QuantizationStrategy.GROUP else args.block_structure
        parts.append(
            f"{side} {kind}{args.num_bits} per {per}{f' {size}' if size else ''}"
            + ("" if args.symmetric else ", asymmetric")
            + (", static" if side == "activations" and not args.dynamic else "")
        )
    return "; ".join(parts) or "nothing"


# Plans --------------------------------------------------------------------------------------------------------------


def resolve_config(config: QuantizationConfig) -> QuantizationConfig:
    """
    A copy of `config` with every scheme checked and its format set.

    `ValueError` for a scheme that the learner cannot run, a quantized KV cache, groups without targets of their own.
    """
    if config.kv_cache_scheme is not None:
        raise ValueError("A quantized KV cache has no learner forward. Leave out kv_cache_scheme.")
    targets = {name: list(group.targets) for name, group in config.config_groups.items()}
    flat = [target for group in targets.values() for target in group]
    if not targets or not all(targets.values()) or len(set(flat)) < len(flat):
        raise ValueError(f"config_groups must be groups with targets that no other group has, got {targets}.")
    groups = {name: resolve_scheme(group) for name, group in config.config_groups.items()}
    return config.model_copy(deep=True, update={"config_groups": groups})


def single_group(scheme: QuantizationScheme, targets: Sequence[str], ignore: Sequence[str]) -> QuantizationConfig:
    """One scheme for every target, as the scheme fields of `QaRLConfig` say it."""
    group = scheme.model_copy(deep=True, update={"targets": list(targets)})
    return QuantizationConfig(config_groups={"group_0": group}, ignore=list(ignore))


def scheme_for(name: str, module: nn.Module, plan: QuantizationConfig) -> QuantizationScheme | None:
    """
    The scheme that `plan` has for a module, by its name in a checkpoint; `None` where it is ignored or no target matches.

    Of several targets that match it takes the most specific one, by compressed-tensors' own order: exact name, pattern, class.
    """
    if match_targets(name, module, plan.ignore or []):
        return None
    schemes = {target: group for group in plan.config_groups.values() for target in group.targets}
    return next((schemes[target] for target in match_targets(name, module, list(schemes))), None)
