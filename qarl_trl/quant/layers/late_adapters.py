"""Adapters that a script gave a model after its layers were quantized."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..names import is_peft_model
from .layer import LowBitLayer


def check_late_adapters(model: nn.Module) -> None:
    """
    Refuse a LoRA adapter that came after the quantization: the forward would add it to a low-bit weight, and neither a
    sync nor a file would have it.

    Args:
        model: The model with low-bit layers.

    Raises:
        RuntimeError: with the name of the layer.
        ValueError: if an active adapter has settings with which it does not merge. It may have come later, too.
    """
    if is_peft_model(model):
        from .lora import check_lora_config  # imports peft

        peft_model: Any = model
        # Those with which the layers compute. The model may name another one.
        for adapter in peft_model.base_model.active_adapters:
            check_lora_config(peft_model.peft_config[adapter])

    for name, module in model.named_modules():
        if not hasattr(module, "lora_A") or isinstance(module, LowBitLayer):
            continue
        # Beside a frozen base an adapter stays an adapter, for engine and file too.
        if getattr(module.base_layer, "frozen_weight", None) is None:
            raise RuntimeError(
                f"{name!r} got an adapter after the model was quantized, which no weight sync and no checkpoint would "
                "have. Give the trainer peft_config, or a PeftModel with this adapter."
            )
