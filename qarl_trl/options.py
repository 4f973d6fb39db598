"""Fields of settings, with their texts and groups in `--help`, which imports nothing that takes seconds."""

from __future__ import annotations

from dataclasses import field
from typing import Any


DATA = "Data"
LOSS = "Loss"
QUANTIZATION = "Quantization"
ENGINE = "Engine and memory"
# In the order of `--help`.
GROUPS = (DATA, LOSS, QUANTIZATION, ENGINE)


class Help(str):
    """
    The text of a field in `--help`, with its group.

    A key of its own in the field's metadata would be plainer. But transformers' `HfArgumentParser`, on which a user's
    `TrlParser` builds, hands all of the metadata to argparse, which refuses an unknown key.
    """

    group: str

    def __new__(cls, text: str, group: str) -> Help:
        """Args: the text; one of [`GROUPS`]."""
        described = super().__new__(cls, text)
        described.group = group
        return described

    def __getnewargs__(self) -> tuple[str, str]:
        # For copies and pickles: cloudpickle (Ray, submitit) sends a script's own config class with its fields.
        return str(self), self.group


def option(group: str, *, help: str, **default: Any) -> Any:
    """
    A field that is a key of recipes, for any of our dataclasses: without a group `--help` would lack it.

    Args:
        group: One of [`GROUPS`].
        help: Its text in `--help`.
        default: `default` or `default_factory`, as for `dataclasses.field`.
    """
    return field(metadata={"help": Help(help, group)}, **default)
