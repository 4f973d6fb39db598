"""docs/config_reference.md is what `tests/config_reference.py` writes, and has every setting of the package."""

import config_reference
import pytest
from config_reference import PAGE, SECTIONS, page
from configs import field_names
from lines import lines_that_begin

from qarl_trl.config import QaRLConfig
from qarl_trl.methods import DISTILL, QARL, RLOO, SFT, Method, groups_of


def keys_of_the_page() -> set[str]:
    """The first cell of each row."""
    return {row.split("`")[1] for row in lines_that_begin(PAGE.read_text(), "| `")}


def keys_of_the_package(method: Method) -> set[str]:
    """The keys of a command that are not TRL's."""
    keys = set()
    for group in groups_of(method):
        # A class adds the fields that it annotates. The classes above it may be TRL's.
        for config in group.__mro__:
            if config.__module__.startswith("qarl_trl"):
                # What is annotated and no field, such as a `ClassVar`, is no key.
                keys |= field_names(group) & set(config.__annotations__)
    return keys


def test_the_page_is_what_the_script_writes():
    assert PAGE.read_text() == page(), "Run python tests/config_reference.py"


def test_a_class_that_the_page_lacks_is_noticed(monkeypatch):
    """Control."""
    others = dict(SECTIONS)
    del others[QaRLConfig]
    monkeypatch.setattr(config_reference, "SECTIONS", others)

    assert PAGE.read_text() != page()


@pytest.mark.parametrize("method", [QARL, SFT, RLOO, DISTILL], ids=["train", "sft", "rloo", "distill"])
def test_every_key_that_the_package_adds_to_a_command_is_there(method):
    keys = keys_of_the_package(method)

    # Control: keys of both groups are read, and those of TRL are left out.
    assert {"quant_scheme", "dataset_name_or_path"} <= keys
    assert "learning_rate" not in keys
    assert keys <= keys_of_the_page()
