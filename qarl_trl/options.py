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

    The group is here and not beside the text in the field's metadata: transformers' `HfArgumentParser` gives all of
    that to `argparse`, which knows no groups.

    Attributes:
        group: One of [`GROUPS`].
    """

    group: str

    def __new__(cls, text: str, group: str) -> Help:
        help = super().__new__(cls, text)
        help.group = group
        return help


def option(group: str, *, help: str, **default: Any) -> Any:
    """
    A field that is a key of recipes, for any of our dataclasses: without a group `--help` would lack it.

    Args:
        group: One of [`GROUPS`].
        help: Its text in `--help`.
        default: `default` or `default_factory`, as for `dataclasses.field`.
    """
    return field(metadata={"help": Help(help, group)}, **default)
