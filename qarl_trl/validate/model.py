"""The model of a run before it loads: its config, and the model without weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from ..export.files import check_generation_config
from ..quant.names import architecture_of
from .types import RunSettings


def loading_arguments(args: RunSettings) -> dict[str, Any]:
    """The arguments of `from_pretrained` by which TRL loads the model of a run."""
    # As in TRL, `model_init_kwargs` may replace the field `trust_remote_code`.
    return {"trust_remote_code": args.trust_remote_code} | (args.model_init_kwargs or {})


def config_of(model: str | nn.Module, args: RunSettings) -> PretrainedConfig:
    """
    The model's unquantized config, before it loads.

    Args:
        model: The model or its name.
        args: Settings of the run.

    Returns:
        A config without `quantization_config`, which the caller may change.

    Raises:
        OSError: if there is no such model.
        ValueError: for files that cannot be read.
    """
    if isinstance(model, str):
        check_generation_config(model)
        config = _config_of_name(model, args)
    else:
        config = copy.deepcopy(model.config)

    # The learner's model is never one of transformers' quantized models: it has master weights.
    vars(config).pop("quantization_config", None)
    return config


def _config_of_name(model: str, args: RunSettings) -> PretrainedConfig:
    """The config of a folder or of a model on the Hub."""
    try:
        return AutoConfig.from_pretrained(model, **loading_arguments(args))
    except OSError as error:
        if Path(model).exists():
            raise
        # Without the Hub transformers says that it cannot connect, and neither what for nor that there is no folder.
        reason = str(error).splitlines()[0]
        raise OSError(f"model {model!r} is no folder here, and the Hub did not give it: {reason}") from error


def skeleton(config: PretrainedConfig, args: RunSettings) -> nn.Module:
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
