"""llm-compressor recipes with one `QuantizationModifier`, read without llm-compressor.

A recipe is carried out as a whole or refused: a modifier that is skipped would give another model than the recipe describes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml
from compressed_tensors.quantization import QuantizationConfig

from .scheme import MINMAX, resolve_config


KNOWN_FIELDS = ("targets", "ignore", "scheme", "config_groups", "observer", "weight_observer", "input_observer")
# Fields that llm-compressor writes into every recipe, with the values that change nothing.
NEUTRAL_FIELDS = {
    **dict.fromkeys(("group", "index", "start", "end", "update", "kv_cache_scheme", "output_observer")),
    **dict.fromkeys(("bypass_divisibility_checks", "requires_calibration_data"), False),
    **dict.fromkeys(("initialized_", "finalized_", "started_", "ended_"), False),
}


def read_recipe(path: str | os.PathLike) -> QuantizationConfig:
    """
    What an llm-compressor recipe (`.yaml`) with one `QuantizationModifier` quantizes: groups in its order.

    `FileNotFoundError` when there is no such file; `ValueError` for another modifier, an unknown field, or a scheme that the
    learner cannot run.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"quant_recipe={str(path)!r}: there is no such file in {Path.cwd()}.")
    try:
        return _config_of(_only_modifier(yaml.safe_load(path.read_text())))
    # KeyError: an unknown preset. UnicodeDecodeError is a ValueError.
    except (KeyError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"The recipe {path} cannot be used: {error}") from error


def _only_modifier(content: Any) -> dict[str, Any]:
    """
    The fields of the one modifier of a recipe, `<name>_stage: <name>_modifiers: QuantizationModifier: fields`.

    llm-compressor passes over stages and groups with other names, so a slip of the pen would quantize nothing.
    """
    modifiers: list[tuple[str, Any]] = []
    for stage, groups in content.items() if isinstance(content, dict) else ():
        for group, found in groups.items() if isinstance(groups, dict) else ():
            known = stage.endswith("_stage") and group.endswith("_modifiers") and isinstance(found, dict)
            modifiers += found.items() if known else [(f"{stage}.{group}", found)]
    if [name for name, _ in modifiers] != ["QuantizationModifier"] or not isinstance(modifiers[0][1], dict):
        raise ValueError(
            "it must be <name>_stage: <name>_modifiers: QuantizationModifier: fields, and nothing else can run in every "
            f"training step, got {dict(modifiers) or content}. Run other modifiers before training (examples/llmcompressor)."
        )
    return modifiers[0][1]


def _config_of(modifier: dict[str, Any]) -> QuantizationConfig:
    """The fields of a `QuantizationModifier` as llm-compressor resolves them."""
    modifier = {k: v for k, v in modifier.items() if k not in NEUTRAL_FIELDS or v != NEUTRAL_FIELDS[k]}
    unknown = sorted(set(modifier) - set(KNOWN_FIELDS))
    if unknown:
        raise ValueError(f"the fields of QuantizationModifier must be among {[*KNOWN_FIELDS]}, got {unknown}.")
    scheme, groups = modifier.get("scheme"), modifier.get("config_groups")
    if (scheme is None) == (groups is None):
        raise ValueError("QuantizationModifier needs either `scheme` or `config_groups`.")
    if scheme is not None:
        groups = scheme if isinstance(scheme, dict) else {scheme: modifier.get("targets", ["Linear"])}
        groups = {name: [targets] if isinstance(targets, str) else targets for name, targets in groups.items()}
    ignore = modifier.get("ignore") or []
    ignore = [ignore] if isinstance(ignore, str) else ignore
    config = QuantizationConfig.model_validate({"config_groups": groups, "ignore": ignore})
    if scheme is not None:  # named as llm-compressor names them
        config.config_groups = {f"group_{i}": group for i, group in enumerate(config.config_groups.values())}
    observers = {"weights": modifier.get("weight_observer"), "input": modifier.get("input_observer")}
    if set(given := modifier.get("observer") or {}) - set(observers):
        raise ValueError(f"`observer` must be a mapping of {[*observers]}, got {given}.")
    observers |= given
    for group in config.config_groups.values():
        for args, side in ((group.weights, "weights"), (group.input_activations, "input")):
            if args is not None:
                args.observer = observers[side] or args.observer or (None if args.dynamic is True else MINMAX)
    return resolve_config(config)
