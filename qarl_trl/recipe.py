"""Read a recipe and a command line into the dataclasses of a run."""

from __future__ import annotations

import argparse
import difflib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from transformers import HfArgumentParser
from transformers.hf_argparser import string_to_bool

from .recipe_file import read_recipe
from .redact import redact


# Negative numbers are mistakes, except in these fields and in fields with a negative default.
MAY_BE_NEGATIVE = ("quant_group_size", "top_k", "save_total_limit", "entropy_coef")
# YAML's words for booleans. Text fields that accept them have their own meaning for each (`verify_sync: off`).
_SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_SWITCH_OR_TEXT = ("verify_sync", "resume_from_checkpoint", "scale_rewards", "trackio_static_space_id")
# YAML's words for no value.
_NULLS = ("null", "Null", "NULL", "~")


class RecipeParser(HfArgumentParser):
    """
    The parser of transformers' scripts, on which TRL's is built, for a command line and the recipe that it names.

    `TrlParser` adds to it a reader of YAML, which does not fit. It sets the environment variables that a file names,
    and it puts the values of the file into the dataclasses unchecked, so that a list as the learning rate fails in the
    optimizer. Here each value of a recipe is converted as the same text on a command line is.

    Args:
        groups: The dataclasses of a run.
    """

    def __init__(self, groups: Iterable[type]) -> None:
        super().__init__(groups, add_help=False, allow_abbrev=False)
        # A list, to refuse a second one, in place of which argparse would forget the first.
        self.add_argument("--config", action="append")

        # argparse would take -1e-5 for the name of an option.
        self._negative_number_matcher = re.compile(r"-\.?\d")

        self._fields: dict[str, Field] = {}
        self._hints: dict[str, Any] = {}
        for group in self.dataclass_types:
            self._fields |= {field.name: field for field in fields(group)}
            self._hints |= get_type_hints(group)

        for action in self._actions:
            # Only what the user sets is in the result. The dataclasses know their defaults.
            action.default = argparse.SUPPRESS
            if action.type is string_to_bool:
                action.type = _switch
                action.nargs = "?"
                action.const = True
            elif action.dest in _SWITCH_OR_TEXT:
                action.type = _switch_or_text
            elif action.dest.endswith("_kwargs"):
                action.type = _json_mapping
            elif action.dest == "pad_to_multiple_of":
                action.type = _number_or_auto
            elif action.dest == "reward_clip_range":
                action.type = _json_pair

    def read(self, argv: Sequence[str]) -> dict[str, Any]:
        """
        Read a command line and the recipe that its `--config` names; the command line wins.

        Args:
            argv: The command line, without the program's name.

        Returns:
            The fields that are set, with their values.

        Raises:
            ValueError: for an unknown key or a wrong value, which it names.
            FileNotFoundError: if there is no such recipe.
        """
        words, nulls = self._without_nulls(argv)
        options = self._parse(words) | nulls
        recipes = options.pop("config", [])
        if len(recipes) > 1:
            raise ValueError(f"--config must be there once, got {', '.join(recipes)}: name one in the other's base:.")
        if not recipes or not recipes[0]:
            return options
        return self.convert(read_recipe(Path(recipes[0]))) | options

    def convert(self, recipe: Mapping[str, Any]) -> dict[str, Any]:
        """
        Convert the values of a recipe to the types of their fields: `1e-5`, which is text here, becomes a number.

        Args:
            recipe: The content of a recipe, from [`read_recipe`].

        Raises:
            ValueError: for an unknown key, or a value that is of a wrong type, NaN, infinite, or negative where that
                makes no sense.
        """
        # First: argparse would report an unknown key as an option, with its value, which may be a secret.
        check_keys(recipe, self._fields)

        options: list[str] = []
        others: dict[str, Any] = {}
        for name, value in recipe.items():
            if isinstance(value, str):
                # One word, because a text may begin with a dash.
                options.append(f"--{name}={value}")
            else:
                others[name] = self._checked(name, value)
        return others | self._parse(options)

    def build(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """
        Make the dataclasses from the fields that are set.

        Args:
            values: From [`read`].

        Raises:
            ValueError: with the message of the dataclass that refuses its values, whatever kind of error it raises.
        """
        try:
            return self.parse_dict(dict(values))
        except NameError:
            # A mistake in code, not in a value.
            raise
        except Exception as error:
            raise ValueError(_message(error, values)) from error

    def error(self, message: str) -> NoReturn:
        """Called by argparse for a wrong value. Its own method would print all options, and end the process."""
        # "argument --max_steps/--max-steps: invalid ...", also for a value of the recipe.
        raise ValueError(re.sub(r"^argument --(\w+)\S*: ", r"\1: ", message))

    def _without_nulls(self, argv: Sequence[str]) -> tuple[list[str], dict[str, None]]:
        """
        Take `--key null` and `--key=null` out of a command line, whose words argparse converts to the field's type.

        Args:
            argv: The command line.

        Returns:
            The other words, and the fields that null sets: of an option that is there twice the last value counts.
        """
        words: list[str] = []
        nulls: dict[str, None] = {}
        left = list(argv)
        while left:
            word = left.pop(0)
            option, has_value, value = word.partition("=")
            name = option.removeprefix("--").replace("-", "_")
            if not option.startswith("--") or name not in self._fields:
                words.append(word)
                continue

            nulls.pop(name, None)
            if not has_value and left:
                value = left[0]
            if value not in _NULLS:
                words.append(word)
                continue

            if not has_value:
                left.pop(0)
            nulls[name] = self._checked(name, None)
        return words, nulls

    def _parse(self, words: Sequence[str]) -> dict[str, Any]:
        """The fields that options set."""
        self._refuse_none(words)
        # Not `parse_args`, which would refuse unknown keys without a suggestion.
        namespace, others = self.parse_known_args(words)

        for word in others:
            if word.startswith("--"):
                name = word.removeprefix("--").partition("=")[0]
                check_keys([name.replace("-", "_")], self._fields)
        if others:
            raise ValueError(f"{others[0]!r} is neither an option nor the value of one: write --key value.")

        values = vars(namespace)
        for name, value in values.items():
            if name in self._fields:
                _check_finite(name, value)
                _check_sign(self._fields[name], value)
        return values

    def _refuse_none(self, words: Sequence[str]) -> None:
        """Refuse Python's word for null: in a text field, such as the system prompt, it would be a text."""
        for place, word in enumerate(words):
            option, has_value, value = word.partition("=")
            if not has_value and place + 1 < len(words):
                value = words[place + 1]

            name = option.removeprefix("--").replace("-", "_")
            # Where another value is the default, as in `quant_scheme`, the word may have a meaning.
            may_be_null = name in self._fields and self._fields[name].default is None
            if option.startswith("--") and may_be_null and value.lower() == "none":
                raise ValueError(f"{name} must be a value or null, got {value!r}: write null for no value.")

    def _checked(self, name: str, value: Any) -> Any:
        """Check a list, a mapping or null, which argparse cannot convert, by the type of the field."""
        _check_finite(name, value)
        # transformers has defaults of None in fields whose type does not allow it.
        if value is None and self._fields[name].default is None:
            return None

        choices = self._fields[name].metadata.get("choices")
        if choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}.")

        config = ConfigDict(allow_inf_nan=False, coerce_numbers_to_str=True, arbitrary_types_allowed=True)
        try:
            return TypeAdapter(self._hints[name], config=config).validate_python(value)
        except ValidationError as error:
            # For each type that a field may have; several may have the same reason.
            reasons = dict.fromkeys(detail["msg"].removeprefix("Input should be ") for detail in error.errors())
            shown = "null" if value is None else repr(redact(value, name))
            raise ValueError(f"{name} must be {', or '.join(reasons)}, got {shown}.") from None


def check_keys(keys: Iterable[Any], known: Iterable[str]) -> None:
    """
    Refuse unknown keys.

    Args:
        keys: The keys of a recipe.
        known: All keys that exist.

    Raises:
        ValueError: for the first unknown key, with the nearest known one.
    """
    known = list(known)
    for key in keys:
        if key in known:
            continue
        message = f"{key} is not a key of a recipe."
        nearest = difflib.get_close_matches(str(key), known, n=1)
        if nearest:
            message += f" Did you mean {nearest[0]}?"
        raise ValueError(message)


def _check_finite(name: str, value: Any) -> None:
    """Refuse NaN and infinity, also within lists and mappings."""
    items: Iterable[Any] = ()
    if isinstance(value, list | tuple):
        items = value
    if isinstance(value, dict):
        items = value.values()
    for item in items:
        _check_finite(name, item)

    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value}.")


def _check_sign(field: Field, value: Any) -> None:
    """Refuse a number that is negative where that makes no sense."""
    if not isinstance(value, int | float) or value >= 0 or field.name in MAY_BE_NEGATIVE:
        return

    has_negative_default = isinstance(field.default, int | float) and field.default < 0
    if not has_negative_default:
        raise ValueError(f"{field.name} must not be negative, got {value}.")


def _message(error: Exception, values: Mapping[str, Any]) -> str:
    """The message of an error, with the field that names the missing file, if that is the error."""
    missing = getattr(error, "filename", None)
    for name, value in values.items():
        if missing is not None and value == str(missing):
            return f"{name}={value!r}: {error}"
    return str(error)


def _switch(text: str) -> bool:
    """The boolean that a text means, for YAML or transformers."""
    return string_to_bool(_SWITCHES.get(text.lower(), text))


def _switch_or_text(text: str) -> bool | str:
    """The boolean that a text means for YAML, or the text."""
    return _SWITCHES.get(text.lower(), text)


def _json_mapping(text: str) -> str:
    """A text that transformers reads as JSON."""
    # It leaves another text as it is, and fails where it first uses it.
    if not text.startswith("{"):
        raise argparse.ArgumentTypeError(f"must be a mapping, or its JSON, got {text!r}")
    return text


def _json_pair(text: str) -> tuple[float, ...]:
    """Two numbers, as JSON."""
    # transformers would make a tuple of the characters.
    try:
        pair = json.loads(text)
    except json.JSONDecodeError:
        pair = None
    if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(value, int | float) for value in pair):
        raise argparse.ArgumentTypeError(f"must be two numbers, such as [-1, 1], got {text!r}")
    return tuple(map(float, pair))


def _number_or_auto(text: str) -> int | str:
    """A number, or TRL's word for "find one"."""
    return text if text == "auto" else int(text)
