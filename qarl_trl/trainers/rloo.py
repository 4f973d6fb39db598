"""RLOO on low-bit rollouts: TRL's `RLOOTrainer` with the low-bit half."""

from __future__ import annotations

from trl import RLOOTrainer

from .configs import LowBitRLOOConfig
from .low_bit import LowBitMixin


class LowBitRLOOTrainer(LowBitMixin, RLOOTrainer):
    """
    TRL's [`~trl.RLOOTrainer`] with low-bit rollouts and a learner on the same low-bit weights.

    With `quant_scheme="none"` it is TRL's trainer, bit for bit. TBPO, passes without padding and the mismatch in the
    log are of [`~qarl_trl.QaRLTrainer`] alone.

    It takes the arguments of [`~trl.RLOOTrainer`], with a [`LowBitRLOOConfig`] as `args`.

    Raises:
        ValueError: if model, settings and data do not go together; raised before any weights load.
    """

    args: LowBitRLOOConfig
