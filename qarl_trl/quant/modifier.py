"""llm-compressor recipes with one `QuantizationModifier`, read without llm-compressor."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml
from compressed_tensors.quantization import QuantizationConfig

from .scheme import resolve_config


FIELDS = ("targets", "ignore", "scheme", "config_groups")


def read_modifier(path: str | os.PathLike[str]) -> QuantizationConfig:
    """Read the plan of an llm-compressor recipe with one `QuantizationModifier`; `ValueError` if the result could differ from `oneshot`'s."""
    text = Path(path).read_text()
    try:
        return _config_of(yaml.safe_load(text))
    # The layout is not a mapping, a preset is unknown, or a value is wrong.
    except (AttributeError, KeyError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"The recipe {path} cannot be used: {error}") from error


def _config_of(content: dict[str, Any]) -> QuantizationConfig:
    """Resolve `<name>_stage: <name>_modifiers: QuantizationModifier: fields` as llm-compressor does, which ignores other names."""
    stages = [groups for stage, groups in content.items() if stage.endswith("_stage")]
    found = [modifiers for groups in stages for group, modifiers in groups.items() if group.endswith("_modifiers")]
    modifiers = [modifier for group in found for modifier in group.items()]
    if [name for name, _ in modifiers] != ["QuantizationModifier"]:
        raise ValueError(
            "it must be <name>_stage: <name>_modifiers: QuantizationModifier: fields, and nothing else can run in every "
            f"training step, got {content}. Run other modifiers before training (examples/llmcompressor)."
        )
    # llm-compressor writes all its fields, most of them unset.
    fields = {name: value for name, value in modifiers[0][1].items() if value is not None and value is not False}
    if unknown := sorted(set(fields) - set(FIELDS)):
        raise ValueError(f"the fields of QuantizationModifier must be among {[*FIELDS]}, got {unknown}.")
    scheme, groups = fields.get("scheme"), fields.get("config_groups")
    if (scheme is None) == (groups is None):
        raise ValueError("QuantizationModifier needs either `scheme` or `config_groups`.")
    if scheme is not None:
        groups = scheme if isinstance(scheme, dict) else {scheme: fields.get("targets", ["Linear"])}
        groups = {name: _listed(targets) for name, targets in groups.items()}
    plan = {"config_groups": groups, "ignore": _listed(fields.get("ignore", []))}
    return resolve_config(QuantizationConfig.model_validate(plan))


def _listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value
