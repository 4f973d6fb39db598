"""The scales of KV cache, queries and attention probabilities, which must be 1.

Every attention layer of vLLM has them, for checkpoints with a quantized KV cache. Ours have none, and no sync brings
them. But vLLM's loader of random weights (`load_format="dummy"`, `model_loader/dummy_loader.py`) draws them at random
too, and a reload leaves attention layers alone.
"""

from __future__ import annotations

import re
from functools import wraps
from typing import Any

import torch


# Parameters of attention layers for such checkpoints: vLLM makes the scales from them after it loads weights, and
# removes them.
CACHE_SCALES = re.compile(r"(^|\.)(q|k|v|prob)_(scale|zero_point)$")


def keep_cache_scales() -> None:
    """
    Start engines with random weights, but with scales of 1 for KV cache, queries and attention probabilities.

    FlashInfer's kernels and CUDA graphs keep the numbers of the first forward, so the scales must be right before
    that: this replaces vLLM's loader, once, for the whole process.
    """
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    load = DummyModelLoader.load_weights
    if hasattr(load, "__wrapped__"):  # replaced already
        return

    @wraps(load)
    def load_with_scales_of_one(self: Any, model: torch.nn.Module, model_config: Any) -> None:
        load(self, model, model_config)
        reset_cache_scales(model)

    DummyModelLoader.load_weights = load_with_scales_of_one


@torch.no_grad()
def reset_cache_scales(model: torch.nn.Module) -> None:
    """
    Set the scales of KV cache, queries and attention probabilities to 1, also their copies on the host.

    Args:
        model: The engine's model.
    """
    from vllm.model_executor.layers.attention.attention import set_default_quant_scales

    for layer in model.modules():
        if not hasattr(layer, "_k_scale"):
            continue

        for name, parameter in layer.named_parameters(recurse=False):
            if CACHE_SCALES.search(name):
                parameter.fill_(1)

        set_default_quant_scales(layer)
