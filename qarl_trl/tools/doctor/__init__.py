"""`qarl-trl doctor`: what can be known of a run before it costs anything, section by section."""

from __future__ import annotations

from typing import NamedTuple


OK, WARN, FAIL, SKIPPED = "ok", "warn", "FAIL", "-"


class Finding(NamedTuple):
    """One line: what was looked at, and what was found or is to be done. `SKIPPED` says why something was not looked at."""

    status: str
    name: str
    text: str

    def __str__(self) -> str:
        return f"  {self.status:<5}{self.name:<20}  {' '.join(self.text.split())}"
