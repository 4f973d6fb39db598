"""Which callbacks and methods are a user's: whatever does not come from the libraries."""

import functools
from types import SimpleNamespace

import pytest
from transformers import TrainerCallback
from transformers.trainer_callback import DefaultFlowCallback

from qarl_trl.trainers.user_code import callback_of_user, is_of_library, method_of_user


class Acting(TrainerCallback):
    def on_substep_end(self, args, state, control, **kwargs):
        pass


class Silent(TrainerCallback):
    pass


def loss(trainer):
    return 0.0


def trainer_with(*callbacks, **methods):
    return SimpleNamespace(callback_handler=SimpleNamespace(callbacks=list(callbacks)), **methods)


@pytest.mark.parametrize(
    ("module", "expected"),
    [("trl.trainer.grpo_trainer", True), ("qarl_trl", True), ("trl_of_mine.trainer", False), ("__main__", False)],
)
def test_a_module_belongs_to_a_library_by_its_package(module, expected):
    assert is_of_library(module) is expected


def test_a_callback_is_a_users_if_it_acts_and_comes_from_elsewhere():
    acting = Acting()
    assert callback_of_user(trainer_with(DefaultFlowCallback(), Silent(), acting), "on_substep_end") is acting

    assert callback_of_user(trainer_with(DefaultFlowCallback(), acting), "on_step_end") is None


def test_a_callback_may_get_its_method_in_a_script():
    callback = Silent()
    callback.on_step_end = lambda *_, **__: None

    assert callback_of_user(trainer_with(callback), "on_step_end") is callback


@pytest.mark.parametrize(
    "method",
    [loss, functools.partial(loss, None), functools.wraps(DefaultFlowCallback.on_step_end)(lambda trainer: 0.0)],
)
def test_a_method_is_a_users_also_in_a_wrapper(method):
    trainer = trainer_with(compute_loss=method, log=DefaultFlowCallback.on_step_end)

    assert method_of_user(trainer, ("missing", "log", "compute_loss")) == "compute_loss"
    assert method_of_user(trainer, ("missing", "log")) is None
