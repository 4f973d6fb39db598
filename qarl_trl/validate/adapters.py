"""Check adapters: learner and engine must both compute what the adapter says."""

from __future__ import annotations

from typing import Any

from .. import _compat
from .types import RunSettings


# vLLM serves no adapter with these settings. It refuses the first, and silently ignores the others, so that the engine
# would sample from another policy.
NOT_SERVED = ("modules_to_save", "rank_pattern", "alpha_pattern")


def check_adapter(config: Any, args: RunSettings) -> None:
    """
    Refuse an adapter without a merged weight that could be quantized, and settings that do not work with adapters.

    Args:
        config: A `peft.PeftConfig`.
        args: Settings of the run.

    Raises:
        ImportError: if the installed peft is an untested version.
        ValueError: if the adapter or the settings do not fit.
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
