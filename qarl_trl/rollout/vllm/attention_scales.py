"""The scales of KV cache, queries and attention probabilities, which must be 1.

Every attention layer of vLLM has them, for checkpoints with a quantized KV cache. Ours have none, and no sync brings
them. But vLLM's loader of random weights (`load_format="dummy"`, `model_loader/dummy_loader.py`) draws them at random
too, and a reload leaves attention layers alone: `random_start.py` resets them.
"""

from __future__ import annotations

import re

import torch


# Parameters of attention layers for such checkpoints: vLLM makes the scales from them after it loads weights, and
# removes them.
CACHE_SCALES = re.compile(r"(^|\.)(q|k|v|prob)_(scale|zero_point)$")


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
