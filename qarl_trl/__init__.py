"""qarl_trl: reinforcement learning on low-bit rollouts with TRL, without the run falling apart."""

from ._version import __version__
from .config import QaRLConfig
from .trainer import QaRLTrainer


__all__ = ["QaRLConfig", "QaRLTrainer", "__version__"]
