"""Faults in a running job without an engine: what TRL's users expect, or one error, and never a step on NaN."""

from __future__ import annotations

import functools
import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from learner.test_features import rollout
from slow.toys import distinct_characters, prompts, save_model, settings
from transformers import TrainerCallback

from qarl_trl import QaRLConfig, QaRLTrainer, guards


NAN, INF = math.nan, math.inf


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), layers=1)


@pytest.fixture
def make(model, tmp_path):
    def build(
        reward: Any = distinct_characters, ends: bool = True, spoil: Any = lambda given: given, **changes: Any
    ) -> QaRLTrainer:
        small = {"use_vllm": False, "bf16": False, "max_completion_length": 20, "per_device_train_batch_size": 4}
        config = QaRLConfig(**settings(tmp_path / "run", **small | changes))

        def trajectories(*given: Any) -> Any:
            return spoil(rollout(*given, tools=False, ends=ends))

        return QaRLTrainer(model, reward, config, train_dataset=prompts(), rollout_func=trajectories)

    return build


class SpoilGradient(TrainerCallback):
    """Puts `value` into one gradient of the second update."""

    def __init__(self, value: float) -> None:
        self.value = value

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 1:
            model.model.norm.weight.register_hook(lambda g: g.index_fill(0, torch.tensor([3]), self.value))


def master_weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_gradient_that_is_no_number_stops_before_the_step(make, value):
    trainer = make()
    trainer.add_callback(SpoilGradient(value))
    with pytest.raises(RuntimeError, match=f"gradient norm is {value}"):
        trainer.train()
    assert trainer.state.global_step == 1
    assert all(p.isfinite().all() for p in master_weights(trainer).values())


def test_without_the_guard_one_nan_spoils_every_weight(make):
    """The control: the Trainer's clipping multiplies all gradients by the NaN, and no logged loss shows it."""
    trainer = make(max_steps=2, quant_scheme=None, loss_type="grpo")
    trainer.add_callback(SpoilGradient(NAN))
    with patch.object(guards, "check_gradient", lambda *_: None):
        trainer.train()
    assert not any(p.isfinite().all() for p in master_weights(trainer).values())
    assert all(math.isfinite(row["loss"]) for row in trainer.state.log_history if "loss" in row)


def rewarded(function):
    def reward(completions, **_):
        return function(distinct_characters(completions))

    return reward


def broken(_):
    raise KeyError("no such answer")


@pytest.mark.parametrize(
    ("function", "kind", "words"),
    [
        (broken, KeyError, "no such answer"),
        (lambda r: [INF, *r[1:]], ValueError, "'reward' gave an infinite reward"),
        (lambda r: r[1:], ValueError, "'reward' returned 7 rewards, but 8 were expected"),
    ],
)
def test_a_reward_function_that_is_wrong_stops_the_run_in_its_own_words(make, function, kind, words):
    with pytest.raises(kind, match=words):
        make(rewarded(function)).train()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda o: o | {"completion_ids": [[], *o["completion_ids"][1:]]},
        lambda o: o | {"prompt_ids": [], "completion_ids": []},
        lambda o: o | {"completion_ids": o["completion_ids"][1:]},
        lambda o: o | {"logprobs": [[-1.0]] * 8},
    ],
)
def test_a_rollout_that_lacks_something_is_one_error(make, spoil):
    trainer = make(spoil=spoil)
    before = master_weights(trainer)
    with pytest.raises(ValueError, match="rollout_func must return, for each of 8 prompts"):
        trainer.train()
    assert all(torch.equal(p, before[name]) for name, p in master_weights(trainer).items())


def test_log_probs_of_a_rollout_are_checked_and_left_alone(make):
    """Control: without the check TRL takes those of too few tokens."""
    right, wrong = (
        lambda o: o | {"logprobs": [[-1.0] * len(c) for c in o["completion_ids"]]},
        lambda o: o | {"logprobs": [[-1.0]] * len(o["completion_ids"])},
    )
    make(spoil=right, max_steps=1).train()
    with patch.object(guards, "check_rollout", lambda *_: None):
        assert make(spoil=wrong, max_steps=1).train().global_step == 1


def test_completions_that_no_function_rewards_teach_nothing(make):
    trainer = make(rewarded(lambda r: [None] * len(r)), max_steps=2)
    before = master_weights(trainer)
    trainer.train()
    assert all(torch.equal(p, before[name]) for name, p in master_weights(trainer).items())


class TwoProcesses:
    """This process and another one, whose rewards are given; without them it failed."""

    num_processes, device = 2, "cpu"

    def __init__(self, others: torch.Tensor | None, first: bool) -> None:
        self.others, self.first = others, first

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        others = torch.tensor([self.others is None]) if own.dtype == torch.bool else self.others
        return torch.cat([own, others] if self.first else [others, own])


def test_both_processes_learn_that_the_rewards_of_one_failed():
    healthy = torch.tensor([[1.0], [NAN]])
    failing = TwoProcesses(healthy, first=False)
    with pytest.raises(KeyError, match="no such answer"):
        guards.rewards_of_all(functools.partial(broken, None), ["f"], failing)
    waiting = TwoProcesses(None, first=True)
    with pytest.raises(RuntimeError, match="The rewards failed in process 1, which says why"):
        guards.rewards_of_all(lambda: healthy, ["f"], waiting)
    endless = TwoProcesses(torch.full((2, 1), -INF), first=True)  # rewards, and no failure
    with pytest.raises(ValueError, match="'f' gave an infinite reward"):
        guards.rewards_of_all(lambda: healthy, ["f"], endless)
    assert guards.rewards_of_all(lambda: healthy, ["f"], TwoProcesses(healthy, first=True)).shape == (4, 1)


def test_a_second_train_begins_with_a_rollout_of_its_own(make):
    """What a failed call left would be of other weights. TRL goes on with it."""
    trainer = make(max_steps=1)
    rollouts = []
    trajectories = trainer.rollout_func
    trainer.rollout_func = lambda *given: rollouts.append(trainer.state.global_step) or trajectories(*given)
    trainer.train()
    trainer.train()
    assert rollouts == [0, 0]
