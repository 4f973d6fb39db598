"""Read a recipe, and convert its values and those of the command line to the types of their fields.

People share recipes, so we read them as plain data: no YAML tags, and only fields of the run.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from .redact import redact


# Negative numbers are mistakes, except in these fields and in fields with a negative default.
MAY_BE_NEGATIVE = ("quant_group_size", "top_k", "save_total_limit", "entropy_coef")
# Text fields that accept YAML's words for booleans (on, off, yes, no).
_WORDS = ("verify_sync", "resume_from_checkpoint", "scale_rewards")


def read_recipe(recipe: Path) -> dict[str, Any]:
    """The recipe, merged over the one that its `base:` names (relative to its folder); `ValueError` if the base has a base."""
    content = _load(recipe)
    if "base" in content:
        path = recipe.parent / str(content.pop("base"))
        base = _load(path)
        if "base" in base:
            raise ValueError(f"base of {recipe}: {path} must be a whole recipe, without a base of its own.")
        content = base | content
    return content


def _load(recipe: Path) -> dict[str, Any]:
    import yaml

    text = recipe.read_text()
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
        # A few hundred nested aliases would take minutes.
        raise ValueError(f"--config {recipe} must have no aliases (*name): a recipe is flat.")
    content = yaml.safe_load(text)
    if not isinstance(content, dict):
        raise ValueError(f"--config {recipe} must be a mapping of keys to values, got {type(content).__name__}.")
    return content


def check_keys(keys: Iterable[Any], known: Iterable[str]) -> None:
    """Refuse (`ValueError`) unknown keys, and suggest the closest known one."""
    known = list(known)
    for key in keys:
        if key not in known:
            near = next(iter(difflib.get_close_matches(str(key), known, 1)), None)
            raise ValueError(f"{key} is not a key of a recipe." + (f" Did you mean {near}?" if near else ""))


def checked(values: Mapping[str, Any], groups: Iterable[type]) -> dict[str, Any]:
    """
    Convert `values` to the types of these dataclasses' fields: "1e-5", which YAML reads as text, becomes a number.

    `ValueError` names the field if a value has a wrong type, is NaN or infinite, or is negative where that makes no sense.
    """
    found = {}
    for group in groups:
        hints = get_type_hints(group)
        for field in dataclasses.fields(group):
            if field.name in values:
                found[field.name] = _checked(field, values[field.name], hints[field.name])
    return found


def _checked(field: dataclasses.Field, value: Any, hint: Any) -> Any:
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    name, default, types = field.name, field.default, str(hint)
    if type(value) is type(default) and value == default:
        return value
    if value is False and name.endswith("_strategy"):  # `save_strategy: no`
        return "no"
    if "Literal[False]" in types and str(value).lower() == "false":  # `trackio_static_space_id: false`
        return False
    if isinstance(value, bool) and "bool" not in types:
        if name in _WORDS:
            return value
        value = [value]  # else pydantic takes it for a number
    if isinstance(value, str) and "list[" in types and "str |" not in types:  # `reward_funcs: math_reward`
        value = [value]
    config = ConfigDict(allow_inf_nan=False, coerce_numbers_to_str=True, arbitrary_types_allowed=True)
    try:
        value = TypeAdapter(hint, config=config).validate_python(value)
    except ValidationError as error:
        reasons = dict.fromkeys(found["msg"].removeprefix("Input should be ") for found in error.errors())
        raise ValueError(f"{name} must be {', or '.join(reasons)}, got {redact(value, name)!r}.") from None
    choices = field.metadata.get("choices")
    if choices and value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}.")
    may_be_negative = name in MAY_BE_NEGATIVE or (isinstance(default, int | float) and default < 0)
    if isinstance(value, int | float) and value < 0 and not may_be_negative:
        raise ValueError(f"{name} must not be negative, got {value}.")
    return value


def construct(group: type, values: Mapping[str, Any]) -> Any:
    """Make a `group` from its fields in `values`. Errors of its `__post_init__` become a `ValueError` that names the field."""
    given = {field.name: values[field.name] for field in dataclasses.fields(group) if field.name in values}
    try:
        return group(**given)
    except Exception as error:
        # Messages of transformers may not name the field, so find the one without which there is no error.
        guilty = [name for name in given if _constructs(group, {k: v for k, v in given.items() if k != name})]
        named = "" if not guilty or any(name in str(error) for name in guilty) else f"{' or '.join(guilty)}: "
        raise ValueError(f"{named}{error}") from error


def _constructs(group: type, values: Mapping[str, Any]) -> bool:
    try:
        group(**values)
    except Exception:
        return False
    return True
