"""The one redaction of secrets, for everything that we print, log or write beside a run."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any


HIDDEN = "<hidden>"
# "token" and "key" only as whole words, so that `max_tokens` and `num_key_value_heads` stay; the other words anywhere.
_NAME = re.compile(r"(?<![a-z])(api_?)?(token|key)(?![a-z])|secret|passw|authorization|credential|header")
# Before an upper-case letter in a name: accessToken.
_NEXT_WORD = re.compile(r"(?<=[a-z])(?=[A-Z])")
# Characters of a variable's value. Shorter values ("1", "true") also occur in other texts.
_SHORTEST = 6


def is_secret(name: str) -> bool:
    """
    Whether a field, option, header or variable holds a secret.

    Args:
        name: Its name, in any case.
    """
    words = _NEXT_WORD.sub("_", name).lower()
    return bool(_NAME.search(words))


def redact(value: Any, name: str = "") -> Any:
    """
    Copy a value without its secrets.

    Hides a text whose name or key is that of a secret. Hides the value of an environment variable with such a name,
    wherever it occurs in a text. Numbers and booleans are no secrets (`token: true` means "the one I am logged in
    with").

    Args:
        value: Mappings and sequences are copied deep, other values than text stay as they are.
        name: The name of the field that holds the value.
    """
    if isinstance(value, Mapping):
        return {redact(key): redact(content, f"{name} {key}") for key, content in value.items()}
    if isinstance(value, list | tuple | set):
        return [redact(content, name) for content in value]
    if not isinstance(value, str | bytes):
        return value

    if value and is_secret(name):
        return HIDDEN
    if isinstance(value, bytes):
        return value

    # A token also stands in URLs, in command lines and in messages of errors.
    for variable, secret in os.environ.items():
        if len(secret) >= _SHORTEST and is_secret(variable):
            value = value.replace(secret, HIDDEN)
    return value
