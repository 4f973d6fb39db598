"""Check versions and devices."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator

import psutil
import torch

from ..._compat import installed_version, requirements, why_untested
from ...quant.scheme import gpu_generation
from ...rollout.cpu import cpu_flags, why_no_engine
from ..plan.items import GIB
from . import FAIL, OK, SKIPPED, WARN, Finding


def versions() -> Iterator[Finding]:
    """One line with the installed packages, and one for each whose version is outside the tested window."""
    found = {name: version for name in requirements() if (version := installed_version(name))}
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    yield Finding(OK, "versions", f"Python {platform.python_version()}, {text}")
    for name, needed in requirements().items():
        if reason := why_untested(needed):
            yield Finding(FAIL, name, reason)


def devices() -> Iterator[Finding]:
    """One line per GPU; without GPUs the CPU, and whether the engine runs on it."""
    for i in range(torch.cuda.device_count()):
        free, total = (size / GIB for size in torch.cuda.mem_get_info(i))
        generation = gpu_generation(torch.cuda.get_device_capability(i))
        text = f"{torch.cuda.get_device_name(i)}, {generation or 'older than Ampere: no bfloat16'}, {free:.0f} of {total:.0f} GiB free"
        yield Finding(OK if generation else FAIL, f"GPU {i}", text)
    if torch.cuda.device_count():
        return
    flags, cores = cpu_flags(), len(os.sched_getaffinity(0))
    yield Finding(SKIPPED, "GPU", "no CUDA device: also a recipe for GPUs is checked as a run on this CPU")
    memory = f"{psutil.virtual_memory().available / GIB:.0f} GiB available"
    yield Finding(OK, "CPU", f"{platform.machine()}, {cores} cores, {memory}")
    # Not a failure, because users check recipes for GPUs on laptops. The settings refuse a run that needs this engine.
    if (reason := why_no_engine(flags, platform.machine(), four_bits=True)) is None and "avx512_vnni" not in flags:
        reason = "without VNNI W8A8 sums saturate in oneDNN (docs/numerics.md); other schemes are exact"
    if reason:
        yield Finding(WARN, "engine on the CPU", reason)
