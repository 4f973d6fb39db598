"""The forward pass of a loss, carried past TRL's `_compute_loss`, which makes it itself and returns only the loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from ..learner.logps import TrlResult


class LossForward:
    """
    Carries the result of a forward pass into TRL's loss, and out of it.

    Into it: of a pass that ran before, because several micro-batches shared it. Out of it: log-probs and entropies,
    for a loss and for metrics of our own. TRL's `_get_per_token_logps_and_entropies` is where both go through.
    """

    def __init__(self) -> None:
        self._shared: TrlResult | None = None
        self._last: TrlResult | None = None

    @contextmanager
    def sharing(self, result: TrlResult) -> Iterator[None]:
        """
        Let the loss in the block use a forward that ran before.

        Args:
            result: Log-probs and entropies `(B, T)` of its micro-batch, and the balancing loss.

        Raises:
            RuntimeError: if the loss did not use it.
        """
        self._shared = result
        try:
            yield
            # Read only after a block without an error, which would otherwise be hidden by this one.
            is_unused = self._shared is not None
        finally:
            # After an error, too (Ctrl-C in a notebook): the next forward is of other rows.
            self._shared = None
        if is_unused:
            raise RuntimeError("A loss without `_get_per_token_logps_and_entropies` cannot share a pass.")

    def take_shared(self) -> TrlResult | None:
        """The result that the loss shall use in place of a forward of its own; `None` if it shall make one."""
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
