"""qarl_trl: reinforcement learning on low-bit rollouts with TRL, without the run falling apart."""

from importlib import import_module
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .config import QaRLConfig
    from .trainer import QaRLTrainer

__version__ = "0.1.0"

__all__ = ["QaRLConfig", "QaRLTrainer", "__version__"]

# Imported on first use, so that `--help` is instant.
_HOMES = {"QaRLConfig": ".config", "QaRLTrainer": ".trainer"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
