"""The low-bit half of a trainer, for any trainer of TRL: `class MyTrainer(LowBitMixin, SFTTrainer)`.

`packed.py` and `measured.py` are further parts of `QaRLTrainer`, for trainers that are GRPO.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .configs import LowBitDistillationConfig, LowBitRLOOConfig, LowBitSFTConfig
    from .distillation import LowBitDistillationTrainer
    from .low_bit import LowBitMixin
    from .rloo import LowBitRLOOTrainer
    from .settings import LowBitConfig
    from .sft import LowBitSFTTrainer

__all__ = [
    "LowBitConfig",
    "LowBitDistillationConfig",
    "LowBitDistillationTrainer",
    "LowBitMixin",
    "LowBitRLOOConfig",
    "LowBitRLOOTrainer",
    "LowBitSFTConfig",
    "LowBitSFTTrainer",
]

# Imported on first use: checks of settings do not need the trainer.
_HOMES = {
    "LowBitConfig": ".settings",
    "LowBitDistillationConfig": ".configs",
    "LowBitDistillationTrainer": ".distillation",
    "LowBitMixin": ".low_bit",
    "LowBitRLOOConfig": ".configs",
    "LowBitRLOOTrainer": ".rloo",
    "LowBitSFTConfig": ".configs",
    "LowBitSFTTrainer": ".sft",
}


def __getattr__(name: str) -> Any:
    # `hasattr` and `from ... import *` need this error, not a KeyError.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
