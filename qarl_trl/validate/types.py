"""The types of what all checks get: the settings of a run, and the other arguments of its trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from transformers import TrainingArguments

from ..trainers.settings import LowBitConfig


# All arguments of a trainer by name, such as `train_dataset`. Those that were left out are missing. `qarl-trl serve`,
# which loads no master weights, gives an empty mapping.
TrainerArguments: TypeAlias = Mapping[str, Any]


class RunSettings(LowBitConfig, TrainingArguments):
    """
    The config of a run, for annotations: the fields of `LowBitConfig` and those of the trainer's own config.

    Nothing makes one or asks for this class: a run's config is of the user's class, such as `QaRLConfig`.
    """
