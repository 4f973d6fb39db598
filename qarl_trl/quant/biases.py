"""Biases that a model of transformers may have and vLLM's model of its family has not."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn
from transformers import PretrainedConfig


_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_LATENT = ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")
# By the `model_type` of a config: modules whose bias vLLM (0.31) skips without a word when it loads a checkpoint.
# Found by loading a toy of each family with all of its biases. The usual checkpoints have none of them.
_SKIPPED = {
    "qwen3": ("o_proj",),
    "qwen3_moe": ("o_proj",),
    "mellum": ("o_proj",),
    "qwen3_next": _ATTENTION,
    "cohere": _ATTENTION,
    "cohere2": _ATTENTION,
    "olmoe": _ATTENTION,
    "granitemoe": _ATTENTION,
    "afmoe": _ATTENTION,
    "seed_oss": ("o_proj", *_MLP),
    "falcon_h1": (*_ATTENTION, *_MLP),
    "ernie4_5": (*_ATTENTION, *_MLP),
    "ernie4_5_moe": ("o_proj", *_MLP, "lm_head"),
    "minicpm3": (*_LATENT, *_MLP),
    "deepseek_v3": _LATENT,
}
# What routes the tokens to experts, of which vLLM's Laguna expects another name than checkpoints have.
BIAS_OF_ROUTER = "e_score_correction_bias"


def biases_without_place(model: nn.Module) -> list[str]:
    """
    The biases of a model that vLLM would leave out of a checkpoint, as far as this version of the package knows.

    Args:
        model: A model of transformers, also inside of a `PeftModel`.

    Returns:
        Their names in `model`.
    """
    config: Any = getattr(model, "config", None)
    # A module that is no model of transformers.
    if not isinstance(config, PretrainedConfig):
        return []
    family = config.get_text_config().model_type
    owners = _SKIPPED.get(family, ())

    names = []
    for name, _ in (*model.named_parameters(), *model.named_buffers()):
        parts = name.split(".")
        # The family is that of the text model.
        if any(part.startswith(("vision", "visual", "audio")) for part in parts):
            continue
        is_skipped = parts[-1] == "bias" and any(part in owners for part in parts[-3:-1])
        if is_skipped or (family == "laguna" and parts[-1] == BIAS_OF_ROUTER):
            names.append(name)
    return names


def warn_of_biases(model: nn.Module) -> None:
    """
    Warn of biases that vLLM would leave out: an engine answers without them.

    Args:
        model: As in [`biases_without_place`].
    """
    names = biases_without_place(model)
    if names:
        # Of Python: an export has no run, and so no logger of accelerate.
        warnings.warn(
            f"vLLM 0.31 has no place for {len(names)} biases of this model, first {names[0]}: from a low-bit "
            "checkpoint it skips them without a word, and answers without them. transformers loads them. A sync of "
            "an engine stops as soon as one is not 0.",
            stacklevel=2,
        )
