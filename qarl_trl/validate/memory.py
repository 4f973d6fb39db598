"""Check that the machine's memory holds the models of a run while they load."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import DistributedType
from transformers import PretrainedConfig
from transformers.distributed.fsdp import is_fsdp_enabled

from .._compat.sharding import is_zero3
from ..quant.names import architecture_of
from ..quant.scheme import MASTER_CAST_DTYPE
from .model import skeleton
from .types import RunSettings


GIB = 2**30
# The limit of this process's control group (v2), in bytes, or the word "max".
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def check_host_memory(
    config: PretrainedConfig | None,
    args: RunSettings,
    teacher: PretrainedConfig | None = None,
    is_quantized: bool = False,
) -> None:
    """
    Refuse models that the processes of this machine cannot hold while they load.

    The kernel would kill one of them without a message. All processes must call this. None returns before all have
    measured the free memory.

    Args:
        config: The model's unquantized config; `None` if it is loaded. A model that transformers does not know is not
            checked.
        args: Settings of the run.
        teacher: The config of a distillation's teacher, which loads while the model is in memory; `None` without one.
        is_quantized: Whether the model is a quantized checkpoint, which is decompressed as a whole.

    Raises:
        ValueError: with the memory that is needed and the memory that is free.
    """
    loading = _models_that_load(config, args, teacher, is_quantized)
    if not loading:
        return

    copies = _copies_per_machine()
    needed = copies * sum(loading.values())
    free = available_memory()
    # A process that begins to load takes memory, which the others would no longer measure as free.
    args.distributed_state.wait_for_everyone()

    if needed > free:
        raise ValueError(
            f"Loading needs {needed / GIB:.0f} GiB of host memory, and {free / GIB:.0f} GiB are free: "
            f"{copies} processes of this machine hold {' and '.join(loading)}. "
            "With FSDP2 (recipes/accelerate/fsdp2.yaml) one of them does."
        )


def _models_that_load(
    config: PretrainedConfig | None, args: RunSettings, teacher: PretrainedConfig | None, is_quantized: bool
) -> dict[str, int]:
    """Bytes of what a process holds on the host while it loads, each with a name; without what takes none."""
    # TRL's default. That of transformers, by which it loads a teacher, is the checkpoint's dtype.
    dtype = _name_of_dtype((args.model_init_kwargs or {}).get("dtype") or "float32", config)
    decompresses = is_quantized and not args.frozen
    # At least: compressed-tensors decompresses into the dtype of the scales.
    of_checkpoint = _bytes_of(config, str(MASTER_CAST_DTYPE).removeprefix("torch."), args) if decompresses else 0
    of_model = 0 if args.frozen else _bytes_of(config, dtype, args)
    dtype_of_teacher = _dtype_of_teacher(teacher, args)
    of_teacher = _bytes_of(teacher, dtype_of_teacher, args)

    if is_zero3(args):
        # It loads files in pieces, as a frozen base does. But each process decompresses a whole checkpoint.
        of_model = 0
        of_teacher = 0
    elif _bytes_per_parameter(dtype) == MASTER_CAST_DTYPE.itemsize:
        # The decompressed weights become the model's.
        of_checkpoint = 0

    if _loads_onto_device(args):
        of_teacher = 0
        # What is decompressed becomes a model on the CPU.
        if not decompresses:
            of_model = 0

    # The decompressed weights are gone when the teacher loads.
    if of_teacher > of_checkpoint:
        of_checkpoint = 0
    else:
        of_teacher = 0

    sizes = {
        f"the model in {dtype}": of_model,
        f"its teacher in {dtype_of_teacher}": of_teacher,
        "its decompressed checkpoint": of_checkpoint,
    }
    return {name: size for name, size in sizes.items() if size}


def _loads_onto_device(args: RunSettings) -> bool:
    """Whether TRL loads the model with `device_map="auto"`: tensor by tensor onto the only GPU of the run."""
    is_alone = args.distributed_state.distributed_type == DistributedType.NO
    return args.device.type == "cuda" and is_alone and "device_map" not in (args.model_init_kwargs or {})


def _bytes_of(config: PretrainedConfig | None, dtype: str, args: RunSettings) -> int:
    """Bytes of a model that loads; 0 without one, or if transformers does not know it."""
    if config is None or architecture_of(config) is None:
        return 0
    parameters = sum(param.numel() for param in skeleton(config, args).parameters())
    return _bytes_per_parameter(dtype) * parameters


def _dtype_of_teacher(config: PretrainedConfig | None, args: RunSettings) -> str:
    """The name of the dtype in which TRL loads a teacher: that of its checkpoint, unless the run sets another."""
    if config is None:
        return ""
    dtype = (getattr(args, "teacher_model_init_kwargs", None) or {}).get("dtype")
    return _name_of_dtype(dtype or "auto", config)


def _name_of_dtype(dtype: Any, config: PretrainedConfig | None) -> str:
    """The name of a dtype in which a model loads. That of "auto" is the checkpoint's, as its config says."""
    if dtype == "auto":
        # Without a word of the config it is known when the model has loaded, so it counts as the largest.
        dtype = getattr(config, "dtype", None) or "float32"
    return str(dtype).removeprefix("torch.")


def _bytes_per_parameter(name: str) -> int:
    """Bytes of one number, by the name of its dtype."""
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
