"""What an engine that starts with random weights must not draw at random.

For `load_format="dummy"` vLLM draws all parameters, and all buffers that a state dict has
(`model_loader/dummy_loader.py`). The first sync replaces what a checkpoint has. Two kinds of tensors are in none, and
would stay random:

- the scales of attention layers (`attention_scales.py`), and
- buffers that a model computes from its config, such as the mean and deviation of pixels in Qwen2.5-VL
  (`layers/fusion/mm_input_norm.py`).
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import Tensor

from .attention_scales import reset_cache_scales


def keep_constants() -> None:
    """
    Start engines with random weights, but with attention scales of 1 and the buffers that their model has made.

    FlashInfer's kernels and CUDA graphs keep the numbers of the first forward, so they must be right before that: this
    replaces vLLM's loader, once, for the whole process.
    """
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    load = DummyModelLoader.load_weights
    if hasattr(load, "__wrapped__"):  # replaced already
        return

    @wraps(load)
    def load_but_for_constants(self: Any, model: torch.nn.Module, model_config: Any) -> None:
        buffers = _copies_of_buffers(model)
        load(self, model, model_config)
        for name, buffer in buffers.items():
            model.get_buffer(name).copy_(buffer)
        reset_cache_scales(model)

    DummyModelLoader.load_weights = load_but_for_constants


def _copies_of_buffers(model: torch.nn.Module) -> dict[str, Tensor]:
    """The buffers that vLLM draws, by name, as their modules have made them."""
    copies = {}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            is_drawn = name.rpartition(".")[2] not in module._non_persistent_buffers_set
            # Layers that vLLM quantizes while it loads are made only then.
            if is_drawn and not buffer.is_meta:
                copies[name] = buffer.clone()
    return copies
