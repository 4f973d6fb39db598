"""The options of a command, with an example where arguments are missing."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn


_MISSING = "the following arguments are required: "


class CommandParser(argparse.ArgumentParser):
    """
    A parser that shows how to call its command if arguments are missing.

    Args:
        example: A whole command line.
        settings: Arguments of `argparse.ArgumentParser`. An option is not known by the beginning of its name, which
            may be a key of a recipe.
    """

    def __init__(self, *, example: str, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)
        self._example = example

    def error(self, message: str) -> NoReturn:
        """Called by argparse. Its own method prints all options before the message."""
        _, is_missing, names = message.partition(_MISSING)
        if not is_missing:
            super().error(message)
        self.exit(2, f"{self.prog}: missing {names}. For example: {self._example} (--help: all options)\n")
