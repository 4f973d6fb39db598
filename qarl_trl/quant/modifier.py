"""llm-compressor recipes with one `QuantizationModifier`, read without llm-compressor."""

from __future__ import annotations

import os
import reprlib
from pathlib import Path
from typing import Any

import yaml
from compressed_tensors.quantization import QuantizationConfig

from .scheme import resolve_config


# Any other field could change what llm-compressor makes of the weights.
FIELDS = ("targets", "ignore", "scheme", "config_groups")


def read_modifier(path: str | os.PathLike[str]) -> QuantizationConfig:
    """
    Read the plan of an llm-compressor recipe with one `QuantizationModifier`.

    Args:
        path: A YAML file.

    Returns:
        The plan, with the format of every scheme set.

    Raises:
        ValueError: if the result could differ from `oneshot`'s.
    """
    text = Path(path).read_text()
    try:
        return _plan_of(yaml.safe_load(text))
    # The layout is not a mapping, a preset is unknown, or a value is wrong.
    except (AttributeError, KeyError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"The recipe {path} cannot be used: {error}") from error


def _plan_of(content: dict[str, Any]) -> QuantizationConfig:
    """The plan of a recipe's content."""
    modifiers = _modifiers_of(content)
    names = [name for name, _ in modifiers]
    # A second modifier (GPTQ, SmoothQuant) would change weights before this one rounds them.
    if names != ["QuantizationModifier"]:
        raise ValueError(
            "it must be <name>_stage: <name>_modifiers: QuantizationModifier: fields, and nothing else can run in "
            f"every training step, got {reprlib.repr(content):.500}. Run other modifiers before training "
            "(examples/llmcompressor)."
        )

    _, fields = modifiers[0]
    # llm-compressor writes all its fields, most of them unset.
    fields = {name: value for name, value in fields.items() if value is not None and value is not False}

    unknown = sorted(set(fields) - set(FIELDS))
    if unknown:
        raise ValueError(f"the fields of QuantizationModifier must be among {[*FIELDS]}, got {unknown}.")

    plan = {"config_groups": _groups_of(fields), "ignore": _listed(fields.get("ignore", []))}
    return resolve_config(QuantizationConfig.model_validate(plan))


def _modifiers_of(content: dict[str, Any]) -> list[tuple[str, Any]]:
    """Name and fields of every modifier under `<name>_stage: <name>_modifiers:`."""
    # llm-compressor ignores other names, so a recipe may have them.
    modifiers = []
    for stage, groups in content.items():
        if not stage.endswith("_stage"):
            continue
        for group, by_name in groups.items():
            if group.endswith("_modifiers"):
                modifiers.extend(by_name.items())
    return modifiers


def _groups_of(fields: dict[str, Any]) -> dict[str, Any]:
    """The `config_groups` of a modifier; `ValueError` unless it has either these or a `scheme`."""
    has_scheme = "scheme" in fields
    has_groups = "config_groups" in fields
    if has_scheme == has_groups:
        raise ValueError("QuantizationModifier needs either `scheme` or `config_groups`.")
    # These name their targets themselves.
    if has_groups:
        return fields["config_groups"]

    # A preset for the targets, or presets with targets of their own.
    scheme = fields["scheme"]
    targets = scheme if isinstance(scheme, dict) else {scheme: fields.get("targets", ["Linear"])}
    return {preset: _listed(names) for preset, names in targets.items()}


def _listed(value: str | list[str]) -> list[str]:
    """A list, or a single text as a list."""
    return [value] if isinstance(value, str) else value
