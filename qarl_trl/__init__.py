"""qarl_trl: reinforcement learning on low-bit rollouts with TRL, without the run falling apart."""

from .config import QaRLConfig
from .trainer import QaRLTrainer


__all__ = ["QaRLConfig", "QaRLTrainer", "__version__"]

__version__ = "0.1.0"
