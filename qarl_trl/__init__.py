"""qarl_trl: low-bit rollouts for TRL, with a learner that can agree with them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .config import QaRLConfig
    from .trainer import QaRLTrainer
    from .trainers.low_bit import LowBitMixin
    from .trainers.settings import LowBitConfig

__version__ = "0.1.0"

__all__ = ["LowBitConfig", "LowBitMixin", "QaRLConfig", "QaRLTrainer", "__version__"]

# Imported on first use, so that `--help` is instant.
_HOMES = {
    "LowBitConfig": ".trainers.settings",
    "LowBitMixin": ".trainers.low_bit",
    "QaRLConfig": ".config",
    "QaRLTrainer": ".trainer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
