"""How the policy of a run is loaded, and what is said of a loaded one."""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate.logging import get_logger
from compressed_tensors.quantization import QuantizationConfig
from torch import nn
from trl.trainer.utils import create_model_from_path

from .. import guards
from ..quant.gemms.gemm import GemmChoice, plain_gemm
from ..quant.names import base_model, computed_by
from ..quant.samples import sample
from ..quant.start import load_frozen_base, load_master_weights


logger = get_logger(__name__)


def load_whole(args: Any, name: str, *architecture: Any, **loading: Any) -> nn.Module:
    """
    TRL's loader, but it refuses a checkpoint that lacks weights. Collective.

    Args:
        args: The config of the run.
        name: Folder or Hub id of the model.
        architecture: The class, which TRL names for a reward model: its head is new.
        loading: Arguments of `from_pretrained`.

    Raises:
        ValueError: with the first name. The other processes raise `OSError`.
    """
    if architecture:
        return create_model_from_path(name, *architecture, **loading)

    model: Any
    model, report = create_model_from_path(name, **loading, output_loading_info=True)
    missing = sorted(report["missing_keys"])

    def check() -> None:
        if missing:
            raise ValueError(
                f"{name} lacks {len(missing)} weights of its model, first {missing[0]}: transformers would put "
                "random ones in their place. Download or save it again."
            )

    # Under FSDP only the first process of a machine reads weights.
    guards.on_first(args, check)
    return model


def load_stored(
    name: str,
    *architecture: Any,
    freeze: QuantizationConfig | None = None,
    gemm: GemmChoice = plain_gemm,
    **loading: Any,
) -> nn.Module:
    """
    Load master weights or a frozen base from a checkpoint's tensors, in place of TRL's loader.

    Args:
        name: Folder or Hub id of the model.
        architecture: The class, which TRL names for a reward model.
        freeze: The layers of a frozen base; `None`: master weights.
        gemm: Of a frozen base, see [`~qarl_trl.quant.apply_quantization`].
        loading: TRL's arguments of `from_pretrained`.

    Raises:
        ValueError: for a reward model, whose head is new.
    """
    if architecture:
        raise ValueError(
            "A reward model must start from a checkpoint in high precision with lora_base='merged': its head is new, "
            f"and a loader of stored tensors has none for it, got {name}."
        )
    if freeze is None:
        return load_master_weights(name, **loading)
    return load_frozen_base(name, freeze, gemm=gemm, **loading)


def warn_of_rounded_weights(model: nn.Module, learning_rate: float) -> None:
    """
    Warn of trained weights in 16 bits, such as those of a model that a script loads without a dtype.

    Args:
        model: The policy, with its adapter.
        learning_rate: That of the run.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rounded = [parameter for parameter in trained if parameter.dtype in (torch.bfloat16, torch.float16)]
    if rounded:
        # Half of the distance to the next number, for the largest numbers below a power of two; for others it is more.
        smallest = round(4 / torch.finfo(rounded[0].dtype).eps)
        logger.warning(
            f"{len(rounded)} of {len(trained)} trained parameters are {rounded[0].dtype}, first of shape "
            f"{tuple(rounded[0].shape)}. Updates below 1/{smallest} of a weight are rounded away, at "
            f"learning_rate={learning_rate:g} perhaps most of them. Load the model with dtype=torch.float32."
        )


def warn_of_another_reference(policy: nn.Module, reference: nn.Module) -> None:
    """
    Warn of a reference model that is not the policy's start. TRL loads it from the files that the policy's config
    names, also if a script has changed the policy in memory.

    Args:
        policy: The trained model, whole.
        reference: The reference model, whole.
    """
    difference = _first_difference(policy, reference)
    if difference is not None:
        logger.warning(
            f"The reference model is not the start of the run: they differ in {difference}. TRL loads it from "
            f"{base_model(policy).config._name_or_path}. Save the changed model, and name its folder as the model."
        )


def _first_difference(policy: nn.Module, reference: nn.Module) -> str | None:
    """An entry of the configs, or a weight, in which two models differ; `None` if there is none."""
    of_policy, of_reference = (
        computed_by(base_model(model).config.get_text_config().to_dict()) for model in (policy, reference)
    )
    for entry, value in of_policy.items():
        # What only one of the two has says nothing, and a reference drops nothing.
        if of_reference.get(entry, value) != value and "drop" not in entry and "jitter" not in entry:
            return f"{entry} of their configs"

    weights = dict(reference.named_parameters())
    for name, parameter in policy.named_parameters():
        other = weights.get(name)
        if other is None or other.shape != parameter.shape:
            continue
        # In one dtype, because the two may be loaded in two.
        here = sample(parameter).cpu().to(torch.bfloat16)
        there = sample(other).cpu().to(torch.bfloat16)
        if not torch.equal(here, there):
            return name
    return None


def anchor_model(model: Any) -> Any:
    """
    Make the folder of a model absolute: a reward function may change the current folder.

    Args:
        model: The model or its name.

    Returns:
        The model, or its name.
    """
    if isinstance(model, str):
        return os.path.abspath(model) if os.path.isdir(model) else model

    config = base_model(model).config
    if os.path.isdir(config._name_or_path):
        config._name_or_path = os.path.abspath(config._name_or_path)
    return model
