"""Check that the machine's memory holds the model while it loads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import PretrainedConfig
from transformers.distributed.fsdp import is_fsdp_enabled

from .._compat.sharding import is_zero3
from ..quant.names import architecture_of
from .model import skeleton
from .types import RunSettings


GIB = 2**30
# The limit of this process's control group (v2), in bytes, or the word "max".
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def check_host_memory(config: PretrainedConfig, args: RunSettings) -> None:
    """
    Refuse a model that the processes of this machine cannot hold while it loads.

    The kernel would kill one of them without a message. All processes must call this. None returns before all have
    measured the free memory.

    Args:
        config: The model's unquantized config. A model that transformers does not know is not checked.
        args: Settings of the run.

    Raises:
        ValueError: with the memory that is needed and the memory that is free.
    """
    loads_in_pieces = args.frozen or is_zero3(args)
    if loads_in_pieces or architecture_of(config) is None:
        return

    # TRL's default. That of transformers is the checkpoint's dtype.
    dtype = (args.model_init_kwargs or {}).get("dtype") or "float32"
    copies = _copies_per_machine()
    parameters = sum(param.numel() for param in skeleton(config, args).parameters())

    needed = _bytes_per_parameter(dtype) * copies * parameters
    free = available_memory()
    # A process that begins to load takes memory, which the others would no longer measure as free.
    args.distributed_state.wait_for_everyone()

    if needed > free:
        raise ValueError(
            f"Loading needs {needed / GIB:.0f} GiB of host memory, and {free / GIB:.0f} GiB are free: "
            f"{copies} processes of this machine hold the model in {dtype}. "
            "With FSDP2 (recipes/accelerate/fsdp2.yaml) one of them does."
        )


def _bytes_per_parameter(dtype: Any) -> int:
    """Bytes of one number of a `torch.dtype`, or of a dtype's name."""
    name = str(dtype).removeprefix("torch.")
    # The dtype of "auto" is not known before the model loads, so it counts as the largest.
    return getattr(torch, name, torch.float32).itemsize


def _copies_per_machine() -> int:
    """How many processes of this machine hold the model while it loads."""
    # With FSDP one process loads the model, and sends the others their shards (`_compat/construction.py`).
    if is_fsdp_enabled():
        return 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def available_memory() -> int:
    """Free bytes of host memory, at most the limit of this process's control group."""
    # The group's own figure for used memory is no help: it includes cached files, which the kernel drops when it needs
    # the memory.
    available = psutil.virtual_memory().available
    if not CGROUP_LIMIT.exists():
        return available

    limit = CGROUP_LIMIT.read_text().strip()
    if limit == "max":
        return available
    return min(available, int(limit))
