"""The one redaction of secrets, for everything that we print, log or write beside a run."""

import os
import re
from collections.abc import Mapping
from typing import Any


HIDDEN = "<hidden>"
# "token" and "key" only as whole words, so that `max_tokens` and `num_key_value_heads` stay; the other words anywhere.
_NAME = re.compile(r"(?<![a-z])(api_?)?(token|key)(?![a-z])|secret|passw|authorization|credential|header")
_SHORTEST = 6  # characters of a variable's value: shorter ones ("1", "true") also occur in other texts


def is_secret(name: str) -> bool:
    """Whether a field, option, header or variable of this name holds a secret."""
    return bool(_NAME.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()))  # accessToken


def redact(value: Any, name: str = "") -> Any:
    """
    Return a deep copy of `value` without secrets.

    Hides a text whose `name` or key is that of a secret. Hides the value of an environment variable with such a name wherever it
    occurs in a text. Numbers and booleans are no secrets (`token: true` means "the one I am logged in with").
    """
    if isinstance(value, Mapping):
        return {redact(key): redact(content, f"{name} {key}") for key, content in value.items()}
    if isinstance(value, list | tuple | set):
        return [redact(content, name) for content in value]
    if not isinstance(value, str | bytes):
        return value
    if value and is_secret(name):
        return HIDDEN
    known = {content for key, content in os.environ.items() if len(content) >= _SHORTEST and is_secret(key)}
    if isinstance(value, str):
        for content in known:
            value = value.replace(content, HIDDEN)
    return value
