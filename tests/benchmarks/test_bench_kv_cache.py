"""The table of the FP8 cache in the docs is that of the committed figures."""

from __future__ import annotations

import json

import bench_kv_cache

from .pages import table_of


def test_the_table_of_the_docs_is_what_the_script_prints():
    results = json.loads(bench_kv_cache.FILE.read_text())

    assert table_of("dev/numerics.md", "kv cache") == bench_kv_cache.table(results)
    # Control: every cell was measured.
    assert results["cells"].keys() == bench_kv_cache.cells().keys()
