"""The low-bit half of a trainer, for any trainer of TRL: `class MyTrainer(LowBitMixin, SFTTrainer)`.

`packed.py` and `measured.py` are further parts of `QaRLTrainer`, for trainers that are GRPO.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .low_bit import LowBitMixin
    from .settings import LowBitConfig

__all__ = ["LowBitConfig", "LowBitMixin"]

# Imported on first use: checks of settings do not need the trainer.
_HOMES = {"LowBitConfig": ".settings", "LowBitMixin": ".low_bit"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
