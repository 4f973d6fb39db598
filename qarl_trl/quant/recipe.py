"""llm-compressor recipes with one `QuantizationModifier`, read without llm-compressor.

A recipe is carried out as a whole or refused: a modifier that is skipped would give another model than the recipe describes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from compressed_tensors.quantization import QuantizationConfig

from .scheme import MINMAX, resolve_config


TRANSFORMS = ("SmoothQuantModifier", "AWQModifier", "SpinQuantModifier", "QuIPModifier")
REMEDIES = {
    "GPTQModifier": "GPTQ rounds weights once, after training: run it with `qarl-trl ptq`, or train from its checkpoint.",
    **dict.fromkeys(
        TRANSFORMS, "It changes the weights before they are quantized: run `qarl-trl precondition` first."
    ),
}
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
        content = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    try:
        return _config_of(_only_modifier(content))
    except (KeyError, ValueError) as error:  # KeyError: an unknown preset
        raise ValueError(f"The recipe {path} cannot be used: {error}") from error


def _config_of(modifier: dict[str, Any]) -> QuantizationConfig:
    """The fields of a `QuantizationModifier` as llm-compressor resolves them."""
    modifier = {k: v for k, v in modifier.items() if k not in NEUTRAL_FIELDS or v != NEUTRAL_FIELDS[k]}
    unknown = sorted(set(modifier) - set(KNOWN_FIELDS))
    if unknown:
        raise ValueError(f"QuantizationModifier has {unknown}. Known here: {sorted(KNOWN_FIELDS)}.")
    scheme, groups = modifier.get("scheme"), modifier.get("config_groups")
    if (scheme is None) == (groups is None):
        raise ValueError("QuantizationModifier needs either `scheme` or `config_groups`.")
    if scheme is not None:
        presets = {scheme: modifier.get("targets", ["Linear"])} if isinstance(scheme, str) else scheme
        groups = {name: _as_list(targets) for name, targets in presets.items()}
    ignore = _as_list(modifier.get("ignore") or [])
    config = QuantizationConfig.model_validate({"config_groups": groups, "ignore": ignore})
    if scheme is not None:  # named as llm-compressor names them
        config.config_groups = {f"group_{i}": group for i, group in enumerate(config.config_groups.values())}
    observers = _observers(modifier)
    for group in config.config_groups.values():
        for args, side in ((group.weights, "weights"), (group.input_activations, "input")):
            if args is not None:
                default = None if args.dynamic is True else MINMAX
                args.observer = observers.get(side) or args.observer or default
    return resolve_config(config)


def _observers(modifier: dict[str, Any]) -> dict[str, str]:
    """Observers that the modifier sets for all of its groups, by `"weights"` and `"input"`."""
    given = dict(modifier.get("observer") or {})
    if set(given) - {"weights", "input"}:
        raise ValueError(f"`observer` has {sorted(given)}. Known here: ['input', 'weights'].")
    single = {"weights": modifier.get("weight_observer"), "input": modifier.get("input_observer")}
    if given and any(single.values()):
        raise ValueError("Give either `observer` or weight_observer and input_observer.")
    return given or single


def _only_modifier(content: Any) -> dict[str, Any]:
    """The fields of the one modifier of a recipe; llm-compressor itself ignores what is spelled otherwise."""
    modifiers: list[tuple[str, Any]] = []
    for stage, groups in content.items() if isinstance(content, dict) else ():
        if not (stage.endswith("_stage") and isinstance(groups, dict)):
            raise ValueError(f"{stage!r} is not a stage (<name>_stage: <name>_modifiers: <Modifier>: ...).")
        for group, found in groups.items():
            if not (group.endswith("_modifiers") and isinstance(found, dict)):
                raise ValueError(f"{stage}.{group} is not a group of modifiers: its name must end with '_modifiers'.")
            modifiers += found.items()
    others = [name for name, _ in modifiers if name != "QuantizationModifier"]
    if others:
        raise ValueError(
            f"it has {others[0]!r}, and only QuantizationModifier can run in every training step. "
            + REMEDIES.get(others[0], "Remove it, or use llm-compressor's oneshot before training.")
        )
    if len(modifiers) != 1:
        raise ValueError(f"it must have one QuantizationModifier, got {len(modifiers)}.")
    fields = modifiers[0][1]
    if not isinstance(fields, dict):
        raise ValueError(f"the fields of QuantizationModifier must be a mapping, got {fields!r}.")
    return fields


def _as_list(value: str | Sequence[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)
