"""Faults in a running job without an engine: what TRL's users expect, or one error, and never a step on NaN."""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from learner.test_features import rollout
from slow.toys import distinct_characters, logged, prompts, save_model, settings
from toy_runs import changed, master_weights
from transformers import TrainerCallback

from qarl_trl import QaRLConfig, QaRLTrainer, guards


NAN = math.nan
INF = math.inf


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a small model."""
    return save_model(tmp_path_factory.mktemp("model"), layers=1)


@pytest.fixture
def make(model, tmp_path):
    """Make a trainer whose rollouts come from a function; `spoil` changes what this returns."""

    def build(reward: Any = distinct_characters, spoil: Any = None, **changes: Any) -> QaRLTrainer:
        small = {"use_vllm": False, "bf16": False, "max_completion_length": 20, "per_device_train_batch_size": 4}
        # Two prompts with four answers each: 8 rewards in a rollout batch, as the errors say.
        config = QaRLConfig(**settings(tmp_path / "run", **small | changes))

        def trajectories(*arguments: Any) -> Any:
            output = rollout(*arguments, tools=False, ends=True)
            return output if spoil is None else spoil(output)

        return QaRLTrainer(model, reward, config, train_dataset=prompts(), rollout_func=trajectories)

    return build


class SpoilGradient(TrainerCallback):
    """Puts `value` into one gradient of the second update."""

    def __init__(self, value: float) -> None:
        self.value = value

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        # The second: the weights are no longer those of the file.
        if state.global_step == 1:
            model.model.norm.weight.register_hook(lambda g: g.index_fill(0, torch.tensor([3]), self.value))


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_gradient_that_is_no_number_stops_before_the_step(make, value):
    trainer = make()
    trainer.add_callback(SpoilGradient(value))

    with pytest.raises(RuntimeError, match=f"gradient norm is {value}"):
        trainer.train()

    assert trainer.state.global_step == 1
    for name, weight in master_weights(trainer).items():
        assert weight.isfinite().all(), name


def test_without_the_guard_one_nan_spoils_every_weight(make):
    """The control: the Trainer's clipping multiplies all gradients by the NaN, and no logged loss shows it."""
    # Without low bits and TBPO: nothing else of ours may stop the run.
    trainer = make(max_steps=2, quant_scheme=None, loss_type="grpo")
    trainer.add_callback(SpoilGradient(NAN))

    with patch.object(guards, "check_gradient", lambda *_: None):
        trainer.train()

    for name, weight in master_weights(trainer).items():
        assert not weight.isfinite().all(), name
    losses = logged(trainer, "loss")
    assert len(losses) == 2
    assert all(map(math.isfinite, losses))


def rewarded(function):
    """A reward function that changes the rewards of a right one."""

    def reward(completions, **_):
        return function(distinct_characters(completions))

    return reward


def broken(_):
    """Fails, as a user's reward may."""
    raise KeyError("no such answer")


@pytest.mark.parametrize(
    ("function", "kind", "words"),
    [
        # A user's own error keeps its kind.
        (broken, KeyError, "no such answer"),
        (lambda rewards: [INF, *rewards[1:]], ValueError, "'reward' gave an infinite reward"),
        (lambda rewards: [-1e20, *rewards[1:]], ValueError, "'reward' gave the reward -1e[+]20. .* at most 1e[+]15"),
        (lambda rewards: rewards[1:], ValueError, "'reward' returned 7 rewards, but 8 were expected"),
    ],
)
def test_a_reward_function_that_is_wrong_stops_the_run_in_its_own_words(make, function, kind, words):
    with pytest.raises(kind, match=words):
        make(rewarded(function)).train()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda output: output | {"completion_ids": [[], *output["completion_ids"][1:]]},
        lambda output: output | {"prompt_ids": [], "completion_ids": []},
        lambda output: output | {"completion_ids": output["completion_ids"][1:]},
        lambda output: output | {"logprobs": [[-1.0]] * 8},
    ],
    ids=["an empty completion", "nothing", "a completion too few", "log-probs of one token"],
)
def test_a_rollout_that_lacks_something_is_one_error(make, spoil):
    trainer = make(spoil=spoil)
    before = master_weights(trainer)

    with pytest.raises(ValueError, match="rollout_func must return, for each of 8 prompts"):
        trainer.train()

    assert not changed(before, master_weights(trainer))


def test_a_rollout_without_a_list_names_it(make):
    trainer = make(spoil=lambda output: {name: rows for name, rows in output.items() if name != "logprobs"})

    with pytest.raises(ValueError, match="rollout_func must return prompt_ids, .*, got no .'logprobs'"):
        trainer.train()


def test_log_probs_of_a_rollout_are_checked_and_left_alone(make):
    """Control: without the check TRL takes those of too few tokens."""

    def with_all(output):
        logprobs = []
        for tokens in output["completion_ids"]:
            logprobs.append([-1.0] * len(tokens))
        return output | {"logprobs": logprobs}

    def with_too_few(output):
        return output | {"logprobs": [[-1.0]] * len(output["completion_ids"])}

    make(spoil=with_all, max_steps=1).train()

    with patch.object(guards, "check_rollout", lambda *_: None):
        assert make(spoil=with_too_few, max_steps=1).train().global_step == 1


def test_a_mask_of_tools_must_be_of_all_tokens(make):
    """TRL fills it up with ones, so the last tokens of a tool would be trained on."""

    def with_short_mask(output):
        return output | {"env_mask": [[1] * len(tokens[1:]) for tokens in output["completion_ids"]]}

    def with_mask(output):
        return output | {"env_mask": [torch.ones(len(tokens)).long() for tokens in output["completion_ids"]]}

    trainer = make(spoil=with_short_mask)
    before = master_weights(trainer)
    with pytest.raises(ValueError, match="an env_mask with a number for each token of completion_ids, got"):
        trainer.train()
    assert not changed(before, master_weights(trainer))

    # Controls: a whole one, and none.
    assert make(spoil=with_mask, max_steps=1).train().global_step == 1
    assert make(spoil=lambda output: output | {"env_mask": None}, max_steps=1).train().global_step == 1


def test_a_rollout_without_log_probs_is_refused_where_the_loss_needs_them(make):
    """TRL fails in a subtraction, after the batch was scored."""

    def without_logps(weighs_mismatch):
        trainer = SimpleNamespace(
            accelerator=TwoProcesses(torch.zeros(1), first=True), args=SimpleNamespace(weighs_mismatch=weighs_mismatch)
        )
        output = {"prompt_ids": [[1], [2]], "completion_ids": [[3], [4, 5]], "logprobs": None}
        return guards.rollout_of_all(lambda prompts, trainer: output, ["a", "b"], trainer)

    with pytest.raises(ValueError, match="rollout_func must return logprobs, got None.*correction: false"):
        without_logps(weighs_mismatch=True)

    # Control: without the correction nothing needs them, and the trainer says so.
    assert without_logps(weighs_mismatch=False)["logprobs"] is None
    assert make(spoil=lambda output: output | {"logprobs": None}, max_steps=1).train().global_step == 1


@pytest.mark.parametrize("is_read", [True, False])
def test_the_error_of_a_server_that_a_rollout_func_asked_is_raised(is_read):
    """The client keeps errors for later, and gives back no completions."""

    class Client:
        def raise_failure(self):
            raise ConnectionError("the server died")

    def rollout(prompts, trainer):
        completions = []
        return {"prompt_ids": [], "completion_ids": [completions[0]] if is_read else completions}

    trainer = SimpleNamespace(
        accelerator=TwoProcesses(torch.zeros(1), first=True),
        args=SimpleNamespace(weighs_mismatch=False),
        vllm_generation=SimpleNamespace(vllm_client=Client()),
    )
    with pytest.raises(ConnectionError, match="the server died"):
        guards.rollout_of_all(rollout, ["a", "b"], trainer)

    # Control: without a server it is the function's own error.
    del trainer.vllm_generation
    with pytest.raises(IndexError if is_read else ValueError):
        guards.rollout_of_all(rollout, ["a", "b"], trainer)


def test_a_rollout_batch_without_rewards_stops_the_run(make):
    trainer = make(rewarded(lambda rewards: [None] * len(rewards)), max_steps=2)
    before = master_weights(trainer)

    with pytest.raises(ValueError, match="reward gave None for all 8, so nothing can be learned"):
        trainer.train()

    assert not changed(before, master_weights(trainer))


def test_a_batch_without_rewards_in_the_middle_of_a_run_is_let_pass_and_many_are_not(caplog):
    batches = guards.ScoredBatches()
    without = torch.full((4, 2), math.nan)

    batches.check(torch.tensor([[math.nan, 1.0]] * 4), ["a", "b"], is_resumed=False)
    for _ in range(guards.MOST_WITHOUT_REWARDS - 1):
        batches.check(without, ["a", "b"], is_resumed=False)
    assert "a, b gave None for all 4. Nothing is learned from it." in caplog.text
    with pytest.raises(ValueError, match="a, b gave None for all 4, so nothing can be learned"):
        batches.check(without, ["a", "b"], is_resumed=False)

    # A resumed run may meet one first.
    guards.ScoredBatches().check(without, ["a", "b"], is_resumed=True)
    # Control: a new run may not.
    with pytest.raises(ValueError, match="nothing can be learned"):
        guards.ScoredBatches().check(without, ["a", "b"], is_resumed=False)


def test_a_rollout_batch_with_one_group_of_rewards_is_trained_on(make):
    """Control: TRL leaves the others out."""
    trainer = make(rewarded(lambda rewards: [*rewards[:4], *[None] * 4]), max_steps=1)
    before = master_weights(trainer)

    trainer.train()

    assert changed(before, master_weights(trainer))


def warnings_about_learning(caplog):
    said = []
    for record in caplog.records:
        if "nothing is learned" in record.getMessage():
            said.append(record.getMessage())
    return said


def same_answers(output):
    """All answers of a group of four are its first one."""
    answers = []
    for first in output["completion_ids"][::4]:
        answers += [first] * 4
    return output | {"completion_ids": answers}


@pytest.mark.parametrize(
    ("function", "spoil", "words"),
    [
        (lambda rewards: [0.0] * len(rewards), None, "equal rewards, for each of its 2 prompts"),
        (lambda rewards: rewards, same_answers, "all answers to a prompt are equal, for each of its 2 prompts"),
        # Controls: one group differs; and TRL fills the others.
        (lambda rewards: [0.0, 1.0, *[0.0] * 6], None, None),
    ],
)
def test_a_first_rollout_batch_that_teaches_nothing_is_said_once(make, caplog, function, spoil, words):
    make(rewarded(function), spoil, max_steps=4).train()

    said = warnings_about_learning(caplog)
    assert len(said) == (words is not None)
    assert words is None or words in said[0]


class TwoProcesses:
    """
    An accelerator of this process and another one.

    Args:
        others: The rewards of the other process, `None` if it failed.
        first: Whether this process is the first one.
    """

    num_processes = 2
    device = "cpu"

    def __init__(self, others: torch.Tensor | None, first: bool) -> None:
        self.others = others
        self.first = first

    def gather(self, ours: torch.Tensor) -> torch.Tensor:
        others = self.others
        # A boolean says whether a process failed. All gather it first, so that nobody waits for rewards in vain.
        if ours.dtype == torch.bool:
            others = torch.tensor([self.others is None])

        parts = [ours, others] if self.first else [others, ours]
        return torch.cat(parts)


def test_both_processes_learn_that_the_rewards_of_one_failed():
    healthy = torch.tensor([[1.0], [NAN]])

    failing = TwoProcesses(healthy, first=False)
    with pytest.raises(KeyError, match="no such answer"):
        guards.rewards_of_all(functools.partial(broken, None), ["f"], failing)

    waiting = TwoProcesses(None, first=True)
    with pytest.raises(RuntimeError, match="The rewards failed in process 1, which says why"):
        guards.rewards_of_all(lambda: healthy, ["f"], waiting)

    # Rewards, and no failure: the infinite one is of the other process, and this one stops as well.
    endless = TwoProcesses(torch.full((2, 1), -INF), first=True)
    with pytest.raises(ValueError, match="'f' gave an infinite reward"):
        guards.rewards_of_all(lambda: healthy, ["f"], endless)

    # Control: without a failure there are the rewards of both.
    assert guards.rewards_of_all(lambda: healthy, ["f"], TwoProcesses(healthy, first=True)).shape == (4, 1)


def test_a_second_train_begins_with_a_rollout_of_its_own(make):
    """What a failed call left would be of other weights. TRL goes on with it."""
    # TRL keeps a rollout batch for several updates, here two, and one of them was trained.
    trainer = make(max_steps=1)
    rollouts = []
    trajectories = trainer.rollout_func

    def counted(*arguments):
        rollouts.append(trainer.state.global_step)
        return trajectories(*arguments)

    trainer.rollout_func = counted
    trainer.train()
    trainer.train()

    # Each `train` starts its steps at 0.
    assert rollouts == [0, 0]
