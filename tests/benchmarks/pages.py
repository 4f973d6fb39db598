"""Tables of the pages that scripts in benchmarks/ write, against what the scripts make of the committed figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any


ROOT = Path(__file__).parents[2]


def table_of(page: str, name: str) -> str:
    """The table that stands between the two marks of its name, as it is committed."""
    _, _, after = (ROOT / page).read_text().partition(f"<!-- {name} -->\n")
    shown, _, _ = after.partition("\n<!-- end -->")
    return shown


def assert_tables_are_made(script: Any, folder: Path) -> None:
    """Each table of the pages of a script is what it makes now, and each that it makes is in a page."""
    made = script.tables()
    texts = []
    for page in script.PAGES:
        text = page.read_text()
        texts.append(text)

        # In a copy: a test that wrote into the page itself would make it right.
        copy_of_page = folder / page.name
        copy_of_page.write_text(text)
        script.put_tables(copy_of_page, made)
        assert copy_of_page.read_text() == text, page

    for mark in made:
        assert mark in "".join(texts)
