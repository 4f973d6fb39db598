"""
Micro-batches that share a pass in training, although the Trainer asks for one loss after the other.

Their losses are computed when the last one comes, from one forward, and so have one backward. Until then the Trainer
gets losses of zero. Each loss stays that of its micro-batch, so TRL's normalization and metrics stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


# What TRL's loss scores. All micro-batches of a rollout batch have the same columns.
SCORED = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")


def count_tokens(micro_batches: Sequence[dict[str, Any]]) -> Tensor:
    """
    Numbers of real tokens, int64 `(M,)`.

    Args:
        micro_batches: TRL's, with `prompt_mask` and `completion_mask` `(rows, columns)`.
    """
    # Not `numel`: padding takes no room in a pass.
    counts = [micro_batch["prompt_mask"].sum() + micro_batch["completion_mask"].sum() for micro_batch in micro_batches]
    return torch.stack(counts)


def scored_arguments(micro_batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """
    The arguments with which TRL's loss scores its tokens, for the rows of several micro-batches.

    Args:
        micro_batches: TRL's, of one rollout batch.
    """
    joined = {name: torch.cat([micro_batch[name] for micro_batch in micro_batches]) for name in SCORED}
    return {
        "input_ids": torch.cat((joined["prompt_ids"], joined["completion_ids"]), dim=1),
        "attention_mask": torch.cat((joined["prompt_mask"], joined["completion_mask"]), dim=1),
        "logits_to_keep": joined["completion_ids"].shape[1],
        "compute_entropy": True,
    }


class MicroBatchGroups:
    """
    The groups of the current rollout batch, and the micro-batches that wait for the last one of theirs.

    Args:
        merge: Takes the numbers of tokens of micro-batches `(M,)` and the numbers of their updates, and returns the
            sizes of the groups; see [`PackedPasses.merge`].
    """

    def __init__(self, merge: Callable[[Tensor, Sequence[int]], list[int]]) -> None:
        self._merge = merge
        self._rollout_batch: Any = None
        self._cuts: list[int] = []
        self._group_of: list[int] = []
        self._waiting: list[dict[str, Any]] = []

    def choose(self, rollout_batch: Sequence[dict[str, Any]], updates: Sequence[int]) -> None:
        """
        Choose the groups of a rollout batch, once for each time that it is used. All processes call it together.

        Args:
            rollout_batch: Its micro-batches.
            updates: For each of them the number of its update.
        """
        # TRL keeps one list of micro-batches for all steps of a rollout batch, also over `num_iterations`. Its updates
        # may be cut differently when it is used again, and a resumed run, which sees only its rest, must cut as the
        # first one did.
        cuts = [update - updates[0] for update in updates]
        if rollout_batch is self._rollout_batch and cuts == self._cuts:
            return

        self._rollout_batch = rollout_batch
        self._cuts = cuts
        # A run that stopped in the middle of an update left some.
        self._waiting = []

        self._group_of = []
        for group, size in enumerate(self._merge(count_tokens(rollout_batch), updates)):
            self._group_of += [group] * size

    def take(self, micro_batch: dict[str, Any], place: int, *, ends_update: bool) -> list[dict[str, Any]]:
        """
        Add the next micro-batch to its group.

        Args:
            micro_batch: The micro-batch.
            place: Its place in the rollout batch.
            ends_update: Whether the optimizer steps after it, so that its group must end.

        Returns:
            All micro-batches of the group that share a pass if this is the last one, otherwise none.
        """
        self._waiting.append(micro_batch)

        is_last = place + 1 == len(self._group_of)
        ends_group = is_last or self._group_of[place] != self._group_of[place + 1]
        if not (ends_group or ends_update):
            return []

        together = self._waiting
        self._waiting = []
        return together
