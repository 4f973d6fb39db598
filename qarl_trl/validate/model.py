"""The model of a run before it loads: its config, and the model without weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig


def loading_arguments(args: Any) -> dict[str, Any]:
    """The arguments of `from_pretrained` by which TRL loads the model of a run."""
    # As in TRL, the field is a default, which `model_init_kwargs` may replace.
    return {"trust_remote_code": args.trust_remote_code} | (args.model_init_kwargs or {})


def config_of(model: str | nn.Module, args: Any) -> PretrainedConfig:
    """
    The model's unquantized config, before it loads.

    Args:
        model: The model or its name.
        args: Settings of the run.

    Returns:
        A config without `quantization_config`, which the caller may change.
    """
    if isinstance(model, str):
        config = AutoConfig.from_pretrained(model, **loading_arguments(args))
    else:
        config = copy.deepcopy(model.config)

    # The learner's model is never one of transformers' quantized models: it has master weights.
    vars(config).pop("quantization_config", None)
    return config


def architecture_of(config: PretrainedConfig) -> Any | None:
    """
    The class of transformers that a config names.

    Args:
        config: The model's config.

    Returns:
        The class, or `None` if transformers does not have it: a checkpoint may bring code of its own.
    """
    names = config.architectures or [""]
    return getattr(transformers, names[0], None)


def skeleton(config: PretrainedConfig, args: Any) -> nn.Module:
    """
    The model of a config, without weights: all parameters are on the meta device.

    Args:
        config: The model's unquantized config.
        args: Settings of the run.
    """
    architecture = architecture_of(config)
    with torch.device("meta"):
        if architecture is None:
            return AutoModelForCausalLM.from_config(config, trust_remote_code=args.trust_remote_code)
        return architecture(config)
