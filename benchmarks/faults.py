"""
Kills training at random moments (SIGKILL), starts it again each time, and compares how it ends with a run that nothing interrupted.

Runs alternate between vLLM's engine and transformers' generation; each is killed five times and then left alone. Master weights,
optimizer state and low-bit tensors must be equal bit for bit, and after each kill every checkpoint in its place must be whole.
The result file is written after every run, and a second call goes on from it.
"""

import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

import common


sys.path.insert(0, str(common.ROOT / "tests"))
from slow.kills import PHASES, random_kill, run
from slow.toys import save_model

from qarl_trl.checkpoints.folder import damage


KILLS_PER_RUN = 5


def interrupted_run(model: str, folder: Path, engine: bool, index: int, expected: dict[str, str]) -> dict:
    """One run with its kills; `equal` says whether it ended as `expected`."""
    kills, rng = [], random.Random(index)
    while len(kills) < KILLS_PER_RUN:
        found = run(model, folder, engine, random_kill(rng, engine))
        if not found["killed"]:
            break
        damaged = [path.name for path in folder.glob("checkpoint-*") if damage(path)]
        kills.append({key: found[key] for key in ("phase", "step", "resumed")} | {"damaged": damaged})
    last = run(model, folder, engine)
    return {"run": index, "engine": engine, "equal": last["digests"] == expected, "kills": kills}


def main() -> None:
    args = common.arguments(__doc__, kills=(30, 2, "kills in all"), seed=(0, 0, "of the moments"))
    file = common.result_file("faults", args.quick)
    runs = json.loads(file.read_text())["runs"] if file.exists() else []
    with tempfile.TemporaryDirectory() as scratch:
        model = save_model(Path(scratch) / "model", layers=1)
        expected = {}
        while sum(len(found["kills"]) for found in runs) < args.kills:
            engine = len(runs) % 2 == 1
            if engine not in expected:
                expected[engine] = run(model, Path(scratch) / f"straight-{engine}", engine)["digests"]
            folder = Path(scratch) / "run"
            runs.append(interrupted_run(model, folder, engine, args.seed + len(runs), expected[engine]))
            shutil.rmtree(folder)
            write(args, runs)


def write(args, runs: list[dict]) -> None:
    kills = [(found["engine"], kill) for found in runs for kill in found["kills"]]
    by_phase = Counter((engine, kill["phase"]) for engine, kill in kills)
    rows = [
        {"killed in": phase, "engine": by_phase[True, phase], "without": by_phase[False, phase]} for phase in PHASES
    ]
    damaged = sum(bool(kill["damaged"]) for _, kill in kills)
    headlines = [
        f"{sum(found['equal'] for found in runs)} of {len(runs)} runs ended as the uninterrupted one, after {len(kills)} kills",
        f"{damaged} kills left a damaged checkpoint in its place",
    ]
    common.report("faults", args, headlines, rows, start_load=0.0, runs=runs)


if __name__ == "__main__":
    main()
