"""The forward pass of a loss, carried past TRL's `_compute_loss`, which makes it itself and returns only the loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from accelerate.logging import get_logger
from torch import Tensor

from ..learner.logps import TrlResult
from ..quant.samples import are_equal


logger = get_logger(__name__)


class LossForward:
    """
    Carries the result of a forward pass into TRL's loss, and out of it.

    Into it: of a pass that ran before, because several micro-batches shared it. Out of it: log-probs and entropies,
    for a loss and for metrics of our own. TRL's `_get_per_token_logps_and_entropies` is where both go through.
    """

    def __init__(self) -> None:
        self._shared: TrlResult | None = None
        self._scored: Mapping[str, Any] = {}
        self._scored_something_else = False
        self._last: TrlResult | None = None

    @contextmanager
    def sharing(self, result: TrlResult, scored: Mapping[str, Any]) -> Iterator[None]:
        """
        Let the loss in the block use a forward that ran before.

        Args:
            result: Log-probs and entropies `(B, T)` of its micro-batch, and the balancing loss.
            scored: What it is of, by the arguments of TRL's method: `model`, `input_ids`, `attention_mask` and
                `logits_to_keep`; and `adapters` and `samples` (of weights), which tell the policies of one model
                apart.

        Raises:
            RuntimeError: if the loss scored nothing.
        """
        self._shared = result
        self._scored = scored
        self._scored_something_else = False
        try:
            yield
            # Read only after a block without an error, which would otherwise be hidden by this one.
            is_unused = self._shared is not None and not self._scored_something_else
        finally:
            # After an error, too (Ctrl-C in a notebook): the next forward is of other rows.
            self._shared = None
            self._scored = {}
        if is_unused:
            raise RuntimeError("A loss without `_get_per_token_logps_and_entropies` cannot share a pass.")

    @property
    def is_sharing(self) -> bool:
        """Whether a loss is computed that shall use a forward which ran before, and has not yet."""
        return self._shared is not None

    def take_shared(self, asked: Mapping[str, Any]) -> TrlResult | None:
        """
        The result that the loss shall use in place of a forward of its own.

        Args:
            asked: The arguments of TRL's method, as for [`sharing`].

        Returns:
            `None` if it shall make one: there is none, or the call is of something else. A user's `_compute_loss` may
            score another model, the model without its adapter or with other weights, or other rows.
        """
        # Whatever a loss is compared with is scored without gradients, or is another policy.
        if self._shared is None or not torch.is_grad_enabled():
            return None
        if asked["model"] is not self._scored["model"] or asked["adapters"] != self._scored["adapters"]:
            return None
        if not are_equal(asked["samples"], self._scored["samples"]):
            # Of the policy at other weights, such as those of a sharpness-aware step. It need not score itself again.
            self._scored_something_else = True
            return None
        if not _are_of_same_rows(asked, self._scored):
            self._scored_something_else = True
            logger.warning_once(
                "A _compute_loss scores other rows than those of its micro-batch, whose pass is wasted then. With a "
                "compute_loss of its own a class gets a pass for each micro-batch."
            )
            return None

        shared = self._shared
        self._shared = None
        return shared

    def note(self, result: TrlResult) -> None:
        """
        Note the result of a forward, before TRL's method returns it.

        Args:
            result: Log-probs and entropies `(B, T)`, and the balancing loss.
        """
        self._last = result

    @contextmanager
    def as_called(self, trainer: Any) -> Iterator[None]:
        """
        Note forwards in the block as their caller gets them: a user's class may change what our method returns.

        Args:
            trainer: The trainer, whose `_get_per_token_logps_and_entropies` calls [`note`].
        """
        score = trainer._get_per_token_logps_and_entropies

        def score_and_note(*args: Any, **kwargs: Any) -> TrlResult:
            result = score(*args, **kwargs)
            # Only if our method ran below: otherwise the hook is lost, which [`take`] reports.
            if self._last is not None:
                self._last = result
            return result

        with patch.object(trainer, "_get_per_token_logps_and_entropies", score_and_note):
            yield

    def forget(self) -> None:
        """Before a loss: forget forwards that are of none, such as that of `old`."""
        self._last = None

    def take(self) -> tuple[Tensor, Tensor | None]:
        """
        After a loss: log-probs and entropies `(B, T)` of its forward, only once.

        Raises:
            RuntimeError: if it made none.
        """
        last = self._last
        self._last = None
        if last is None:
            raise RuntimeError("TRL computed the loss without `_get_per_token_logps_and_entropies`: untested version.")
        logps, entropies, _ = last
        return logps, entropies


def _are_of_same_rows(asked: Mapping[str, Any], scored: Mapping[str, Any]) -> bool:
    """Whether two calls of TRL's method are of the same tokens."""
    if asked["logits_to_keep"] != scored["logits_to_keep"]:
        return False
    return all(torch.equal(asked[name], scored[name]) for name in ("input_ids", "attention_mask"))
