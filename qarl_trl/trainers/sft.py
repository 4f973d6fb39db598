"""Supervised fine-tuning of low-bit weights: TRL's `SFTTrainer` with the low-bit half."""

from __future__ import annotations

from typing import Any

from accelerate.logging import get_logger
from datasets import Dataset
from trl import SFTTrainer

from .configs import LowBitSFTConfig
from .low_bit import LowBitMixin


logger = get_logger(__name__)

# The label of a token that is not learned.
MASKED = -100


class LowBitSFTTrainer(LowBitMixin, SFTTrainer):
    """
    TRL's [`~trl.SFTTrainer`] with a forward on low-bit weights, which `save_model` writes for vLLM.

    With `quant_scheme="none"` it is TRL's trainer, bit for bit.

    It takes the arguments of [`~trl.SFTTrainer`], with a [`LowBitSFTConfig`] as `args`.

    Raises:
        ValueError: if model, settings and data do not go together; raised before any weights load, except for a
            `max_length` that leaves nothing to learn.
    """

    args: LowBitSFTConfig

    def _prepare_dataset(
        self, dataset: Any, processing_class: Any, args: LowBitSFTConfig, packing: bool, *others: Any
    ) -> Any:
        """
        TRL's method, which cuts rows off at `max_length`.

        A data set in which no token is left to learn is refused: its loss would be 0 to the end. Of rows that TRL
        leaves out, a warning gives the number.
        """
        prepared = super()._prepare_dataset(dataset, processing_class, args, packing, *others)
        # A streamed data set is prepared row by row, later.
        if not isinstance(prepared, Dataset) or "labels" not in prepared.column_names:
            return prepared

        if not _has_labels(prepared):
            if args.max_length is None:
                raise ValueError("No row has a token to learn: all labels are masked.")
            raise ValueError(
                f"No row has a token to learn within max_length={args.max_length}: the prompts fill it. Raise it."
            )

        left_out = len(dataset) - len(prepared)
        # Packing joins rows, so their number says nothing.
        if left_out and not packing:
            logger.warning(
                f"{left_out} of {len(dataset)} rows are left out: their prompts fill max_length={args.max_length}."
            )
        return prepared


def _has_labels(data: Dataset) -> bool:
    """Whether any token of a prepared data set is learned. It reads up to the first one."""
    return any(label != MASKED for row in data.with_format(None) for label in row["labels"])
