"""`qarl-trl doctor`: check a run before it costs anything, section by section."""

from __future__ import annotations

from dataclasses import dataclass


# What a check may come to. They are also the words that the command prints.
OK = "ok"
WARN = "warn"
FAIL = "FAIL"
SKIPPED = "-"


@dataclass(frozen=True)
class CheckResult:
    """
    The result of one check, which `str` makes the line that the command prints.

    Attributes:
        status: `OK`, `WARN`, `FAIL` or `SKIPPED`.
        name: What was checked.
        text: What came out, or what to do. After `SKIPPED`: why it was not checked.
    """

    status: str
    name: str
    text: str

    def __str__(self) -> str:
        # The text may be an error message of several lines.
        one_line = " ".join(self.text.split())
        return f"  {self.status:<5}{self.name:<20}  {one_line}"
