"""`qarl_trl.trainers.loss_forward`: one forward for TRL's loss and for ours, and never that of another loss."""

import pytest
import torch
from accelerate import PartialState

from qarl_trl.trainers.loss_forward import LossForward


def result(value):
    return torch.tensor([[value]]), torch.zeros(1, 1), None


def test_a_loss_takes_its_own_forward_once():
    # That of `old`, which a loss must not take for its own.
    forward = LossForward()
    forward.note(result(1.0))

    forward.forget()
    with pytest.raises(RuntimeError, match="without `_get_per_token_logps_and_entropies`"):
        forward.take()

    forward.note(result(2.0))
    logps, entropies = forward.take()
    assert logps.item() == 2.0
    assert entropies.item() == 0.0
    with pytest.raises(RuntimeError, match="without `_get_per_token_logps_and_entropies`"):
        forward.take()


def scored(model="policy", token=3, keep=1, adapter="default", weight=1.0):
    """Arguments of TRL's method, the adapter in use, and a sample of the weights."""
    ids = torch.tensor([[2, token]])
    return {
        "model": model,
        "adapters": frozenset([(adapter, False)]),
        "samples": {"cpu": torch.tensor([weight])},
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "logits_to_keep": keep,
    }


def test_a_shared_forward_is_taken_once_by_the_loss_in_the_block():
    forward = LossForward()
    assert forward.take_shared(scored()) is None

    shared = result(1.0)
    with forward.sharing(shared, scored()):
        assert forward.take_shared(scored()) is shared
        assert forward.take_shared(scored()) is None

    # Control: a loss that makes a forward of its own.
    with pytest.raises(RuntimeError, match="cannot share a pass"), forward.sharing(shared, scored()):
        pass


def test_a_shared_forward_is_not_that_of_anything_else():
    """A user's loss may score what it compares with before it asks for its own log-probs."""
    PartialState(cpu=True)  # for the log
    forward = LossForward()
    shared = result(1.0)

    with forward.sharing(shared, scored()):
        assert forward.take_shared(scored(model="teacher")) is None
        assert forward.take_shared(scored(adapter="reference")) is None
        assert forward.take_shared(scored(weight=2.0)) is None
        with torch.no_grad():  # the policy without its adapter
            assert forward.take_shared(scored()) is None
        assert forward.take_shared(scored(token=4)) is None
        assert forward.take_shared(scored(keep=2)) is None
        assert forward.take_shared(scored()) is shared

    # A loss of other rows makes a forward of its own, and says so.
    with forward.sharing(shared, scored()):
        assert forward.take_shared(scored(token=4)) is None
    # One at other weights, as a sharpness-aware step has it.
    with forward.sharing(shared, scored()):
        assert forward.take_shared(scored(weight=2.0)) is None
    # What a loss is compared with is none.
    with pytest.raises(RuntimeError, match="cannot share a pass"), forward.sharing(shared, scored()):
        assert forward.take_shared(scored(model="teacher", token=4)) is None


def test_a_forward_that_an_error_left_over_is_not_that_of_a_later_loss():
    """A notebook goes on after Ctrl-C, with an evaluation of other rows."""
    forward = LossForward()

    with pytest.raises(KeyboardInterrupt), forward.sharing(result(1.0), scored()):
        raise KeyboardInterrupt

    assert forward.take_shared(scored()) is None
