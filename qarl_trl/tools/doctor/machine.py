"""Versions, devices and the arithmetic chosen on them."""

from __future__ import annotations

import importlib.metadata
import os
import platform

import psutil
import torch
from packaging.requirements import Requirement
from packaging.version import Version

from ..._compat import installed_version
from ...quant.scheme import gpu_generation
from ...rollout.cpu import cpu_flags, why_no_engine
from . import FAIL, OK, SKIPPED, WARN, Finding


GIB = 2**30


def versions() -> list[Finding]:
    """Installed packages in one line, and a line for each outside of the window that the package declares."""
    inside, outside = [f"Python {platform.python_version()}"], []
    for needed in map(Requirement, importlib.metadata.requires("qarl_trl") or []):
        if needed.marker is not None and "quality" in str(needed.marker):  # tools that no run needs
            continue
        version = installed_version(needed.name)
        if version is None:
            if needed.marker is None:  # of no extra
                outside.append(Finding(FAIL, needed.name, f"not installed; install {needed}"))
        # As the checks at import: a local build, a release candidate counts as its release.
        elif needed.specifier.contains(Version(version).base_version):
            inside.append(f"{needed.name} {version}")
        else:
            text = f"{version} was not tested; install {needed.name}{needed.specifier}"
            outside.append(Finding(FAIL, needed.name, text))
    return [Finding(OK, "versions", ", ".join(inside)), *outside]


def devices() -> list[Finding]:
    """GPUs, or the CPU with the arithmetic that engine and learner would have on it."""
    found = []
    for i in range(torch.cuda.device_count()):
        free, total = (size / GIB for size in torch.cuda.mem_get_info(i))
        generation = gpu_generation(torch.cuda.get_device_capability(i))
        text = f"{torch.cuda.get_device_name(i)}, {generation or 'older than Ampere: no bfloat16'}, {free:.0f} of {total:.0f} GiB free"
        found.append(Finding(OK if generation else FAIL, f"GPU {i}", text))
    if found:
        return found
    flags, cores = cpu_flags(), len(os.sched_getaffinity(0))
    reason = why_no_engine(flags, platform.machine())
    kernels = "AVX-512 kernels" + ("; AMX is left unused" if "amx_tile" in flags else "")
    found = [
        Finding(SKIPPED, "GPU", "no CUDA device"),
        Finding(
            OK,
            "CPU",
            f"{platform.machine()}, {cores} cores, {psutil.virtual_memory().available / GIB:.0f} GiB available",
        ),
        # No failure: a recipe for GPUs is looked at on laptops. The settings refuse a run that needs this engine.
        Finding(WARN if reason else OK, "engine on the CPU", reason or kernels),
    ]
    if not reason and "avx512_vnni" not in flags:
        text = "not there: W8A8 sums saturate in oneDNN (docs/numerics.md); other schemes are exact"
        found.append(Finding(WARN, "VNNI", text))
    return found
