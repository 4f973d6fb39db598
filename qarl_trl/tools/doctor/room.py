"""Room on a GPU for the engines of the doctor, which take a share of all its memory at their start."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from ...config import QaRLConfig
from ...export.files import shapes_in, weight_files
from ..plan.memory.engine import ENGINE_WORK
from ..plan.run import BFLOAT16, GIB


# The largest share: what remains is for what is not counted, such as fragments.
LARGEST_SHARE = 0.9
# Bytes that the process of an engine takes before vLLM looks what is free: its CUDA context and NCCL. Assumed.
CONTEXT = 1 * GIB


def free_share(device: torch.device) -> float:
    """
    The `gpu_memory_utilization` of an engine that has the GPU for itself now, whatever share it has in the run.

    vLLM refuses to start if less than its share is free. The share of a run is for low-bit weights, and those in
    bfloat16 may not fit into it.

    Args:
        device: The GPU.
    """
    free, memory = torch.cuda.mem_get_info(device)
    return min(LARGEST_SHARE, (free - CONTEXT) / memory)


def why_no_room(folder: str, args: QaRLConfig) -> str | None:
    """
    Why an engine with the weights in bfloat16 does not start; `None` if it does, or would run on a CPU.

    Args:
        folder: The model's folder, with high-precision weights.
        args: The settings of the run.
    """
    if args.device.type != "cuda":
        return None

    entries = sum(math.prod(shape) for shape in shapes_in(weight_files(Path(folder))).values())
    needed = BFLOAT16 * entries / args.vllm_tensor_parallel_size + ENGINE_WORK
    _, memory = torch.cuda.mem_get_info(args.device)
    available = free_share(args.device) * memory
    if needed <= available:
        return None
    return (
        f"an engine with the weights in bfloat16 needs {needed / GIB:.1f} GiB of the GPU, and {available / GIB:.1f} "
        "are free"
    )


@contextmanager
def off_the_gpu(model: nn.Module, device: torch.device) -> Iterator[None]:
    """
    Keep a model in the host's memory inside this context, so that an engine in another process has the GPU.

    Args:
        model: Comes back at the end, with the same parameters.
        device: Where it is. On a CPU nothing moves.
    """
    if device.type == "cpu":
        yield
        return

    model.to("cpu")
    # What PyTorch keeps for its next tensors is not free for another process.
    torch.cuda.empty_cache()
    yield
    model.to(device)
