"""Refuse what the learner draws in training and the engine does not: dropout, and the noise of routers."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PretrainedConfig

from ..quant.names import architecture_of, base_model
from .model import skeleton
from .types import RunSettings


# Fields of Mixtral, MiniMax and PhiMoE, and of DBRX: noise on what a router sees or says in training.
JITTERS = ("router_jitter_noise", "input_jitter_noise", "moe_jitter_eps")


def check_dropout(model: str | nn.Module, config: PretrainedConfig, args: RunSettings) -> None:
    """
    Refuse dropout in the learner's layers: it would drop what the engine keeps, another part in each forward.

    TRL's `disable_dropout` reaches modules. Attention mostly takes a number instead, and so do all layers of some
    models (OPT, StarCoder2, Seed-OSS).

    Args:
        model: The model or its name.
        config: The model's config.
        args: Settings of the run.

    Raises:
        ValueError: if a dropout is not 0.
    """
    of_text = config.get_text_config()
    of_config = {name: value for name, value in of_text.to_dict().items() if _drops(name, value)}
    if "attention_dropout" in of_config:
        raise ValueError(_refused_number("attention_dropout", of_config["attention_dropout"]))
    # Without such a field no layer drops, and most models have none.
    if not of_config:
        return
    # A model of the Hub's own code may not be made without weights.
    if isinstance(model, str) and architecture_of(config) is None:
        return

    # What the layers have, because published configs also have fields that no layer reads.
    layers = skeleton(config, args) if isinstance(model, str) else base_model(model)
    for layer in layers.modules():
        for name, value in vars(layer).items():
            if name in of_config and _drops(name, value):
                raise ValueError(_refused_number(name, value))

    # Not every trainer has the setting.
    can_disable = hasattr(args, "disable_dropout")
    if can_disable and args.disable_dropout:
        return
    for path, layer in layers.named_modules():
        if isinstance(layer, nn.Dropout) and layer.p > 0:
            advice = (
                "disable_dropout: true" if can_disable else f"the one of {', '.join(of_config)} that it reads to 0"
            )
            raise ValueError(f"{path} of the model drops {layer.p:g}, and the engine drops nothing. Set {advice}.")


def check_routers(config: PretrainedConfig) -> None:
    """
    Refuse routers that draw in training: the engine sends a token to other experts, or weighs them differently.

    Args:
        config: The model's config.

    Raises:
        ValueError: for PhiMoE, and if a jitter of the config is not 0.
    """
    of_text = config.get_text_config()
    # Phi-3.5-MoE: `sparsemixer` of transformers, which draws with every setting.
    if of_text.model_type == "phimoe":
        raise ValueError(
            "PhiMoE is not supported: its router draws the experts of a token in training, and the engine's does not."
        )
    fields = of_text.to_dict()
    # DBRX has its own in there.
    fields |= fields.get("ffn_config") or {}
    for name in JITTERS:
        value = fields.get(name)
        if value:
            raise ValueError(
                f"{name} must be 0, got {value} in the model's config: the engine's router has no noise. Set it to 0 "
                f"there, or model_init_kwargs: {{{name}: 0.0}}."
            )


def _drops(name: str, value: Any) -> bool:
    """Whether a field of a config or an attribute of a layer is a share that is dropped in training."""
    return "drop" in name and isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _refused_number(name: str, value: float) -> str:
    """What to say of a dropout that is a number of a model's config."""
    return (
        f"{name} must be 0, got {value} in the model's config: the engine drops nothing. Set it to 0 "
        f"there, or model_init_kwargs: {{{name}: 0.0}}."
    )
