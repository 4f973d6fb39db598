"""`qarl_trl.LowBitRLOOTrainer`: rewards that would train on nothing, or on numbers that are none."""

import math

import pytest
from slow.toys import distinct_characters, prompts
from toy_runs import make as make_qarl

from qarl_trl import LowBitRLOOConfig, LowBitRLOOTrainer
from trainers.runs import losses, settings


def make(model, folder, reward, **changes):
    values = {"max_completion_length": 8, "num_generations": 2, "steps_per_generation": 1, "beta": 0.0, "max_steps": 1}
    args = LowBitRLOOConfig(**settings(folder, **values | changes))
    return LowBitRLOOTrainer(model, reward, args, train_dataset=prompts())


def raises(completions, **_):
    raise KeyError("no such answer")


def is_infinite(completions, **_):
    return [math.inf] * len(completions)


def gives_none(completions, **_):
    return [None] * len(completions)


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (raises, "no such answer"),
        (is_infinite, "The reward function 'is_infinite' gave an infinite reward"),
        (gives_none, "No completion of a rollout batch got a reward: gives_none gave None for all 4"),
    ],
)
def test_a_wrong_reward_stops_the_run(dense_model, tmp_path, reward, words):
    with pytest.raises((KeyError, ValueError), match=words):
        make(dense_model, tmp_path, reward).train()


def test_rewards_are_those_of_trl(dense_model, tmp_path):
    trainer = make(dense_model, tmp_path, distinct_characters)
    # Four answers to one prompt, with one to three different characters.
    rows = [{"prompt": "1+1="}] * 4
    answers = ["1", "12", "121", "1213"]

    rewards = trainer._calculate_rewards(rows, ["1+1="] * 4, answers, [[3]] * 4)

    assert rewards.flatten().tolist() == [1, 2, 2, 3]
    trainer.train()
    assert len(losses(trainer)) == 1


def test_a_checkpoint_of_grpo_is_not_resumed(dense_model, tmp_path):
    """It reads the same data, and all settings that RLOO has may be equal."""
    saving = {"save_strategy": "steps", "save_steps": 1}
    grpo = make_qarl(dense_model, tmp_path / "run", **settings(tmp_path / "run", max_steps=1, **saving))
    grpo.train()

    rloo = make(dense_model, tmp_path / "run", distinct_characters, num_generations=4, max_steps=2, **saving)
    with pytest.raises(ValueError, match="trainer was 'GRPOTrainer'"):
        rloo.train(resume_from_checkpoint="auto")


@pytest.mark.parametrize(
    "changes",
    [{"neftune_noise_alpha": 5.0}, {"use_vllm": True, "vllm_mode": "colocate", "generation_kwargs": {"seed": 1}}],
    ids=["noise", "seed"],
)
def test_what_would_part_engine_and_learner_is_refused(tmp_path, changes):
    """Half of the answers were clipped in the first update; all answers of a group were equal."""
    (name,) = {"neftune_noise_alpha", "generation_kwargs"} & changes.keys()

    with pytest.raises(ValueError, match=name):
        LowBitRLOOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **changes)
