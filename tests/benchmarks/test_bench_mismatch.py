"""The tables of mismatches in the docs are those of the committed figures."""

from __future__ import annotations

import json
from pathlib import Path

import bench_mismatch
import pytest


ROOT = Path(__file__).parents[2]
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
    _, _, after = (ROOT / page).read_text().partition(f"<!-- {name} -->\n")
    shown, _, _ = after.partition("\n<!-- end -->")

    assert shown == table(FIGURES)
