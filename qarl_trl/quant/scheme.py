"""Schemes and plans: which schemes the learner can run, where they run, and which layer gets which (paper Sec. 3.1).

A scheme is a compressed-tensors `QuantizationScheme`, a plan a `QuantizationConfig`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

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

from .supported import SUPPORTED, SchemeSupport


# Every path casts a weight to this dtype before it quantizes (dev/numerics.md).
MASTER_CAST_DTYPE = torch.bfloat16
# Routers decide which expert sees a token: a flipped decision costs more than the few bytes saved.
# Some have layers within: `gate.wg` (HunYuan), `router.gate` (AFMoE), `router.layer` (DBRX), `router.proj` (Gemma-4).
ROUTERS = (
    r"re:.*mlp\.gate(\..*)?$",
    r"re:.*\.router(\..*)?$",
    r"re:.*shared_expert_gate$",
)
DEFAULT_IGNORE = ("lm_head", *ROUTERS)
# What chooses the tokens of sparse attention (DeepSeek-V3.2, GLM-MoE-DSA): vLLM has the two as one matrix in bfloat16.
INDEXERS = (r"re:.*\.indexer\.wk$", r"re:.*\.indexer\.weights_proj$")
# llm-compressor's name for the minimum and maximum of the weight itself, which `quantize_weight` uses.
MINMAX = "memoryless_minmax"


# From names to schemes -----------------------------------------------------------------------------------------------


def resolve_scheme(scheme: str | QuantizationScheme, group_size: int | None = None) -> QuantizationScheme:
    """
    Return a new `QuantizationScheme` with `format` set.

    Args:
        scheme: The name of a preset, in any case, or a scheme of compressed-tensors.
        group_size: Number of weights along the input dimension that share one scale; -1 means one scale per output
            channel, `None` the preset's size (128 for W4A16).

    Raises:
        ValueError: for a scheme that the learner cannot run, or a group size that the scheme does not allow.
    """
    resolved = _copy_of(scheme)
    support = support_of(resolved)

    if group_size is not None:
        _check_group_size(support, group_size)
        resolved.weights = _in_groups(resolved.weights, group_size)

    resolved.format = CompressionFormat(support.format)
    return resolved


def _copy_of(scheme: str | QuantizationScheme) -> QuantizationScheme:
    """A copy of a scheme, or a new one from a preset's name."""
    if not isinstance(scheme, str):
        return scheme.model_copy(deep=True)

    if scheme.upper() not in SUPPORTED:
        raise ValueError(f"quant_scheme={scheme!r} must be one of {sorted(SUPPORTED)}, or 'none'.")
    return preset_name_to_scheme(scheme.upper(), targets=["Linear"])


def _check_group_size(support: SchemeSupport, group_size: int) -> None:
    """Refuse (`ValueError`) a group size that the scheme does not allow."""
    if group_size in support.group_sizes:
        return

    advice = "leave it unset"
    if support.group_sizes:
        advice = f"choose one of {support.group_sizes} (-1: per channel)"
    raise ValueError(f"quant_group_size={group_size} does not fit the scheme {support.name}: {advice}.")


def _in_groups(weights: QuantizationArgs, size: int) -> QuantizationArgs:
    """The same arguments with another group size; -1: one scale per output channel."""
    if size == -1:
        changes = {"strategy": QuantizationStrategy.CHANNEL, "group_size": None}
    else:
        changes = {"strategy": QuantizationStrategy.GROUP, "group_size": size}
    return weights.model_copy(update=changes)


def support_of(scheme: QuantizationScheme) -> SchemeSupport:
    """
    The row of `SUPPORTED` for a scheme.

    Args:
        scheme: Any scheme of compressed-tensors, also one read from a checkpoint.

    Raises:
        ValueError: if the table has no such row.
    """
    support = None
    if _rounds_to_nearest(scheme.weights) and scheme.output_activations is None:
        support = _rows().get(_row_key(scheme))

    if support is None:
        raise ValueError(
            f"The quantization scheme weights={scheme.weights}, input_activations={scheme.input_activations}, "
            f"output_activations={scheme.output_activations} has no learner forward. Choose one of {[*SUPPORTED]}, "
            "rounded to nearest between minimum and maximum (no other observer, actorder or scale_dtype)."
        )
    return support


def _rounds_to_nearest(weights: QuantizationArgs | None) -> bool:
    """Whether weights are rounded to nearest between minimum and maximum, in the order they have."""
    if weights is None or weights.actorder is not None:
        return False
    # llm-compressor's other observers, such as "mse", choose other scales.
    # All of llm-compressor's "minmax" observers see the same range of a weight, which they see once.
    observer = weights.observer or MINMAX
    return observer.endswith("minmax")


@cache
def _rows() -> dict[tuple[Any, ...], SchemeSupport]:
    """The rows of the table for all of their group sizes, by [`_row_key`]."""
    rows = {}
    for name, support in SUPPORTED.items():
        preset = preset_name_to_scheme(name, targets=["Linear"])
        # In its own groups, for schemes without a choice; other presets come again below, under the same key.
        rows[_row_key(preset)] = support

        for size in support.group_sizes:
            grouped = preset.model_copy(update={"weights": _in_groups(preset.weights, size)})
            rows[_row_key(grouped)] = support
    return rows


def _row_key(scheme: QuantizationScheme) -> tuple[Any, ...]:
    """The arguments of a scheme that determine its row in the table."""
    return quantized_key(scheme.weights), scheme.weights.scale_dtype, quantized_key(scheme.input_activations)


# What a scheme says --------------------------------------------------------------------------------------------------


def quantized_key(args: QuantizationArgs | None) -> tuple[Any, ...] | None:
    """
    The arguments that determine the quantized values, as a key for dictionaries.

    Args:
        args: Arguments for one side of a layer; `None`, for a side that is not quantized, gives `None`.
    """
    if args is None:
        return None

    # A list has no hash.
    blocks = None if args.block_structure is None else tuple(args.block_structure)
    return args.num_bits, args.type, args.symmetric, args.dynamic, args.strategy, args.group_size, blocks


def effective_group_size(scheme: QuantizationScheme) -> int | None:
    """Weights per scale along the input dimension, or `None` for one scale per output channel."""
    if scheme.weights.strategy in (QuantizationStrategy.GROUP, QuantizationStrategy.TENSOR_GROUP):
        return scheme.weights.group_size
    return None


def has_global_scale(scheme: QuantizationScheme) -> bool:
    """Whether the whole weight has a float32 scale in addition to those of its groups (NVFP4)."""
    return scheme.weights.strategy == QuantizationStrategy.TENSOR_GROUP


def describe_scheme(scheme: QuantizationScheme) -> str:
    """Describe what a scheme computes; two schemes that compute the same have the same text."""
    sides = []
    if scheme.weights is not None:
        sides.append(f"weights {_describe(scheme.weights)}")

    if scheme.input_activations is not None:
        static = "" if scheme.input_activations.dynamic else ", static"
        sides.append(f"activations {_describe(scheme.input_activations)}{static}")

    return "; ".join(sides) or "nothing"


def _describe(args: QuantizationArgs) -> str:
    """Type, bits and scales of one side, such as "int4 per group 128, asymmetric"."""
    kind = QuantizationType(args.type).value
    strategy = QuantizationStrategy(args.strategy).value
    text = f"{kind}{args.num_bits} per {strategy}"

    size = args.group_size if args.strategy == QuantizationStrategy.GROUP else args.block_structure
    if size:
        text += f" {size}"
    if not args.symmetric:
        text += ", asymmetric"
    return text


# Plans ---------------------------------------------------------------------------------------------------------------


def resolve_config(config: QuantizationConfig) -> QuantizationConfig:
    """
    Return a copy of a plan with the format of every scheme set.

    Args:
        config: A plan, such as that of a recipe or a checkpoint.

    Raises:
        ValueError: if it has a scheme that the learner cannot run, or quantizes the KV cache.
    """
    if config.kv_cache_scheme is not None:
        raise ValueError("A quantized KV cache has no learner forward. Leave out kv_cache_scheme.")

    groups = {name: resolve_scheme(group) for name, group in config.config_groups.items()}
    return config.model_copy(update={"config_groups": groups})


def single_group(scheme: QuantizationScheme, targets: Sequence[str], ignore: Sequence[str]) -> QuantizationConfig:
    """
    A plan with one scheme for all targets, as the scheme fields of `LowBitConfig` give it.

    Args:
        scheme: The scheme.
        targets: Names or classes of modules, or patterns for names after `re:`.
        ignore: The same, for modules that stay as they are.

    Raises:
        ValueError: for an invalid pattern.
    """
    for target in (*targets, *ignore):
        check_pattern(target)

    # llm-compressor names the only group of a plan like this.
    group = scheme.model_copy(deep=True, update={"targets": list(targets)})
    return QuantizationConfig(config_groups={"group_0": group}, ignore=list(ignore))


def check_pattern(target: str) -> None:
    """Refuse (`ValueError`) a pattern, after `re:`, that is no regular expression."""
    if not target.startswith("re:"):
        return
    try:
        re.compile(target.removeprefix("re:"))
    except re.error as error:
        raise ValueError(f"{target!r} in targets or quant_ignore is no valid pattern: {error}.") from error


def scheme_for(name: str, module: nn.Module, plan: QuantizationConfig) -> QuantizationScheme | None:
    """
    The scheme that a plan gives a module.

    Args:
        name: The module's name in the checkpoint.
        module: The module; targets may name its class.
        plan: The plan.

    Returns:
        The scheme of the most specific target that matches; `None` if none does, or if the plan ignores the module.
    """
    if match_targets(name, module, plan.ignore or []):
        return None

    # As in compressed-tensors: of a target in two groups the later one counts.
    schemes = {}
    for group in plan.config_groups.values():
        for target in group.targets:
            schemes[target] = group

    # compressed-tensors returns the most specific target first.
    matching = match_targets(name, module, list(schemes))
    if not matching:
        return None
    return schemes[matching[0]]
