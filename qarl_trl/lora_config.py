"""Which LoRA configurations can be trained: those whose forward is that of one merged weight.

Invariant: what is refused here is refused by its configuration, before a model loads; what only the layers show, by
`quant.lora` (paper Sec. 3.1, with `theta = W + s B A`).
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from . import _compat
from .config import QaRLConfig


# Whatever else a LoraConfig sets changes what the layer computes, or where it is; a field of a later peft does until read.
_PLAIN_LORA = {
    *(
        "task_type",
        "peft_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
    ),
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save"),
}
_WHY_NOT_LORA = {
    "use_dora": "DoRA rescales the rows of the merged weight, which then is not W + s B A",
    "lora_dropout": "dropout acts on the input of the adapter alone: W x + s B A dropout(x) has no merged weight, and the "
    "engine does not drop",
    "bias": "trained biases belong to the base model, which is never changed",
    "lora_bias": "a bias of the adapter is not part of the merged weight",
    "target_parameters": "adapters on bare parameters (fused experts) have no low-bit forward",
    "fan_in_fan_out": "only torch.nn.Linear is quantized",
    "layer_replication": "two layers would share one base weight under one name",
    "trainable_token_indices": "the engine would not see the trained token vectors",
    "alora_invocation_tokens": "activated LoRA switches the adapter on inside a sequence, and the engine runs one weight",
}
_PLAIN_INIT = (True, False, "gaussian", "orthogonal")


def check_lora(config: Any, args: QaRLConfig) -> None:
    """
    Refuse an adapter whose forward is not `x (W + s B A)^T`, and settings that do not go with one.

    Args:
        config (`peft.LoraConfig`): As given to the trainer, or as found on a `PeftModel`.
        args (`QaRLConfig`): The run's settings.

    Raises:
        ImportError: when peft is outside the supported window.
        ValueError: with the setting, the reason and what to do.
    """
    from peft import LoraConfig, PeftType

    _compat.check_peft()
    if not isinstance(config, LoraConfig) or config.peft_type != PeftType.LORA:
        raise ValueError(
            f"peft_config is a {type(config).__name__}, and only LoRA adapters merge into a weight that can be quantized. "
            "Use peft.LoraConfig, or set quant_scheme='none'."
        )
    defaults = {
        f.name: f.default if f.default is not MISSING else f.default_factory() if callable(f.default_factory) else None
        for f in fields(config)
    }
    changed = [
        n for n, default in defaults.items() if n not in _PLAIN_LORA and getattr(config, n) not in (default, None)
    ]
    if changed:
        given = ", ".join(f"{name}={getattr(config, name)!r}" for name in changed)
        reasons = [_WHY_NOT_LORA[name] for name in changed if name in _WHY_NOT_LORA]
        raise ValueError(
            f"The adapter sets {given}, which cannot be aligned with the engine's weight Q(W + s B A)"
            + (f": {'; '.join(reasons)}" if reasons else "")
            + f". Leave {'it' if len(changed) == 1 else 'them'} at the default"
            + (" (lora_dropout: 0.0; TRL's ModelConfig has 0.05)." if "lora_dropout" in changed else ".")
        )
    if config.init_lora_weights not in _PLAIN_INIT:
        raise ValueError(
            f"init_lora_weights={config.init_lora_weights!r} rewrites the base weights or needs data at the start: with "
            f"the adapter disabled, the reference would no longer be the base model. Use one of {_PLAIN_INIT}."
        )
    if args.optim_muon:
        raise ValueError(
            "optim_muon=True with LoRA: Muon would orthogonalize the updates of A and of B each for itself, which is not "
            "a Muon step of W + s B A and which the paper does not cover. Set optim_muon=False (AdamW)."
        )
    plugin = args.deepspeed_plugin
    if plugin is not None and plugin.zero_stage == 3:
        raise ValueError(
            "LoRA under DeepSpeed ZeRO-3: a layer's forward needs base weight, A and B whole at once, and ZeRO-3 gathers "
            "them module by module. Use DDP or FSDP2, or ZeRO stage 2."
        )
