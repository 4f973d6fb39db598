"""Completions on disk, a line per problem as it is finished, so that a second call goes on where the first one stopped."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .suites import Problem


@dataclass(frozen=True)
class Completion:
    """One answer: its text without special tokens, its length in tokens, and whether the length limit cut it off."""

    text: str
    tokens: int
    cut_off: bool


class CompletionStore(dict[tuple[int, ...], list[Completion]]):
    """
    The completions of one model under one set of settings, by prompt ids, as `completions.jsonl` in a folder.

    The folder is new, empty, or of an earlier evaluation with equal `settings`, which are all that decides what is sampled;
    otherwise `ValueError`.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        super().__init__()
        self.folder, self.settings = folder, settings
        self._file, described = folder / "completions.jsonl", folder / "settings.json"
        folder.mkdir(parents=True, exist_ok=True)
        if not any(folder.iterdir()) or (described.is_file() and not self._file.is_file()):
            described.write_text(json.dumps(settings, indent=2) + "\n")
        if not described.is_file():
            raise ValueError(f"--output_dir {folder} is not empty and not of an earlier evaluation. Use a new folder.")
        stored = json.loads(described.read_text())
        differing = [name for name in stored | settings if stored.get(name) != settings.get(name)]
        if differing:
            name = differing[0]
            raise ValueError(
                f"--output_dir {folder} holds completions with other {', '.join(differing)} ({name}: {stored.get(name)!r} "
                f"there, {settings.get(name)!r} now). Use a new folder: settings are never mixed."
            )
        if self._file.is_file():
            self._read()

    def add(self, problem: Problem, completions: list[Completion]) -> None:
        """Append all completions of a problem."""
        row = {"prompt": problem.prompt, "prompt_ids": problem.prompt_ids}
        with self._file.open("a") as file:
            file.write(json.dumps(row | {"completions": [asdict(c) for c in completions]}) + "\n")
        self[problem.prompt_ids] = completions

    def _read(self) -> None:
        content = self._file.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):  # the call before was killed within a line
            self._file.write_bytes(whole)
        for row in map(json.loads, whole.splitlines()):
            self[tuple(row["prompt_ids"])] = [Completion(**c) for c in row["completions"]]
