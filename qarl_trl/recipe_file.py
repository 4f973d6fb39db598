"""Read the file of a recipe. People share recipes, so we read them as plain data: no YAML tags, and no aliases."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml


_TEXT = "tag:yaml.org,2002:str"
# Numbers as people and JSON write them. YAML 1.1 also reads 0123 as 83, 12:30 as 750 and 1_000 as 1000.
_PLAIN_NUMBER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_PLAIN_SWITCH = re.compile(r"true|false", re.IGNORECASE)
_PLAIN_FLOAT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|[-+]?\.(inf|nan)", re.IGNORECASE)
# By the type that YAML finds. A date is always refused.
_WRITTEN_AS = {
    "tag:yaml.org,2002:int": _PLAIN_NUMBER,
    "tag:yaml.org,2002:float": _PLAIN_FLOAT,
    "tag:yaml.org,2002:bool": _PLAIN_SWITCH,
    "tag:yaml.org,2002:timestamp": re.compile(r"(?!)"),
}
# A token id, as a `logit_bias` has it. Of other numbers YAML takes several for one key: 1 and 01, 1e1 and 10.0.
_WHOLE_NUMBER = re.compile(r"0|-?[1-9][0-9]*")


class _Loader(yaml.SafeLoader):
    """A loader that reads `1e-7` as a number within lists and mappings, as it is read at the top."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_recipe(recipe: Path) -> dict[str, Any]:
    """
    Read a recipe, merged over the one that its `base:` names.

    Args:
        recipe: A YAML file. Its `base:` is relative to its folder.

    Returns:
        By key: the text of a value, as a command line would have it, or a list, a mapping or `None`.

    Raises:
        ValueError: if a file is no mapping of plain YAML, or the base has a base of its own.
    """
    content = _load(recipe)
    if "base" not in content:
        return content

    path = recipe.parent / str(content.pop("base"))
    base = _load(path)
    if "base" in base:
        raise ValueError(f"base of {recipe}: {path} must be a whole recipe, without a base of its own.")
    return base | content


def _load(recipe: Path) -> dict[str, Any]:
    """The content of one file."""
    # A device such as /dev/zero has no end.
    if recipe.exists() and not recipe.is_file():
        raise ValueError(f"--config {recipe} must be a file, got a folder or a device.")
    try:
        text = recipe.read_text()
        _check_plain(recipe, text)
        content = yaml.load(text, Loader=_Loader)
        # The same with each scalar as it is written. YAML reads the text `off` as False, and 1e-5 as text.
        written = yaml.load(text, Loader=yaml.BaseLoader)
    except UnicodeDecodeError as error:
        raise ValueError(f"--config {recipe} must be text, got other bytes: {error}.") from error
    except yaml.YAMLError as error:
        raise ValueError(f"--config {recipe} must be YAML, got {_problem(error)}.") from None

    if not isinstance(content, dict):
        raise ValueError(f"--config {recipe} must be a mapping of keys to values, got {type(content).__name__}.")

    values: dict[str, Any] = {}
    for (name, as_written), value in zip(written.items(), content.values(), strict=True):
        is_text = isinstance(as_written, str) and value is not None
        values[name] = as_written if is_text else value
    return values


def _check_plain(recipe: Path, text: str) -> None:
    """Refuse what is no plain data: aliases, tags, keys that are no text or there twice, and ambiguous values."""
    for event in yaml.parse(text, yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            # A few hundred nested aliases would take minutes.
            raise ValueError(f"--config {recipe} must have no aliases (*name): a recipe is flat.")
        if isinstance(event, yaml.ScalarEvent) and event.value == "<<" and event.style is None:
            raise ValueError(f"--config {recipe} must have no merges (<<): a recipe is flat. Use base:.")
        if getattr(event, "tag", None) is not None:
            raise ValueError(f"--config {recipe} must have no tags (!name), got {event.tag}: a recipe is data.")

    content = yaml.compose(text, _Loader)
    for key in _keys_without_text(content):
        raise ValueError(f"--config {recipe} must have text as keys, and {key!r} is none in YAML: put it into quotes.")
    for value in _values_that_yaml_changes(content):
        raise ValueError(
            f"--config {recipe} has {value} within a list or a mapping, which YAML does not read as it is written. "
            "Put it into quotes if it is text; otherwise write it as a decimal number, or as true or false."
        )
    for key in _repeated_keys(content):
        # YAML would take the last value.
        raise ValueError(f"--config {recipe} must have each key once, got {key} twice.")


def _keys_without_text(node: yaml.Node | None) -> Iterator[str]:
    """The keys, also inside of others, that are neither text nor plain whole numbers for YAML, as they are written."""
    for child in _children(node):
        yield from _keys_without_text(child)
    if not isinstance(node, yaml.MappingNode):
        return

    for key, _ in node.value:
        if key.tag != _TEXT and not _WHOLE_NUMBER.fullmatch(str(key.value)):
            yield str(key.value)


def _values_that_yaml_changes(content: yaml.Node | None) -> Iterator[str]:
    """
    The values within lists and mappings of which YAML makes something else than is written: `off` is False for it,
    and 12:30 is 750. The values at the top are taken as they are written.
    """
    for value in _children(content):
        for inner in _children(value):
            yield from _changed_by_yaml(inner)


def _changed_by_yaml(node: yaml.Node) -> Iterator[str]:
    """The scalars of a node that are no plain text, number, boolean or null."""
    for child in _children(node):
        yield from _changed_by_yaml(child)

    as_written = _WRITTEN_AS.get(node.tag)
    if as_written is not None and not as_written.fullmatch(str(node.value)):
        yield str(node.value)


def _repeated_keys(node: yaml.Node | None) -> Iterator[str]:
    """The keys that a mapping has more than once, also inside of others."""
    for child in _children(node):
        yield from _repeated_keys(child)
    if not isinstance(node, yaml.MappingNode):
        return

    seen = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.value in seen:
            yield key.value
        seen.add(key.value if isinstance(key, yaml.ScalarNode) else None)


def _children(node: yaml.Node | None) -> list[yaml.Node]:
    """The items of a list, or the values of a mapping."""
    if isinstance(node, yaml.SequenceNode):
        return node.value
    if isinstance(node, yaml.MappingNode):
        return [value for _, value in node.value]
    return []


def _problem(error: yaml.YAMLError) -> str:
    """What a YAML file has wrong, and where; without the line itself, which may hold a token."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return "characters that are not allowed"
    return f"an error in line {mark.line + 1}: {error.problem}"
