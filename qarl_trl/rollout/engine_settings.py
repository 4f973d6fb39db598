"""The arguments of `vllm.LLM` with which an engine, here or in a server, matches a learner's model.

vLLM reads the model's `config.json`. The learner's model may have another config in memory by then, and its scheme is
nowhere on disk.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from torch import nn
from transformers import AutoConfig, PretrainedConfig

from ..quant.names import NOT_COMPUTED_BY


# Entries of a config that no engine reads, or that it gets in another way: dtypes, cache, names, end of an answer.
NOT_READ = {*NOT_COMPUTED_BY, "_attn_implementation", "chunk_size_feed_forward", "attention_dropout"}


def check_engine_arguments(names: Iterable[str], setting: str) -> None:
    """
    Refuse arguments that `vllm.LLM` does not have: it would say so after the learner's model has loaded.

    Args:
        names: The arguments that the user sets.
        setting: Where, for the message.

    Raises:
        ValueError: with the unknown names.
    """
    from vllm import LLM, EngineArgs  # late: it takes seconds

    # It hands on what its signature does not name.
    known = {*inspect.signature(LLM).parameters, *(field.name for field in fields(EngineArgs))} - {"kwargs"}
    unknown = sorted(set(names) - known)
    if unknown:
        raise ValueError(f"{setting} sets {unknown}, which vllm.LLM does not have. Correct the names.")


def low_bit_settings(model: nn.Module, quantization: dict[str, Any] | None, trust_remote_code: bool) -> dict[str, Any]:
    """
    The arguments of `vllm.LLM` for an engine that matches a `model` after `apply_quantization`.

    Random weights are safe: `LowBitVLLMGeneration.generate` first syncs a colocated engine, and
    `ServerClient.generate` refuses a server without the last sync of this run.

    Args:
        model: The learner's model.
        quantization: compressed-tensors' config; `None` for an engine in bfloat16.
        trust_remote_code: As for `from_pretrained`.
    """
    overrides = changed_config(model.config, trust_remote_code)
    if quantization is not None:
        overrides["quantization_config"] = quantization
    return {"load_format": "dummy", "dtype": "bfloat16", "hf_overrides": overrides}


def changed_config(config: PretrainedConfig, trust_remote_code: bool) -> dict[str, Any]:
    """
    Values of the learner's config that differ from the config file that the engine reads.

    The learner holds another config in memory after `model_init_kwargs` that extend the context (another rotary
    embedding), `resize_token_embeddings` (another vocabulary), or any assignment.

    Args:
        config: The config of the learner's model.
        trust_remote_code: As for `from_pretrained`.

    Raises:
        ValueError: if a part of the config differs that has a config of its own, such as that of a vision tower.
    """
    on_disk = AutoConfig.from_pretrained(config._name_or_path, trust_remote_code=trust_remote_code)
    of_file = on_disk.to_dict()

    changed = {}
    for name, value in config.to_dict().items():
        if name in NOT_READ or of_file.get(name) == value:
            continue
        if name in config.sub_configs:
            # Loading writes its dtype into each part.
            if _read_by_engine(value) == _read_by_engine(of_file.get(name)):
                continue
            raise ValueError(
                f"The model's {name} differs from {config._name_or_path}/config.json, which the engine reads. Save "
                "the model to a new folder, and train from that."
            )
        changed[name] = value
    return changed


def _read_by_engine(part: dict[str, Any] | None) -> dict[str, Any]:
    """What an engine reads of a part of a config."""
    return {name: value for name, value in (part or {}).items() if name not in NOT_READ}
