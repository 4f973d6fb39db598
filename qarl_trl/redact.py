"""One redaction of secrets, for all that is printed, logged or written beside a run."""

import os
import re
from collections.abc import Mapping
from typing import Any


HIDDEN = "<hidden>"
# "token" and "key" as whole words, so that `max_tokens` and `num_key_value_heads` stay; the other words anywhere.
_NAME = re.compile(r"(?<![a-z])(api_?)?(token|key)(?![a-z])|secret|passw|authorization|credential|header")
_SHORTEST = 6  # of a value of the environment: "1" or "true" of a variable with such a name stands in other texts, too


def is_secret(name: str) -> bool:
    """Whether something of this name, a field, an option, a header or a variable, holds a secret."""
    return bool(_NAME.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()))  # accessToken


def redact(value: Any, name: str = "") -> Any:
    """
    A copy of `value`, as deep as its mappings and lists go, without its secrets.

    A text is hidden if its `name` or key is a secret's. A value of an environment variable of such a name is hidden wherever
    it stands in a text. Numbers and booleans are no secrets (`token: true` is "the one I am logged in with").
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
