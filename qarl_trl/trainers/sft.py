"""Supervised fine-tuning of low-bit weights: TRL's `SFTTrainer` with the low-bit half."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.logging import get_logger
from datasets import Dataset
from torch import Tensor, nn
from trl import SFTTrainer

from ..learner.probe import crossing
from ..quant.layers.layer import outside_training
from ..validate.layers import crossing_refusal, keeps_texts_apart
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
            `max_length` that leaves nothing to learn. `train` raises it for packed texts that would cross.
    """

    args: LowBitSFTConfig

    # Whether a pass of this trainer was asked if it keeps the texts of a row apart.
    _is_probed = False

    def compute_loss(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """TRL's method. The first call refuses (`ValueError`) rows of several texts that the model lets cross."""
        # Here, because no config says it: OPT and Falcon take positions and do not mask by them.
        if not self._is_probed and self.args.quantized and keeps_texts_apart(self.args):
            self._check_packing(model)
            self._is_probed = True
        return super().compute_loss(model, *args, **kwargs)

    def _check_packing(self, model: nn.Module) -> None:
        """Refuse (`ValueError`) a model in which a text sees its neighbours in a row, by a measurement."""

        def score(token_ids: Tensor, keep: int) -> Tensor:
            return _packed_logps(model, token_ids.to(self.accelerator.device), keep)

        config = self._unwrapped.config
        with outside_training(self._unwrapped):
            # A scale for all activations of a pass would let a neighbour change a rounding.
            reason = crossing(model, score, config, exact=False)
        if reason is not None:
            raise ValueError(crossing_refusal(config.model_type, reason))

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


def _packed_logps(model: nn.Module, token_ids: Tensor, keep: int) -> Tensor:
    """
    Log-probs of texts that share one row.

    Args:
        model: A causal language model.
        token_ids: The texts, int64 `(B, L)`.
        keep: How many of each to return.

    Returns:
        Of the last tokens of each text, float32 `(B, keep)`.
    """
    texts, length = token_ids.shape
    # As TRL's collator tells where a text begins.
    positions = torch.arange(length, device=token_ids.device).repeat(texts)
    output = model(input_ids=token_ids.view(1, -1), position_ids=positions.view(1, -1), use_cache=False)

    # The logits of a token predict the next one of its text.
    logps = output.logits.float().log_softmax(-1).view(texts, length, -1)[:, :-1]
    of_tokens = logps.gather(-1, token_ids[:, 1:, None]).squeeze(-1)
    return of_tokens[:, -keep:]


def _has_labels(data: Dataset) -> bool:
    """Whether any token of a prepared data set is learned. It reads up to the first one."""
    return any(label != MASKED for row in data.with_format(None) for label in row["labels"])
