"""torch's allocator on a GPU: segments that grow, where vLLM's engine allows them.

A micro-batch of other lengths leaves gaps in segments of fixed size, which count as used. A segment that grows has
room for every length, so less memory is lost in fragments.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any


# The names under which torch reads the settings of its allocator, when it first allocates memory of a GPU.
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
GROWING = "expandable_segments:True"


def let_segments_grow(values: Mapping[str, Any]) -> bool:
    """
    Set torch's allocator to segments that grow. Call it before torch allocates memory of a GPU.

    It changes nothing if the user has set the allocator, on a CPU, or if the engine of the run does not allow them.

    Args:
        values: The fields of `QaRLConfig` that the user set; for the others their defaults count.

    Returns:
        Whether it was set.
    """
    is_set_by_the_user = any(name in os.environ for name in VARIABLES)
    if is_set_by_the_user or values.get("use_cpu", False) or not _engine_allows_it(values):
        return False

    os.environ[VARIABLES[0]] = GROWING
    return True


def _engine_allows_it(values: Mapping[str, Any]) -> bool:
    """Whether segments may grow beside the engine of a run."""
    # A server's engine is a process of its own.
    has_engine_here = values.get("use_vllm", False) and values.get("vllm_mode", "colocate") == "colocate"
    if not has_engine_here:
        return True

    # The memory pool of sleep mode cannot grow. vLLM switches the setting off around it, and 0.26 finds it under one
    # of its names only; that was read, not run.
    sleeps = values.get("vllm_enable_sleep_mode", False)
    # The ranks of an engine share buffers by handles, which such memory does not have
    # (https://github.com/vllm-project/vllm/issues/42609): the process ends without an error of Python.
    has_several_ranks = values.get("vllm_tensor_parallel_size", 1) > 1
    return not sleeps and not has_several_ranks
