"""Which vLLM is installed: that for CPUs or that for GPUs."""

from __future__ import annotations

from functools import cache

from trl.import_utils import is_vllm_available


@cache
def is_cpu_engine() -> bool:
    """Whether the installed vLLM runs on the CPU."""
    if not is_vllm_available():
        return False

    from vllm.platforms import current_platform

    return current_platform.is_cpu()
