"""The table of the FP8 cache in the docs is that of the committed figures."""

from __future__ import annotations

import json
from pathlib import Path

import bench_kv_cache


ROOT = Path(__file__).parents[2]


def test_the_table_of_the_docs_is_what_the_script_prints():
    results = json.loads(bench_kv_cache.FILE.read_text())
    _, _, after = (ROOT / "dev/numerics.md").read_text().partition("<!-- kv cache -->\n")
    shown, _, _ = after.partition("\n<!-- end -->")

    assert shown == bench_kv_cache.table(results)
    # Control: every cell was measured.
    assert results["cells"].keys() == bench_kv_cache.cells().keys()
