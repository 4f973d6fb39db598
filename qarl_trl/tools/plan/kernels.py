"""Whether vLLM has kernels for a run on a GPU."""

from __future__ import annotations

from ...quant.supported import gpu_generation
from .gpus import Gpu
from .run import Run


def missing_kernel(run: Run, gpu: Gpu) -> str:
    """
    Why a run cannot work on a GPU, whatever its memory; empty if vLLM has kernels for its schemes.

    Args:
        run: The run.
        gpu: What the data sheet says of one.
    """
    generation = gpu_generation(gpu.capability)
    for support in run.kernels:
        if generation not in support.gpus:
            return f"{support.name} needs {' or '.join(support.gpus) or 'a CPU'}"
    return ""
