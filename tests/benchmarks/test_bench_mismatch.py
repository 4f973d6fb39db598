"""The tables of mismatches in the docs are those of the committed figures."""

from __future__ import annotations

import json

import bench_mismatch
import pytest

from .pages import ROOT, table_of


# Measured once and committed. A figure that was edited in the page by hand is in no file.
FIGURES = json.loads((ROOT / "benchmarks" / "results" / "bench_mismatch.json").read_text())


@pytest.mark.parametrize(
    ("page", "name", "table"),
    [
        ("dev/numerics.md", "mismatch", bench_mismatch.mismatch_table),
        ("dev/numerics.md", "lora", bench_mismatch.lora_table),
        ("dev/numerics.md", "sync check", bench_mismatch.sync_check_table),
    ],
)
def test_a_table_of_the_docs_is_what_the_script_prints(page, name, table):
    assert table_of(page, name) == table(FIGURES)
