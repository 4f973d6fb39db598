"""The model of a run before it loads: its config, and the model without weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig

from ..export.files import check_generation_config
from ..quant.names import OF_THE_HUB, architecture_of, computed_by
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


def check_saved_generation_config(model: str | nn.Module, args: RunSettings) -> None:
    """
    Refuse a generation config that transformers reads with a warning and does not write.

    Args:
        model: The model or its name.
        args: Settings of the run.

    Raises:
        ValueError: if it cannot be saved, which the first checkpoint would be the first to find out.
    """
    if isinstance(model, str):
        hub = {name: value for name, value in loading_arguments(args).items() if name in OF_THE_HUB}
        try:
            generation_config = GenerationConfig.from_pretrained(model, **hub)
        except OSError:  # a model without one
            return
    else:
        generation_config = getattr(model, "generation_config", None)
    if generation_config is not None:
        check_can_be_saved(generation_config)


def check_can_be_saved(generation_config: GenerationConfig) -> None:
    """
    Refuse a generation config that transformers does not write.

    Args:
        generation_config: A model's.

    Raises:
        ValueError: with the reason, and what to do.
    """
    # The trainer sets the tokenizer's, in place of one that cannot be saved.
    generation_config = copy.deepcopy(generation_config)
    generation_config.pad_token_id = None
    try:
        generation_config.validate(strict=True)
    except ValueError as error:
        reason = " ".join(str(error).partition("If you're using a pretrained")[0].split())
        raise ValueError(
            f"The model's generation_config.json must be one that transformers saves, or no checkpoint could be "
            f"written: {reason} Set do_sample to true in that file, or take these fields out."
        ) from error


def changed_by_loading(model: str, config: PretrainedConfig, args: RunSettings) -> list[str]:
    """
    The entries of a model's config that the run's loading arguments change, such as another rotary embedding.

    Args:
        model: The model's name.
        config: Its config, from [`config_of`].
        args: Settings of the run.
    """
    loading = loading_arguments(args)
    places = {name: value for name, value in loading.items() if name in (*OF_THE_HUB, "trust_remote_code")}
    if loading == places:
        return []

    # Not by the arguments' names: transformers makes `rope_parameters` of `rope_scaling`.
    of_file = computed_by(AutoConfig.from_pretrained(model, **places).to_dict())
    values = computed_by(config.to_dict())
    return sorted(name for name in values if of_file.get(name) != values[name])


def _config_of_name(model: str, args: RunSettings) -> PretrainedConfig:
    """The config of a folder or of a model on the Hub."""
    arguments = loading_arguments(args)
    # transformers would write this word into the config, in place of the dtype of the checkpoint.
    if arguments.get("dtype") == "auto":
        del arguments["dtype"]
    try:
        return AutoConfig.from_pretrained(model, **arguments)
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

    Raises:
        ValueError: if its embedding has no rows.
    """
    # torch fails at the row of the padding token, with an error that names no setting.
    rows = getattr(config.get_text_config(), "vocab_size", None)
    if rows is not None and rows < 1:
        raise ValueError(f"vocab_size in the model's config.json must be above 0, got {rows}.")

    architecture = architecture_of(config)
    with torch.device("meta"):
        if architecture is None:
            return AutoModelForCausalLM.from_config(config, trust_remote_code=args.trust_remote_code)
        return architecture(config)
