"""Settings of TRL's trainers on low-bit weights. They load without vLLM, so that a dry run is quick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trl import DistillationConfig, RLOOConfig, SFTConfig

from ..options import LOSS, option
from .sampling import check_endings, check_noise, check_seed
from .settings import LowBitConfig


@dataclass
class LowBitSFTConfig(LowBitConfig, SFTConfig):
    """Configuration of [`LowBitSFTTrainer`]: the fields of [`~trl.SFTConfig`] and those of [`LowBitConfig`]."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # TRL fails at both, but after it has loaded the model.
        if self.activation_offloading and self.device.type == "cpu":
            raise ValueError("activation_offloading needs a GPU, whose activations it keeps in host memory.")
        if self.padding_free and not self.packing and self.max_length is not None:
            raise ValueError(
                f"padding_free without packing does not cut rows to max_length={self.max_length}. Set packing: true, "
                "or max_length: null."
            )
        # TRL keeps packed texts apart by positions, which its collator writes only if the training has them.
        writes_positions = self.packing or self.padding_free
        if self.eval_packing and not writes_positions and self.packing_strategy != "wrapped":
            raise ValueError(
                "eval_packing must be False without packing: each text of an evaluation would be scored after its "
                "neighbours. Set packing: true, too."
            )


@dataclass
class LowBitRLOOConfig(LowBitConfig, RLOOConfig):
    """Configuration of [`LowBitRLOOTrainer`]: the fields of [`~trl.RLOOConfig`] and those of [`LowBitConfig`]."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quantized:
            check_noise(self)
        check_seed(self)
        check_endings(self)


@dataclass
class LowBitDistillationConfig(LowBitConfig, DistillationConfig):
    """
    Configuration of [`LowBitDistillationTrainer`]: the fields of [`~trl.DistillationConfig`], those of
    [`LowBitConfig`], and the field below.

    Without `teacher_model_name_or_path` the teacher is the run's own start in high precision.
    """

    distill_on: Literal["rollouts", "answers"] = option(
        LOSS,
        default="rollouts",
        help="Where teacher and student are compared. 'rollouts': on what the student samples, as in TRL. 'answers': "
        "on the column `completion` of the data, so that nothing is sampled.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.distill_on == "answers" and self.use_vllm:
            raise ValueError("distill_on='answers' samples nothing: set use_vllm: false, or distill_on: rollouts.")
        # TRL refuses it in its trainers with rewards.
        if self.auto_find_batch_size:
            raise ValueError(
                "auto_find_batch_size must be False: rows that were sampled for larger micro-batches would be trained "
                "on twice or never. Set per_device_train_batch_size."
            )
