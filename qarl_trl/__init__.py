"""qarl_trl: low-bit rollouts for TRL, with a learner that can agree with them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._compat.noise import silence_triton_without_gpu


if TYPE_CHECKING:
    from .config import QaRLConfig
    from .trainer import QaRLTrainer
    from .trainers.configs import LowBitDistillationConfig, LowBitRLOOConfig, LowBitSFTConfig
    from .trainers.distillation import LowBitDistillationTrainer
    from .trainers.low_bit import LowBitMixin
    from .trainers.rloo import LowBitRLOOTrainer
    from .trainers.settings import LowBitConfig
    from .trainers.sft import LowBitSFTTrainer

__version__ = "0.1.0"

__all__ = [
    "LowBitConfig",
    "LowBitDistillationConfig",
    "LowBitDistillationTrainer",
    "LowBitMixin",
    "LowBitRLOOConfig",
    "LowBitRLOOTrainer",
    "LowBitSFTConfig",
    "LowBitSFTTrainer",
    "QaRLConfig",
    "QaRLTrainer",
    "__version__",
]

# Imported on first use, so that `--help` is instant.
_HOMES = {
    "LowBitConfig": ".trainers.settings",
    "LowBitDistillationConfig": ".trainers.configs",
    "LowBitDistillationTrainer": ".trainers.distillation",
    "LowBitMixin": ".trainers.low_bit",
    "LowBitRLOOConfig": ".trainers.configs",
    "LowBitRLOOTrainer": ".trainers.rloo",
    "LowBitSFTConfig": ".trainers.configs",
    "LowBitSFTTrainer": ".trainers.sft",
    "QaRLConfig": ".config",
    "QaRLTrainer": ".trainer",
}

# Before vLLM loads: TRL imports it.
silence_triton_without_gpu()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
