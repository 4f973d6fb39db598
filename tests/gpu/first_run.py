"""Thirty minutes on one GPU: what no CPU can show, in three parts of at most nine minutes (README.md beside this file)."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[2]
FOUND = ("ok", "failed", "timeout", "skipped-for-budget")
# Of a stage's output: what is kept in the log, and what its line says of a failure.
LOG_BYTES, TAIL_BYTES = 400_000, 3_000
# A stage is not started with less than this share of its limit left; the tests, which go as far as they get, with this.
WORTH_STARTING, WORTH_TESTING_S = 0.4, 60
ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Kernels that vLLM chose are named in the log.
    "VLLM_LOGGING_LEVEL": "INFO",
    # The engine in the stage's own process: reachable, and gone with it.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


@dataclass(frozen=True)
class Stage:
    """One measurement in a process of its own: `function` is `module:name` in this folder, `limit_s` its seconds."""

    part: int
    name: str
    limit_s: int
    function: str
    settings: dict[str, Any] = field(default_factory=dict)


def slice_of(layers: int) -> str:
    """The stage that trains so many of the layers of Qwen3-30B-A3B."""
    return f"step-MoE-{layers}-layers"


_EAGER, _GRAPHS = {"graphs": False}, {"graphs": True, "sleep": True, "family": "Qwen2"}
_MOE = {"shape": "qwen3-30b-a3b", "scheme": "W4A16"}
# The most valuable first: the limits of part 1 add up to twice its budget, and what is left of that decides.
STAGES = [
    Stage(1, "environment", 60, "kernels:environment"),
    Stage(1, "quantizer", 90, "kernels:quantizer"),
    Stage(1, "layers", 90, "kernels:layers"),
    Stage(1, "toy-W4A16", 120, "toy_engines:toy", {"scheme": "W4A16"} | _EAGER),
    Stage(1, "dequantizer", 60, "kernels:dequantizer"),
    Stage(1, "toy-W4A16-graphs-sleep", 120, "toy_engines:toy", {"scheme": "W4A16"} | _GRAPHS),
    Stage(1, "toy-FP8", 120, "toy_engines:toy", {"scheme": "FP8_DYNAMIC"} | _EAGER),
    Stage(1, "toy-MoE-W4A16", 120, "toy_engines:toy", {"scheme": "W4A16", "experts": 8} | _EAGER),
    Stage(1, "toy-FP8-graphs-sleep", 120, "toy_engines:toy", {"scheme": "FP8_DYNAMIC"} | _GRAPHS),
    Stage(
        1,
        "toy-MoE-W4A16-graphs-sleep",
        120,
        "toy_engines:toy",
        {"scheme": "W4A16", "experts": 8, **_GRAPHS, "family": "Qwen3"},
    ),
    Stage(2, "step-8B-QaRL", 170, "shapes:step", {"shape": "qwen3-8b", "scheme": "W4A16"}),
    Stage(2, "step-8B-bf16", 170, "shapes:step", {"shape": "qwen3-8b", "scheme": None}),
    Stage(2, "step-8B-rollout-only", 170, "shapes:step", {"shape": "qwen3-8b", "scheme": "W4A16", "learner": False}),
    Stage(2, "adamw-8B", 60, "shapes:adamw"),
    Stage(2, "step-8B-FP8", 170, "shapes:step", {"shape": "qwen3-8b", "scheme": "FP8_DYNAMIC"}),
    Stage(3, "decode-8B-bf16", 120, "shapes:decode", {"scheme": None}),
    Stage(3, "decode-8B-W4A16", 120, "shapes:decode", {"scheme": "W4A16"}),
    Stage(3, "decode-8B-FP8", 120, "shapes:decode", {"scheme": "FP8_DYNAMIC"}),
    *(Stage(3, slice_of(n), 120, "shapes:step", _MOE | {"layers": n}) for n in (2, 4)),
    Stage(3, "pytest", 540, "kernels:remaining_tests"),
]


# The parent ---------------------------------------------------------------------------------------------------------


def main() -> int:
    args = arguments()
    if args.stage:
        from gpu.measure import run_in_this_process

        stage = Stage(**json.loads(args.stage))
        run_in_this_process(load(stage), stage.settings, args.figures, args.dry, args.limit)
    names = args.only.split(",") if args.only else [s.name for s in STAGES if args.part in (None, s.part)]
    unknown = set(names) - {s.name for s in STAGES}
    if unknown:
        sys.exit(f"--only must name stages of {[s.name for s in STAGES]}, got {sorted(unknown)}")
    args.out.mkdir(parents=True, exist_ok=True)
    rows = run_stages([s for s in STAGES if s.name in names], args)
    print(table(rows), f"commit {rows[0]['commit']}", sep="\n", flush=True)
    return 0 if all(row["status"] == "ok" for row in rows) else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", type=int, choices=(1, 2, 3), help="default: all stages")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "first_run")), help="folder of results")
    parser.add_argument("--budget", type=float, default=540, help="seconds for all stages together")
    parser.add_argument("--only", help="names of stages, with commas, in place of a part")
    parser.add_argument("--dry", action="store_true", help="toy sizes on the CPU: that everything runs, no figures")
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    parser.add_argument("--figures", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, help=argparse.SUPPRESS)
    return parser.parse_args()


def run_stages(stages: list[Stage], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run each while the budget lasts. One JSON line a stage in `part1.jsonl`, all their output in `part1.log`."""
    end, rows = time.monotonic() + args.budget, []
    name, commit = f"part{args.part}" if args.part else "stages", commit_of_tree()
    for stage in stages:
        left = end - time.monotonic() - 5
        if left < (WORTH_TESTING_S if stage.name == "pytest" else WORTH_STARTING * stage.limit_s):
            row = {"stage": stage.name, "status": "skipped-for-budget", "seconds": 0.0, "figures": {}, "error": ""}
        else:
            row = run_stage(stage, min(stage.limit_s, left), args.dry, args.out / f"{name}.log")
        rows.append(row := row | {"commit": commit})
        write_down(row, args.out / f"{name}.jsonl")
        print(describe_scheme(row), flush=True)
        measured = {row["stage"]: row["figures"] for row in rows if row["status"] == "ok"}
        if stage.name == slice_of(4) and measured.keys() >= {slice_of(2), slice_of(4)}:
            whole = extrapolated(measured[slice_of(2)], measured[slice_of(4)], 48)
            line = {"stage": slice_of(48), "status": "extrapolated", "figures": whole, "commit": commit}
            write_down(line, args.out / f"{name}.jsonl")
            print(json.dumps(line), flush=True)
    return rows


def write_down(row: dict[str, Any], file: Path) -> None:
    with open(file, "a") as stream:
        stream.write(json.dumps(row) + "\n")


def extrapolated(two: dict[str, Any], four: dict[str, Any], layers: int) -> dict[str, dict[str, float]]:
    """`t(n) = t(2) + (n - 2) / 2 * (t(4) - t(2))` of each piece of a step that both have: median seconds, peak GiB."""
    found: dict[str, dict[str, float]] = {}
    for kind in ("seconds", "peak_gib"):
        a, b = ({piece: median(value) for piece, value in run.get(kind, {}).items()} for run in (two, four))
        found[kind] = {p: round(a[p] + (layers - 2) / 2 * (b[p] - a[p]), 4) for p in a if p in b}
    return found


def median(value: float | list[float]) -> float:
    return statistics.median(value) if isinstance(value, list) else value


def run_stage(stage: Stage, limit_s: float, dry: bool, log: Path) -> dict[str, Any]:
    """The stage in a session of its own, killed whole at the limit; what it recorded until then counts."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        figures, output = Path(folder) / "figures.jsonl", Path(folder) / "output"
        command = [sys.executable, "-X", "faulthandler", "-m", "gpu.first_run"]
        command += ["--stage", json.dumps(asdict(stage)), "--figures", str(figures), "--limit", str(limit_s)]
        command += ["--dry"] if dry else []
        with open(output, "wb") as stream:
            process = subprocess.Popen(
                command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True, env=environment(), cwd=folder
            )
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                kill_session(process.pid)
                process.wait()
        text = output.read_bytes()
        found = merged(figures.read_text()) if figures.exists() else {}
    status = "timeout" if code is None else "ok" if code == 0 else "failed"
    error = "" if status == "ok" else f"exit code {code}\n" + text[-TAIL_BYTES:].decode(errors="replace")
    seconds = round(time.monotonic() - start, 1)
    with open(log, "ab") as file:
        file.write(f"\n##### {stage.name}: {status} after {seconds} s\n".encode() + text[-LOG_BYTES:])
    return {"stage": stage.name, "status": status, "seconds": seconds, "figures": found, "error": error}


def kill_session(session: int, patience_s: float = 10) -> None:
    """Kill every process of a session. A process group would not do: the tests give their engines groups of their own."""
    end = time.monotonic() + patience_s
    while (found := living(session)) and time.monotonic() < end:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def living(session: int) -> list[int]:
    """The processes of a session, without those that only wait to be counted by a parent."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # gone meanwhile
            state, _, _, its_session = file.read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == session and state not in "ZX":
                found.append(int(file.parent.name))
    return found


def merged(lines: str) -> dict[str, Any]:
    """The figures of a stage, those of one case together. A line that a kill cut off is left out."""
    found: dict[str, Any] = {}
    for line in lines.splitlines():
        with suppress(json.JSONDecodeError):
            for name, value in json.loads(line).items():
                both = isinstance(value, dict) and isinstance(found.get(name), dict)
                found[name] = found[name] | value if both else value
    return found


def commit_of_tree() -> str:
    """`QARL_COMMIT`, for a copy without `.git`; otherwise git's, with "-dirty" when a file differs."""
    found = os.environ.get("QARL_COMMIT", "")
    if not found:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
        with suppress(OSError):
            found = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return found or "unknown"


def environment() -> dict[str, str]:
    """That of this process, with the package, the tests and the settings above, which the caller's come before."""
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    return ENVIRONMENT | dict(os.environ) | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def load(stage: Stage) -> Any:
    module, name = stage.function.split(":")
    return getattr(importlib.import_module(f"gpu.{module}"), name)


def describe_scheme(row: dict[str, Any]) -> str:
    """A stage, its figures and the end of what failed."""
    lines = [f"{row['stage']:28} {row['status']:20} {row['seconds']:6.1f} s"]
    lines += [f"    {name}: {json.dumps(value)}" for name, value in row["figures"].items() if value not in ("", [])]
    return "\n".join(lines + [f"    | {line[:300]}" for line in row["error"].splitlines()[-4:]])


def table(rows: list[dict[str, Any]]) -> str:
    """One line a stage, and how many of each status."""
    lines = [
        f"{row['stage']:28} {row['status']:20} {row['seconds']:6.1f} s  {row['figures'].get('checks', '')}"
        for row in rows
    ]
    counts = {status: sum(row["status"] == status for row in rows) for status in FOUND}
    return "\n".join(["", *lines, ", ".join(f"{count} {status}" for status, count in counts.items() if count)])


if __name__ == "__main__":
    sys.exit(main())
