"""Saving and resuming without an engine: bit for bit from any step, and a save that fails costs nothing."""

import os
import pickle
import resource
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from slow.toys import distinct_characters, prompts, save_model, stored_tensors
from test_trainer import adapter, masters, without_engine
from transformers import AutoModelForCausalLM, TrainerCallback
from transformers.trainer_callback import TrainerState
from trl import GRPOConfig, GRPOTrainer

from qarl_trl import QaRLConfig, QaRLTrainer
from qarl_trl.checkpoints.folder import damage, finished
from qarl_trl.checkpoints.signals import EXIT_CODE
from qarl_trl.export import save_low_bit
from qarl_trl.quant import iter_low_bit_weights


# Rollout batches of two micro-batches, used twice: four updates each, in three epochs of two batches.
LONG = {
    "steps_per_generation": 2,
    "num_iterations": 2,
    "max_steps": 20,
    "save_strategy": "steps",
    "save_steps": 1,
    "warmup_steps": 7,
    "optim_muon": True,
    "export_low_bit": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), layers=1)


def make(model, folder, reward=distinct_characters, peft_config=None, number=4, **changes):
    args = QaRLConfig(**without_engine(folder, **changes))
    return QaRLTrainer(model, reward, args, train_dataset=prompts(number), peft_config=peft_config)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())


@pytest.fixture(scope="module")
def straight(model, tmp_path_factory):
    trainer = make(model, tmp_path_factory.mktemp("straight"), **LONG)
    trainer.train()
    return trainer


def test_a_resume_from_any_step_ends_in_the_same_bits(model, straight, tmp_path):
    folder, expected = Path(straight.args.output_dir), masters(straight)
    # The first, the last and an inner update of a rollout batch, in the first epoch and in later ones; an epoch's end.
    for step in (1, 4, 6, 8, 15, 19):
        resumed = make(model, tmp_path / str(step), **LONG | {"save_strategy": "no"})
        resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
        assert same(masters(resumed), expected), step
        codes = dict(iter_low_bit_weights(resumed.model))
        assert same(codes, dict(iter_low_bit_weights(straight.model)))
        one, two = resumed.optimizer.state_dict()["state"], straight.optimizer.state_dict()["state"]
        assert all(same(one[i], two[i]) for i in two)
        assert torch.equal(resumed.lr_scheduler.get_last_lr()[0] * torch.ones(1), torch.tensor(straight.lr_scheduler.get_last_lr()[:1]))


@pytest.mark.parametrize("step", [6, 8])
def test_without_what_this_package_stores_a_resume_goes_another_way(model, straight, tmp_path, step, monkeypatch):
    """Control: the rest of the rollout batch, and at the end of an epoch the order of the prompts."""
    if step == 6:
        monkeypatch.setattr(QaRLTrainer, "_load_rng_state", GRPOTrainer._load_rng_state)
    else:
        monkeypatch.setattr(QaRLTrainer, "_run_epoch", GRPOTrainer._run_epoch)
    resumed = make(model, tmp_path, **LONG | {"save_strategy": "no"})
    resumed.train(resume_from_checkpoint=str(Path(straight.args.output_dir) / f"checkpoint-{step}"))
    assert not same(masters(resumed), masters(straight))
