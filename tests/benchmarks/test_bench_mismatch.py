"""The tables of mismatches in the docs are those of the committed figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import bench_mismatch  # noqa: E402


FOUND = json.loads((ROOT / "benchmarks/results/bench_mismatch.json").read_text())


@pytest.mark.parametrize(
    "page, name", [("docs/numerics.md", "mismatch"), ("docs/numerics.md", "lora"), ("dev/numerics.md", "sync check")]
)
def test_a_table_of_the_docs_is_what_the_script_prints(page, name):
    shown = (ROOT / page).read_text().split(f"<!-- {name} -->\n")[1].split("\n<!-- end -->")[0]
    assert shown == getattr(bench_mismatch, f"{name.replace(' ', '_')}_table")(FOUND)
