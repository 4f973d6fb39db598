"""Supervised fine-tuning of low-bit weights: TRL's `SFTTrainer` with the low-bit half."""

from __future__ import annotations

from trl import SFTTrainer

from .configs import LowBitSFTConfig
from .low_bit import LowBitMixin


class LowBitSFTTrainer(LowBitMixin, SFTTrainer):
    """
    TRL's [`~trl.SFTTrainer`] with a forward on low-bit weights, which `save_model` writes for vLLM.

    With `quant_scheme="none"` it is TRL's trainer, bit for bit.

    It takes the arguments of [`~trl.SFTTrainer`], with a [`LowBitSFTConfig`] as `args`.

    Raises:
        ValueError: if model, settings and data do not go together; raised before any weights load.
    """

    args: LowBitSFTConfig
