"""`qarl_trl.LowBitRLOOTrainer`: rewards that would train nothing, or end one process alone, stop the run."""

from __future__ import annotations

import math

import pytest
from slow.toys import distinct_characters, prompts

from qarl_trl import LowBitRLOOConfig, LowBitRLOOTrainer
from trainers.runs import settings


def make(model, folder, reward, **changes):
    args = LowBitRLOOConfig(**settings(folder, num_generations=2, max_completion_length=8, **changes))
    return LowBitRLOOTrainer(model, reward, args, train_dataset=prompts(8))


def nothing(completions, **_):
    return [None] * len(completions)


def endless(completions, **_):
    return [math.inf] * len(completions)


def every_other(completions, **_):
    """Of each group one answer is left out."""
    return [float(len(completion)) if row % 2 else None for row, completion in enumerate(completions)]


@pytest.mark.parametrize("scheme", ["W4A16", "none"])
@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (nothing, "No completion of a rollout batch got a reward: nothing gave None for all 4"),
        (endless, "The reward function 'endless' gave an infinite reward"),
    ],
)
def test_a_rollout_batch_that_would_train_nothing_stops_the_run(dense_model, tmp_path, reward, words, scheme):
    trainer = make(dense_model, tmp_path, reward, quant_scheme=scheme)

    with pytest.raises(ValueError, match=words):
        trainer.train()


@pytest.mark.parametrize("reward", [every_other, distinct_characters])
def test_a_reward_that_leaves_some_answers_out_stops_nothing(dense_model, tmp_path, reward):
    """Control."""
    trainer = make(dense_model, tmp_path, reward)

    assert trainer.train().global_step == 2


def test_a_reward_that_fails_in_another_process_stops_this_one(dense_model, tmp_path, monkeypatch):
    trainer = make(dense_model, tmp_path, distinct_characters)
    gather = trainer.accelerator.gather

    def failed_elsewhere(tensor):
        """The answer of all to "did you fail?" is that the second process did."""
        gathered = gather(tensor)
        is_flag = gathered.dtype == gathered.bool().dtype
        return ~gathered if is_flag else gathered

    monkeypatch.setattr(trainer.accelerator, "gather", failed_elsewhere)

    with pytest.raises(RuntimeError, match="The rewards failed in process 0"):
        trainer._calculate_rewards([{"prompt": "1+1="}], ["1+1="], ["2"], [[3]])
