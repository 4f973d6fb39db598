"""Which layer gets which scheme: the groups of a compressed-tensors `QuantizationConfig`, matched to modules (paper Sec. 3.1)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStrategy,
    QuantizationType,
)
from compressed_tensors.utils import match_targets
from torch import nn

from .scheme import resolve_scheme
from .zero import shape_of


# llm-compressor's name for the minimum and maximum of the weight as it is, which is what `quantize_weight` takes.
MINMAX = "memoryless_minmax"


def resolve_config(config: QuantizationConfig) -> QuantizationConfig:
    """
    A copy of `config` with every scheme checked and its format set.

    `ValueError` for a scheme the learner cannot run, a quantized KV cache, or a target named by two groups.
    """
    if config.kv_cache_scheme is not None:
        raise ValueError("A quantized KV cache has no learner forward. Leave out kv_cache_scheme.")
    if not config.config_groups:
        raise ValueError("There is no group in config_groups, so nothing would be quantized.")
    seen: dict[str, str] = {}
    for name, group in config.config_groups.items():
        if not group.targets:
            raise ValueError(f"{name!r} has no targets.")
        for target in group.targets:
            if seen.setdefault(target, name) != name:
                raise ValueError(f"The target {target!r} is in {seen[target]!r} and in {name!r}. Keep one of them.")
    groups = {name: resolve_scheme(group) for name, group in config.config_groups.items()}
    return config.model_copy(deep=True, update={"config_groups": groups})


def single_group(scheme: QuantizationScheme, targets: Sequence[str], ignore: Sequence[str]) -> QuantizationConfig:
    """One scheme for every target, as the scheme fields of `QaRLConfig` say it."""
    group = scheme.model_copy(deep=True, update={"targets": list(targets)})
    return QuantizationConfig(config_groups={"group_0": group}, ignore=list(ignore))


def match(
    modules: Iterable[tuple[str, nn.Module]], config: QuantizationConfig
) -> list[tuple[str, nn.Module, QuantizationScheme]]:
    """
    The modules that `config` quantizes, in their order, each with its scheme.

    A module (by its name in a checkpoint) that several targets match takes the most specific one, by compressed-tensors'
    own order: exact name, pattern, class. Containers, norms and activations that a wide pattern matches are passed over.
    `ValueError` when a group matches nothing.
    """
    schemes = {target: group for group in config.config_groups.values() for target in group.targets}
    ignore = list(config.ignore or [])
    matched = [
        (name, module, schemes[targets[0]])
        for name, module in modules
        if (targets := match_targets(name, module, list(schemes)))
        and not match_targets(name, module, ignore)
        and any(len(shape_of(param)) >= 2 for param in module.parameters(recurse=False))
    ]
    used = {id(scheme) for _, _, scheme in matched}
    for name, group in config.config_groups.items():
        if id(group) not in used:
            raise ValueError(
                f"No module matches targets={group.targets} with ignore={ignore}, so "
                + ("nothing would be quantized" if len(config.config_groups) == 1 else f"{name!r} quantizes nothing")
                + ". Check the patterns against `model.named_modules()`."
            )
    return matched


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
