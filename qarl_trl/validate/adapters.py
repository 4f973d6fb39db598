"""Check adapters: their low-bit weights must be those that the engine multiplies by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from .. import _compat


# vLLM serves no adapter with these: it refuses the first, and ignores the others in silence, so that the engine would
# sample from another policy.
NOT_SERVED = ("modules_to_save", "rank_pattern", "alpha_pattern")


def adapters_of(model: str | nn.Module, given: Mapping[str, Any]) -> list[Any]:
    """
    The configurations of a run's adapters.

    Args:
        model: The trainer's model, or its name. A `PeftModel` has adapters already.
        given: All arguments of the trainer by name. With a `peft_config` the trainer will add an adapter.

    Returns:
        A list of `peft.PeftConfig`, often empty.
    """
    present = getattr(model, "peft_config", None) or {}
    configs = [given.get("peft_config"), *present.values()]
    return [config for config in configs if config]


def check_adapter(config: Any, args: Any) -> None:
    """
    Refuse an adapter that has no merged weight to quantize, and settings that do not work with adapters.

    Args:
        config: A `peft.PeftConfig`.
        args: Settings of the run.

    Raises:
        ImportError: if the installed peft is an untested version.
        ValueError: otherwise.
    """
    from ..quant.lora import check_lora_config  # imports peft, which is optional

    _compat.check_versions("peft")
    check_lora_config(config)

    if args.frozen:
        _check_served(config)
    # Muon orthogonalizes the step of a whole matrix, which has no counterpart in steps of two factors.
    if getattr(args, "optim_muon", False):
        raise ValueError("optim_muon must be False with LoRA: Muon steps of A and B are no Muon step of W + s B A.")


def _check_served(config: Any) -> None:
    """Refuse (`ValueError`) settings of an adapter that vLLM would not apply on top of a frozen base."""
    for name in NOT_SERVED:
        if getattr(config, name):
            raise ValueError(f"lora_base='frozen': vLLM serves no adapter with {name}. Leave it out, or use 'merged'.")
