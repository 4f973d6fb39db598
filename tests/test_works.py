"""docs/what_works.md is what `tests/works.py` writes, and the tests that it names are there."""

from itertools import chain

import pytest
from works import NOT_TRIED, PAGE, SECTIONS, files_with, page


ROWS = [*chain.from_iterable(SECTIONS.values())]


def test_the_page_is_the_table():
    assert PAGE.read_text() == page(), "Run python tests/works.py"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_a_row_names_one_test_unless_nobody_tried_it(row):
    assert (row.state == NOT_TRIED) == (not row.test)
    # Of two tests of one name the row does not say which it means, and the link may lead to the other.
    if row.test:
        assert len(files_with(row.test)) == 1


def test_a_test_that_is_gone_is_noticed():
    """Control."""
    assert files_with("test_the_page_is_the_table")
    assert not files_with("test_that_nobody_wrote")


def test_rows_are_there_once():
    names = [row.what for row in ROWS]

    # Control: the table was read.
    assert len(set(names)) == len(names) > 50
