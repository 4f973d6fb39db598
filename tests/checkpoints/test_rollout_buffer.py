"""`qarl_trl.checkpoints.rollout_buffer` on its own; with trainers of TRL: test_saving.py, test_trainer_resume.py."""

import pickle
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import BatchFeature

from qarl_trl.checkpoints.rollout_buffer import RolloutBuffer


def trainer_at(step):
    """What the buffer reads of a trainer with 3 x 2 micro-batches per rollout batch, after `step` of them."""
    return SimpleNamespace(
        args=SimpleNamespace(steps_per_generation=3, gradient_accumulation_steps=1),
        num_iterations=2,
        _step=step,
        _buffered_inputs=["a", "b", "c"],
        # Any number: the step of the last weight sync.
        _last_loaded_step=4,
    )


# 3 x 2 micro-batches: at 0 and 6 a batch is used up, and 7 is the first of the next.
@pytest.mark.parametrize(("step", "in_batch"), [(0, False), (1, True), (5, True), (6, False), (7, True)])
def test_only_a_rollout_batch_that_is_not_used_up_is_stored(step, in_batch):
    buffer = RolloutBuffer(trainer_at(step))
    buffer.step_of_sampling = 5

    assert buffer.in_batch is in_batch
    # At a batch's end 0, because the next may have another number of micro-batches.
    assert buffer.dump() == ((step, 5, ["a", "b", "c"], None) if in_batch else (0, 5, None, None))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(2), None),
        (["a", None, 1.5, {"b": [True]}], None),
        (np.zeros(2), r"difficulty.*numpy"),
        (list(np.zeros(2)), r"difficulty.*numpy"),
        (BatchFeature(), r"difficulty.*BatchFeature"),
    ],
)
def test_a_batch_that_no_checkpoint_could_give_back_is_refused(value, words, tmp_path):
    trainer = trainer_at(1)
    trainer._buffered_inputs = [{"ids": torch.zeros(2), "difficulty": value}] * 3
    buffer = RolloutBuffer(trainer)

    file = tmp_path / "rollout.pt"
    torch.save(buffer.dump(), file)
    if words is None:
        buffer.check()
        torch.load(file, weights_only=True)
        return

    with pytest.raises(ValueError, match=words):
        buffer.check()
    # Control: a resume would not read it.
    with pytest.raises(pickle.UnpicklingError):
        torch.load(file, weights_only=True)


@pytest.mark.parametrize("value", [threading.Lock(), [lambda: 0]])
def test_a_batch_that_no_checkpoint_could_store_is_refused(value):
    trainer = trainer_at(1)
    trainer._buffered_inputs = [{"ids": torch.zeros(2), "client": value}] * 3

    with pytest.raises(ValueError, match=r"got 'client' \(.*pickle"):
        RolloutBuffer(trainer).check()

    # Control: with an update for each rollout batch nothing of it is stored.
    trainer.args.gradient_accumulation_steps = 6
    RolloutBuffer(trainer).check()


def test_another_trainer_continues_with_what_was_stored():
    resumed = trainer_at(0)
    stored = RolloutBuffer(trainer_at(7))
    stored.step_of_sampling = 5
    buffer = RolloutBuffer(resumed)

    buffer.load(*stored.dump())

    assert buffer.step_of_sampling == 5
    # All of TRL's attributes, as in the trainer that was stopped.
    assert vars(resumed) == vars(trainer_at(7))


def test_a_forgotten_rollout_batch_is_sampled_again_after_a_sync():
    trainer = trainer_at(7)

    RolloutBuffer(trainer).forget()

    assert (trainer._step, trainer._buffered_inputs, trainer._last_loaded_step) == (0, None, -1)


def test_a_forced_sync_keeps_the_rollout_batch():
    trainer = trainer_at(7)

    RolloutBuffer(trainer).force_sync()

    assert vars(trainer) == vars(trainer_at(7)) | {"_last_loaded_step": -1}


def test_trainers_with_another_name_for_their_last_sync_are_forced_to_sync_too():
    """GOLD syncs at step S if S >= last + frequency, and IW-OPD counts its micro-batches by a name of its own."""
    trainer = trainer_at(7)
    trainer._last_vllm_sync_step = 6
    trainer.vllm_sync_frequency = 3
    trainer._buffer_step = 5

    RolloutBuffer(trainer).forget()

    assert trainer._last_vllm_sync_step + 3 <= 0
    assert trainer._buffer_step == 0


def test_a_trainer_that_samples_nothing_gets_no_buffer():
    # As SFT's and DPO's: none of the attributes.
    trainer = SimpleNamespace()
    buffer = RolloutBuffer(trainer)

    buffer.forget()
    buffer.force_sync()

    assert not buffer.exists
    assert not buffer.in_batch
    assert not vars(trainer)


# It has neither `steps_per_generation` nor `num_iterations`: four micro-batches make a step, and a batch.
@pytest.mark.parametrize(("step", "in_batch"), [(0, False), (1, True), (4, False)])
def test_a_trainer_that_samples_for_each_optimizer_step_uses_its_micro_batches(step, in_batch):
    """TRL's distillation."""
    args = SimpleNamespace(gradient_accumulation_steps=4)
    trainer = SimpleNamespace(args=args, _step=step, _buffered_inputs=["a", "b", "c", "d"])

    assert RolloutBuffer(trainer).in_batch is in_batch
