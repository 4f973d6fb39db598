"""Saving and resuming without an engine: bit for bit from any step, and a save that fails costs nothing."""

import os
import resource
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from slow.toys import distinct_characters, prompts, save_model
from test_trainer import masters, without_engine
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from qarl_trl import QaRLConfig, QaRLTrainer
from qarl_trl.checkpoints.folder import damage, finished
from qarl_trl.checkpoints.signals import EXIT_CODE
from qarl_trl.export import save_low_bit
from qarl_trl.quant import iter_low_bit_weights


# Rollout batches of two micro-batches, used twice: four updates each, eight an epoch.
LONG = {
    "steps_per_generation": 2,
    "num_iterations": 2,
    "max_steps": 11,
    "save_strategy": "steps",
    "save_steps": 1,
    "warmup_steps": 5,
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
    # After the first update of a rollout batch, at an inner one, at the end of an epoch and within the next.
    for step in (1, 6, 8, 10):
        resumed = make(model, tmp_path / str(step), **LONG | {"save_strategy": "no"})
        resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
        assert same(masters(resumed), expected), step
        codes = dict(iter_low_bit_weights(resumed.model))
        assert same(codes, dict(iter_low_bit_weights(straight.model)))
        one, two = resumed.optimizer.state_dict()["state"], straight.optimizer.state_dict()["state"]
        assert all(same(one[i], two[i]) for i in two)
        assert resumed.lr_scheduler.state_dict() == straight.lr_scheduler.state_dict()


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


def test_prompts_of_later_epochs_come_in_trls_order(model, straight, tmp_path):
    changes = LONG | {"save_strategy": "no", "optim_muon": False, "loss_type": "grpo", "quant_scheme": None}
    ours = make(model, tmp_path / "ours", max_tokens_per_pass=None, **changes)
    ours.train()
    own = ("tbpo_", "vllm_engine_kwargs", "export_low_bit", "optim_muon", "quant_scheme")
    plain = {k: v for k, v in without_engine(tmp_path / "trl", **changes).items() if not k.startswith(own)}
    stock = GRPOTrainer(model, distinct_characters, GRPOConfig(**plain), train_dataset=prompts(4))
    stock.train()
    assert same(masters(ours), masters(stock))


def test_a_resume_when_all_is_trained_trains_nothing(model, straight, tmp_path):
    """Control: transformers' loop takes a step before it looks."""
    last = str(Path(straight.args.output_dir) / "checkpoint-11")
    resumed = make(model, tmp_path, **LONG | {"save_strategy": "no"})
    assert resumed.train(resume_from_checkpoint=last).global_step == 11
    assert same(masters(resumed), masters(straight))
    resumed = make(model, tmp_path, **LONG | {"save_strategy": "no"})
    resumed._run_epoch = lambda **kwargs: GRPOTrainer._run_epoch(resumed, **kwargs)
    assert resumed.train(resume_from_checkpoint=last).global_step == 12


def test_other_rollout_batches_cannot_continue_a_stored_one(model, straight, tmp_path):
    changes = LONG | {"steps_per_generation": 4}
    resumed = make(model, tmp_path, **changes)
    with pytest.raises(ValueError, match=r"another size.*was \[2, 2, 4\], is \[4, 2, 4\]"):
        resumed.train(resume_from_checkpoint=str(Path(straight.args.output_dir) / "checkpoint-6"))


@contextmanager
def file_size(limit: int):
    """A disk that is full after `limit` bytes of a file: Python ignores the signal, so a write fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class FullDisk(TrainerCallback):
    """From a step on."""

    def __init__(self, step, limit):
        self.step, self.limit, self.before = step, limit, resource.getrlimit(resource.RLIMIT_FSIZE)

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, self.before[1]))


# Above the low-bit file, which is a fifth of the masters; above the masters, which the optimizer's state is larger than.
@pytest.mark.parametrize("limit", [100_000, 1_000_000, 3_000_000])
def test_a_full_disk_is_an_error_and_leaves_the_last_checkpoint(model, tmp_path, limit):
    changes = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    trainer = make(model, tmp_path, **changes)
    full = FullDisk(2, limit)
    trainer.add_callback(full)
    try:
        with pytest.raises(OSError, match=r"checkpoint-2 could not be saved: .*complete checkpoint: .*checkpoint-1\."):
            trainer.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, full.before)
    assert [folder.name for folder in finished(tmp_path)] == ["checkpoint-1"]
    assert damage(tmp_path / "checkpoint-1") is None
    assert not (tmp_path / "_incoming").exists() and not (tmp_path / "checkpoint-2").exists()
    again = make(model, tmp_path, **changes)
    assert again.train(resume_from_checkpoint="auto").global_step == 4


def test_a_full_disk_leaves_the_low_bit_model_that_was_there(model, tmp_path):
    trainer = make(model, tmp_path / "run")
    path = save_low_bit(trainer.model, trainer.processing_class, tmp_path / "low_bit")
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with torch.no_grad():
        trainer.model.model.norm.weight += 1
    for folder in (path, tmp_path / "new"):
        with file_size(100_000), pytest.raises(Exception, match="(?i)file too large|os error 27"):
            save_low_bit(trainer.model, trainer.processing_class, folder)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert not list((tmp_path / "new").iterdir())


def reward_with_signal(number, call):
    calls = []

    def reward(completions, **_):
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), number)
        return distinct_characters(completions)

    return reward


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_the_step_saves_and_leaves_with_its_code(model, straight, tmp_path, number):
    changes = LONG | {"save_strategy": "no"}
    trainer = make(model, tmp_path, reward_with_signal(number, 2), **changes)
    with pytest.raises(SystemExit) as left:
        trainer.train()
    assert left.value.code == EXIT_CODE == 75
    assert [folder.name for folder in finished(tmp_path)] == ["checkpoint-5"]  # the second rollout batch is of step 5
    assert signal.getsignal(number) is signal.SIG_DFL
    again = make(model, tmp_path, **changes)
    again.train(resume_from_checkpoint=True)
    assert same(masters(again), masters(straight))


def test_a_handler_of_the_user_stays(model, tmp_path):
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
    try:
        make(model, tmp_path, reward_with_signal(signal.SIGUSR1, 1)).train()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [1]
