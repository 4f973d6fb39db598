"""Which layer gets which scheme: llm-compressor recipes and compressed-tensors configurations.

A recipe is data. It is read with compressed-tensors' own classes, so llm-compressor does not have to be installed.
Invariant: a recipe is carried out as a whole or refused; nothing in it is skipped, because a skipped modifier would give
another model than the one the recipe describes (paper Sec. 3.1: which layers are low-bit, and how).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStrategy,
    QuantizationType,
    is_preset_scheme,
    preset_name_to_scheme,
)
from compressed_tensors.utils import match_targets
from torch import nn

from .scheme import resolve_scheme


# llm-compressor's name for the minimum and maximum of the weight as it is, which is what `quantize_weight` takes.
MINMAX = "memoryless_minmax"
OBSERVERS = {"weight_observer": "weights", "input_observer": "input_activations"}
KNOWN_FIELDS = ("targets", "ignore", "scheme", "config_groups", "observer", *OBSERVERS)
# Fields that llm-compressor writes into every recipe, with the values that change nothing.
NEUTRAL_FIELDS = {
    "group": None,
    "index": None,
    "start": None,
    "end": None,
    "update": None,
    "kv_cache_scheme": None,
    "output_observer": None,
    "bypass_divisibility_checks": False,
    "requires_calibration_data": False,
    "initialized_": False,
    "finalized_": False,
    "started_": False,
    "ended_": False,
}
REMEDIES = {
    "GPTQModifier": "GPTQ rounds weights once, after training: run it with `qarl-trl ptq`, or train from its checkpoint.",
    "AWQModifier": "It changes the weights before they are quantized: run `qarl-trl precondition` first.",
    "SmoothQuantModifier": "It changes the weights before they are quantized: run `qarl-trl precondition` first.",
    "SpinQuantModifier": "It changes the weights before they are quantized: run `qarl-trl precondition` first.",
    "QuIPModifier": "It changes the weights before they are quantized: run `qarl-trl precondition` first.",
}


def read_recipe(path: str | os.PathLike) -> QuantizationConfig:
    """
    Read an llm-compressor recipe with one `QuantizationModifier`.

    Args:
        path (`str` or `os.PathLike`): A `.yaml` file, as llm-compressor reads and writes it
            (`*_stage: *_modifiers: QuantizationModifier: ...`).

    Returns:
        `QuantizationConfig`: Groups in the recipe's order, each with its targets and a scheme the learner can run.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: for another modifier, an unknown field, or a scheme the learner cannot run.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"quant_recipe={str(path)!r}: there is no such file in {Path.cwd()}.")
    try:
        content = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    try:
        return config_of(_single_modifier(content))
    except ValueError as error:
        raise ValueError(f"The recipe {path} cannot be used: {error}") from error


def config_of(modifier: dict[str, Any]) -> QuantizationConfig:
    """
    The configuration that the fields of a `QuantizationModifier` stand for, as llm-compressor resolves them.

    Raises:
        ValueError: for fields that are unknown or contradict each other.
    """
    modifier = {k: v for k, v in modifier.items() if k not in NEUTRAL_FIELDS or v != NEUTRAL_FIELDS[k]}
    unknown = sorted(set(modifier) - set(KNOWN_FIELDS))
    if unknown:
        raise ValueError(f"QuantizationModifier has {unknown}. Known here: {sorted(KNOWN_FIELDS)}.")
    targets = _as_list(modifier.get("targets", ["Linear"]))
    scheme, groups = modifier.get("scheme"), modifier.get("config_groups")
    if (scheme is None) == (groups is None):
        raise ValueError("QuantizationModifier needs either `scheme` or `config_groups`.")
    if scheme is not None:
        by_preset = {scheme: targets} if isinstance(scheme, str) else scheme
        unknown = [name for name in by_preset if not is_preset_scheme(name)]
        if unknown:
            raise ValueError(f"`scheme` names {unknown}, which compressed-tensors does not know.")
        groups = {
            f"group_{i}": preset_name_to_scheme(name, _as_list(where))
            for i, (name, where) in enumerate(by_preset.items())
        }
    else:
        groups = {name: QuantizationScheme.model_validate(group) for name, group in groups.items()}
    observers = _observers(modifier)
    for group in groups.values():
        for field in OBSERVERS.values():
            _set_observer(getattr(group, field), observers.get(field))
    return resolve_config(QuantizationConfig(config_groups=groups, ignore=_as_list(modifier.get("ignore") or [])))


def resolve_config(config: QuantizationConfig) -> QuantizationConfig:
    """
    Check every scheme of `config` and set its format.

    Returns:
        `QuantizationConfig`: A new object.

    Raises:
        ValueError: for a scheme the learner cannot run, a quantized KV cache, or a target named by two groups.
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
    resolved = config.model_copy(deep=True)
    resolved.config_groups = {name: resolve_scheme(group) for name, group in config.config_groups.items()}
    return resolved


def single_group(scheme: QuantizationScheme, targets: Sequence[str], ignore: Sequence[str]) -> QuantizationConfig:
    """One scheme for every target, as the scheme fields of `QaRLConfig` say it."""
    scheme = scheme.model_copy(deep=True)
    scheme.targets = list(targets)
    return QuantizationConfig(config_groups={"group_0": scheme}, ignore=list(ignore))


def match(
    modules: Iterable[tuple[str, nn.Module]], config: QuantizationConfig
) -> list[tuple[str, nn.Module, QuantizationScheme]]:
    """
    The modules that `config` quantizes, in their order, each with its scheme.

    A module that several targets match takes the most specific one, by compressed-tensors' own order: exact name,
    pattern, class. Containers, norms and activations that a wide pattern matches are passed over, as there.

    Args:
        modules (`Iterable[tuple[str, nn.Module]]`): With the names that a checkpoint would have.
        config (`QuantizationConfig`): Groups and ignore list.

    Raises:
        ValueError: when a group matches nothing.
    """
    schemes = {target: group for group in config.config_groups.values() for target in group.targets}
    ignore = list(config.ignore or [])
    matched = [
        (name, module, schemes[targets[0]])
        for name, module in modules
        if (targets := match_targets(name, module, list(schemes)))
        and not match_targets(name, module, ignore)
        and _holds_matrix(module)
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


def arithmetic(scheme: QuantizationScheme) -> str:
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


def _holds_matrix(module: nn.Module) -> bool:
    return any(param.ndim >= 2 for param in module.parameters(recurse=False))


def _single_modifier(content: Any) -> dict[str, Any]:
    """The fields of the one modifier of a recipe; llm-compressor itself ignores what is spelled otherwise."""
    modifiers: list[tuple[str, Any]] = []
    for stage, groups in content.items() if isinstance(content, dict) else ():
        if not (stage.endswith("_stage") and isinstance(groups, dict)):
            raise ValueError(
                f"{stage!r} is not a stage. The layout is <name>_stage: <name>_modifiers: <Modifier>: ..."
            )
        for group, found in groups.items():
            if not (group.endswith("_modifiers") and isinstance(found, dict)):
                raise ValueError(
                    f"{stage}.{group} is not a group of modifiers. Its name has to end with '_modifiers'."
                )
            modifiers += found.items()
    others = [name for name, _ in modifiers if name != "QuantizationModifier"]
    if others:
        raise ValueError(
            f"it has {others[0]!r}, and only QuantizationModifier can run in every training step. "
            + REMEDIES.get(others[0], "Remove it, or use llm-compressor's oneshot before training.")
        )
    if len(modifiers) != 1:
        raise ValueError(f"one QuantizationModifier was needed, and it has {len(modifiers)}.")
    fields = modifiers[0][1]
    if not isinstance(fields, dict):
        raise ValueError(f"the fields of QuantizationModifier are {fields!r}.")
    return fields


def _observers(modifier: dict[str, Any]) -> dict[str, str]:
    given = dict(modifier.get("observer") or {})
    named = {"weights": "weights", "input": "input_activations"}
    if set(given) - set(named):
        raise ValueError(f"`observer` has {sorted(set(given) - set(named))}. Known here: {sorted(named)}.")
    single = {field: modifier[name] for name, field in OBSERVERS.items() if modifier.get(name) is not None}
    if given and single:
        raise ValueError("Give either `observer` or weight_observer and input_observer.")
    return {named[name]: value for name, value in given.items()} or single


def _set_observer(args: Any, observer: str | None) -> None:
    """As llm-compressor's `QuantizationMixin`: an observer of the modifier wins over that of the group."""
    if args is None:
        return
    if observer is None and args.observer is None and args.dynamic is not True:
        observer = MINMAX
    if observer is not None:
        args.observer = observer


def _as_list(value: str | Sequence[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)
