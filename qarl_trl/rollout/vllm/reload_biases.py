"""Biases over a reload.

Before it loads, vLLM's reload gives parameters the form of a checkpoint again, but not biases: they are made after
the other parameters, so it has no form of them to restore (`SKIP_TENSORS` in `model_loader/reload/meta.py`). But a
bias may have a kernel's form. Marlin pads and permutes it, W4A8 on a CPU casts it. Then the loader would write over
that form, or find a bias that is longer than the checkpoint's. Some kernels also put an ordinary parameter in its
place, without loader and dimension to split; others a new tensor into the old parameter, which a CUDA graph would not
read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch


@contextmanager
def biases_of_checkpoint() -> Iterator[None]:
    """
    Let a reload fill biases in the form of a checkpoint, and leave what kernels make of them in their old memory.

    Each layer gets an empty bias before it loads. vLLM has kept the one of its kernel, and copies into that what the
    kernel makes of the loaded one, as it does for other parameters.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    restore = layerwise.restore_layer_on_meta

    def restore_with_bias(layer: Any, info: Any) -> None:
        restore(layer, info)

        # Only a parameter of its own: vLLM's wrapper of a layer with an adapter shows the bias of the layer inside.
        bias: Any = layer._parameters.get("bias")
        if bias is not None and hasattr(layer, "weight_loader"):
            layer.bias = _empty_bias(layer, bias)

    with patch.object(layerwise, "restore_layer_on_meta", restore_with_bias):
        yield


def _empty_bias(layer: Any, bias: Any) -> torch.nn.Parameter:
    """A bias as vLLM creates it for a linear layer: not padded, with the loader and the dimension of its split."""
    size = getattr(layer, "output_size_per_partition", bias.numel())

    empty: Any = torch.nn.Parameter(bias.data.new_empty(size), requires_grad=False)
    empty.output_dim = getattr(bias, "output_dim", 0)
    empty.weight_loader = getattr(bias, "weight_loader", layer.weight_loader)
    return empty
