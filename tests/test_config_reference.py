"""docs/config_reference.md is what `tests/config_reference.py` writes, and has every field."""

from dataclasses import fields

import config_reference
import pytest
from config_reference import PAGE, SECTIONS, page

from qarl_trl.methods import DISTILL, QARL, RLOO, SFT
from qarl_trl.train import _groups


def keys_of_the_page() -> set[str]:
    """The first cell of each row."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return {row.split("`")[1] for row in rows}


def test_the_page_is_what_the_script_writes():
    assert PAGE.read_text() == page(), "Run python tests/config_reference.py"


@pytest.mark.parametrize("method", [QARL, SFT, RLOO, DISTILL], ids=["train", "sft", "rloo", "distill"])
def test_every_key_that_the_package_adds_to_a_command_is_there(method):
    added = set()
    for group in _groups(method):
        for config in group.__mro__:
            if config.__module__.startswith("qarl_trl"):
                added |= set(config.__annotations__) & {field.name for field in fields(group)}

    assert added
    assert added <= keys_of_the_page()


def test_a_new_help_text_is_noticed(monkeypatch):
    """Control: a page without one of the classes is another page."""
    monkeypatch.setattr(config_reference, "SECTIONS", dict(list(SECTIONS.items())[1:]))

    assert PAGE.read_text() != page()
