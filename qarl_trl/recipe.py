"""Read a recipe, and give its values and those of the command line the types of their fields.

A recipe is data that people share, so it is read as data: no tags, and no setting outside of the run's own fields.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from .redact import redact


# Negative numbers are mistakes, but in fields with a negative default and in these.
MAY_BE_NEGATIVE = ("quant_group_size", "top_k", "save_total_limit", "entropy_coef")
# Text fields for which YAML's words for booleans (on, off, yes, no) also stand.
_WORDS = ("verify_sync", "resume_from_checkpoint", "scale_rewards")


def read_recipe(recipe: Path) -> dict[str, Any]:
    """The recipe, on top of the one that its `base:` names (a path from its own folder); `ValueError` if that has a base, too."""
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
        # A few hundred, each of a list of others, would be worked on for minutes.
        raise ValueError(f"--config {recipe} must have no aliases (*name): a recipe is flat.")
    content = yaml.safe_load(text)
    if not isinstance(content, dict):
        raise ValueError(f"--config {recipe} must be a mapping of keys to values, got {type(content).__name__}.")
    return content


def check_keys(keys: Iterable[Any], known: Iterable[str]) -> None:
    """Refuse (`ValueError`) keys that are no fields, each with the nearest one that is."""
    known = list(known)
    for key in keys:
        if key not in known:
            near = next(iter(difflib.get_close_matches(str(key), known, 1)), None)
            raise ValueError(f"{key} is not a key of a recipe." + (f" Did you mean {near}?" if near else ""))


def checked(values: Mapping[str, Any], groups: Iterable[type]) -> dict[str, Any]:
    """
    `values` by field as the types of these dataclasses have them: "1e-5", which YAML reads as text, is a number.

    `ValueError` names the field: of a wrong type, of NaN or infinity, and of a negative number where none can be meant.
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
        value = [value]  # pydantic takes it for a number
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
    """A `group` of its fields in `values`. What its `__post_init__` raises is a `ValueError` that names the field."""
    given = {field.name: values[field.name] for field in dataclasses.fields(group) if field.name in values}
    try:
        return group(**given)
    except Exception as error:
        # transformers' messages do not always name the field, so find the one without which there is no error.
        guilty = [name for name in given if _constructs(group, {k: v for k, v in given.items() if k != name})]
        named = "" if not guilty or any(name in str(error) for name in guilty) else f"{' or '.join(guilty)}: "
        raise ValueError(f"{named}{error}") from error


def _constructs(group: type, values: Mapping[str, Any]) -> bool:
    try:
        group(**values)
    except Exception:
        return False
    return True
