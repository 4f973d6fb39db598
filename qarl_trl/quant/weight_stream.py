"""The weights of one sync or one file, which every process of a run must read to the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor


class WeightStream:
    """
    The weights of one sync or one file, read once.

    Args:
        weights: Their names and tensors.

    Attributes:
        bytes_read: Sizes of the tensors that were read so far.
    """

    def __init__(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        self.bytes_read = 0
        self._weights = weights

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._weights:
            self.bytes_read += tensor.nbytes
            yield name, tensor

    @contextmanager
    def read_to_the_end(self) -> Iterator[None]:
        """
        After the block read what it left, also if it failed.

        Sharded weights are gathered while they are read, by all processes together. So each process must read all of
        them, also one that sends or writes nothing, and one in which the send or the file failed: the others would
        wait for it forever. Only Ctrl-C stops at once.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            # Raised below, when the other processes need this one no longer.
            failure = error

        # Costs nothing where all is read.
        for _ in self:
            pass
        if failure is not None:
            raise failure
