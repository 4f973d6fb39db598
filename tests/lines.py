"""Lines of text: rows of JSON that a run reads, options of a command, and what it said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    """Write a JSON object a line, and return the path as an option takes it."""
    # With a line break after the last row too, as most programs write it.
    with path.open("w") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
    return str(path)


def additions(count: int) -> list[dict[str, str]]:
    """The problems "0 + 1", "1 + 1" and so on, with their answers."""
    rows = []
    for number in range(count):
        rows.append({"problem": f"{number} + 1", "answer": str(number + 1)})
    return rows


def lines_that_begin(text: str, beginning: str) -> list[str]:
    """The lines of a text that begin so. What libraries print stands in others."""
    lines = []
    for line in text.splitlines():
        if line.startswith(beginning):
            lines.append(line)
    return lines


def command_line(settings: dict[str, Any]) -> list[str]:
    """`--name value` of each setting, as a shell gives them."""
    words = []
    for name, value in settings.items():
        words += [f"--{name}", str(value)]
    return words
