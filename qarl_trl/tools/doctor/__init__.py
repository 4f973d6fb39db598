"""`qarl-trl doctor`: check a run before it costs anything, section by section."""

from __future__ import annotations

from typing import NamedTuple


OK, WARN, FAIL, SKIPPED = "ok", "warn", "FAIL", "-"


class Finding(NamedTuple):
    """One line: what was checked, and the result or what to do. `SKIPPED` gives the reason why it was not checked."""

    status: str
    name: str
    text: str

    def __str__(self) -> str:
        return f"  {self.status:<5}{self.name:<20}  {' '.join(self.text.split())}"
