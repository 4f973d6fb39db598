"""What TRL's `GRPOTrainer` does with a rollout batch: rewards, log-probs, and the order of its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from .construction import ENGINE_HOME


# TRL's module as a name, because importing it imports vLLM.
_GRPO_TRAINER = "trl.trainer.grpo_trainer"


# Arguments of `GRPOTrainer._get_per_token_logps_and_entropies` for text.
TEXT = {"model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy", "compute_aux_loss"}


def is_text(arguments: Mapping[str, Any]) -> bool:
    """
    Whether TRL's method for log-probs gets neither images nor token types.

    Args:
        arguments: The arguments of `GRPOTrainer._get_per_token_logps_and_entropies` (TRL 1.16) by name. One that a
            later version adds counts as no text, so that its rows are padded by TRL itself.
    """
    return all(value is None for name, value in arguments.items() if name not in TEXT)


def shuffled_in(order_of: Callable[[int], Tensor]) -> AbstractContextManager:
    """
    Make `GRPOTrainer._prepare_inputs` shuffle a rollout batch into an order that is known before.

    TRL (1.16) draws its order in `shuffle_sequence_dict` after it computes `old`, so the micro-batches of `old` differ
    from those of the loss. Packed, they would have other shapes, for which kernels round differently, and the first
    ratio would not be 1. If the function is gone, this raises `AttributeError`.

    Args:
        order_of: From a number of rows to their order, int64 `(rows,)`.
    """

    def shuffle(batch: dict[str, Any]) -> dict[str, Any]:
        return in_order(batch, order_of)

    return patch(f"{_GRPO_TRAINER}.shuffle_sequence_dict", shuffle)


def in_order(batch: Mapping[str, Any], order_of: Callable[[int], Tensor]) -> dict[str, Any]:
    """
    Put the rows of a rollout batch into an order.

    Args:
        batch: By name a tensor or a list with an entry for each row. `None` and scalar tensors have no rows, and stay
            as they are.
        order_of: From a number of rows to their order, int64 `(rows,)`.

    Raises:
        ValueError: if the values have different numbers of rows.
    """
    # Also lists (images), which TRL splits into micro-batches beside the tensors: their entries must move with the
    # rows.
    rows = {name: value for name, value in batch.items() if _has_rows(value)}
    numbers = {len(value) for value in rows.values()}
    if len(numbers) != 1:
        raise ValueError(f"A rollout batch must have one number of rows, got {sorted(numbers)} in {sorted(rows)}.")

    # One order for all values, or an advantage would meet another row's tokens.
    order = order_of(numbers.pop())
    ordered = dict(batch)
    for name, value in rows.items():
        if isinstance(value, Tensor):
            ordered[name] = value[order]
        else:
            ordered[name] = [value[row] for row in order.tolist()]
    return ordered


def _has_rows(value: Any) -> bool:
    """Whether a value of a rollout batch has an entry for each row."""
    if value is None:
        return False
    return not isinstance(value, torch.Tensor) or value.ndim > 0


def extracted_by(extract: Callable[..., Any]) -> AbstractContextManager:
    """
    Make `VLLMGeneration.generate` read log-probs from vLLM's outputs by another function than TRL's.

    Replaced is `extract_logprobs` (TRL 1.16), which reads objects that vLLM makes for each token. If it is gone, this
    raises `AttributeError`.

    Args:
        extract: With the arguments and the result of `extract_logprobs`.
    """
    return patch(f"{ENGINE_HOME}.extract_logprobs", extract)


def home_of_rewards(trainer_class: type) -> str | None:
    """
    The module of TRL whose `_calculate_rewards` a trainer has, if it is that of GRPO or RLOO.

    Of other trainers some have a method of their own (SDPO in TRL 1.16), which gathers in another way: `None`.

    Args:
        trainer_class: A subclass of a trainer of TRL with rewards.
    """
    # The class that defines the method, not the one that inherits it: `gather` is replaced where the method looks it
    # up.
    for ancestor in trainer_class.__mro__:
        if ancestor.__module__.startswith("trl.") and "_calculate_rewards" in vars(ancestor):
            is_known = ancestor.__name__ in ("GRPOTrainer", "RLOOTrainer")
            return ancestor.__module__ if is_known else None
    return None


def ungathered_rewards(home: str) -> AbstractContextManager:
    """
    Make `_calculate_rewards` of TRL's GRPO and RLOO return the rewards of this process only.

    Its last step (TRL 1.16) is `gather`, where the others would wait forever for a process whose reward function
    raised. If the module no longer has that name, this raises `AttributeError`.

    Args:
        home: The module, from [`home_of_rewards`].
    """
    return patch(f"{home}.gather", lambda rewards: rewards)
