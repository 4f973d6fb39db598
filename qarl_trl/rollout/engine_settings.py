"""The arguments of `vllm.LLM` with which an engine, here or in a server, matches a learner's model."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import AutoConfig, PretrainedConfig


def low_bit_settings(model: nn.Module, quantization: dict[str, Any] | None, trust_remote_code: bool) -> dict[str, Any]:
    """
    The arguments of `vllm.LLM` for an engine that matches a `model` after `apply_quantization`.

    Random weights are safe, because TRL syncs before the first generation, also after a resume.

    Args:
        model: The learner's model.
        quantization: compressed-tensors' config; `None` for an engine in bfloat16.
        trust_remote_code: As for `from_pretrained`.
    """
    overrides = changed_positions(model.config, trust_remote_code)
    if quantization is not None:
        overrides["quantization_config"] = quantization
    return {"load_format": "dummy", "dtype": "bfloat16", "hf_overrides": overrides}


def changed_positions(config: PretrainedConfig, trust_remote_code: bool) -> dict[str, Any]:
    """
    Position settings of the learner that differ from the config file that the engine reads.

    `model_init_kwargs` may extend the context; without these the engine would use another rotary embedding.

    Args:
        config: The config of the learner's model.
        trust_remote_code: As for `from_pretrained`.
    """
    on_disk = AutoConfig.from_pretrained(config._name_or_path, trust_remote_code=trust_remote_code)
    changed = {}
    for name in ("max_position_embeddings", "rope_parameters"):
        if hasattr(config, name) and getattr(config, name) != getattr(on_disk, name):
            changed[name] = getattr(config, name)
    return changed
