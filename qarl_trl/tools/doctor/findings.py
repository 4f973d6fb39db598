"""What a section found, and how it is printed."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap
from typing import NamedTuple


WIDTH = 100
OK, WARN, FAIL, SKIPPED, PLAIN = "ok", "warn", "FAIL", "-", ""


class Finding(NamedTuple):
    """One line: `SKIPPED` says why something was not looked at, `PLAIN` is a row of a table."""

    status: str
    name: str
    text: str


def render(title: str, findings: list[Finding]) -> Iterator[str]:
    """A section in at most `WIDTH` columns."""
    yield f"\n{title}"
    name_width = min(28, max((len(f.name) for f in findings), default=0))
    for status, name, text in findings:
        head = f"  {status:<5}{name:<{name_width}}  "
        first, *rest = wrap(text, WIDTH - len(head), break_long_words=True) or [""]
        yield (head + first).rstrip()
        yield from (" " * len(head) + line for line in rest)
