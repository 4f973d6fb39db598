"""The place of a callback."""

from types import SimpleNamespace

from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler, TrainerControl, TrainerState

from qarl_trl._compat.training_loop import add_first_callback


class Noting(TrainerCallback):
    """Notes that it was told of a step."""

    def __init__(self, name, notes):
        self.name = name
        self.notes = notes

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.notes.append(self.name)


def test_the_first_callback_is_told_before_those_that_were_there():
    notes = []
    handler = CallbackHandler([Noting("user's", notes)], None, None, None, None)

    # Of a trainer the function reads the handler alone.
    add_first_callback(SimpleNamespace(callback_handler=handler), Noting("ours", notes))
    # Control: by transformers' own way a callback comes last.
    handler.add_callback(Noting("added later", notes))
    handler.on_optimizer_step(None, TrainerState(), TrainerControl())

    assert notes == ["ours", "user's", "added later"]
