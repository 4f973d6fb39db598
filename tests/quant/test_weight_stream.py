"""`qarl_trl.quant.weight_stream`: every process reads all weights, whatever happens to its send."""

import pytest
import torch

from qarl_trl.quant.weight_stream import WeightStream


def some_weights(read):
    """Three weights; `read` gets the names of those that were asked for."""
    for name in ("a", "b", "c"):
        read.append(name)
        yield name, torch.zeros(1)


def test_a_process_whose_send_failed_still_reads_all_weights():
    """The other processes gather them together with this one."""
    read = []
    weights = WeightStream(some_weights(read))

    with pytest.raises(ValueError, match="no memory"), weights.read_to_the_end():
        next(iter(weights))
        raise ValueError("no memory")
    assert read == ["a", "b", "c"]
    # Three float32 numbers.
    assert weights.bytes_read == 3 * 4

    # Control: Ctrl-C stops at once.
    read.clear()
    weights = WeightStream(some_weights(read))
    with pytest.raises(KeyboardInterrupt), weights.read_to_the_end():
        next(iter(weights))
        raise KeyboardInterrupt
    assert read == ["a"]


def test_a_process_that_sends_nothing_reads_all_weights():
    read = []

    with WeightStream(some_weights(read)).read_to_the_end():
        pass

    assert read == ["a", "b", "c"]


def test_the_error_of_a_send_stays_visible_if_reading_fails_too():
    def broken():
        raise KeyError("gather")
        yield

    with pytest.raises(KeyError, match="gather") as failure, WeightStream(broken()).read_to_the_end():
        raise ValueError("no memory")

    # Python prints both: the one of the send is the cause that a user must see.
    assert isinstance(failure.value.__context__, ValueError)
