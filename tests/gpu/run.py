"""A stage of `first_run.py` in its process: its device, its folder, and figures that survive a kill."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


GIB = 2**30


class Run:
    """
    What a stage measures with, and where it writes.

    Args:
        figures: The file that gets the figures, one JSON object a line.
        dry: Toy sizes on a CPU.
        folder: For models and output.
    """

    def __init__(self, figures: str, dry: bool, folder: str) -> None:
        if not dry and not torch.cuda.is_available():
            raise RuntimeError("No CUDA device. With --dry the stages run on a CPU in toy sizes.")

        self.dry = dry
        self.device = torch.device("cpu" if dry else "cuda")
        self.folder = Path(folder)
        self.checked = 0
        self.failed: list[str] = []
        self._figures = figures

    def record(self, **figures: Any) -> None:
        """Write figures at once: what a stage has found so far is kept if it is killed."""
        line = {}
        for name, value in figures.items():
            line[name.replace("_", " ")] = _short(value)
        # Opened and closed each time: a process that is killed loses what is not on disk.
        with open(self._figures, "a") as file:
            file.write(json.dumps(line) + "\n")

    def check(self, name: str, holds: Any) -> None:
        """Note whether something holds. The stage goes on, and fails at its end."""
        self.checked += 1
        if not holds:
            self.failed.append(name)

        held = self.checked - len(self.failed)
        self.record(checks=f"{held} of {self.checked} hold", do_not_hold=self.failed)

    def seconds(self, function: Callable[[], Any]) -> float:
        """Median seconds of five calls, after one that is not counted."""
        times = []
        for _ in range(6):
            start = time.perf_counter()
            function()
            # Kernels run on after the call that launched them.
            if not self.dry:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        # Kernels are compiled in the first one.
        return statistics.median(times[1:])

    def milliseconds(self, calls: list[Callable[[], Any]]) -> list[float]:
        """Median milliseconds of each call."""
        times = []
        for call in calls:
            times.append(1e3 * self.seconds(call))
        return times

    def used_gib(self) -> float:
        """Memory of the device in use by anyone; 0 on a CPU."""
        if self.dry:
            return 0.0
        free, total = torch.cuda.mem_get_info()
        return (total - free) / GIB


def _short(value: Any) -> Any:
    """Numbers to four digits, also inside; those that JSON has no word for as text."""
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {name: _short(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(_short, value))
    return value
