"""Saving and resuming without an engine: bit for bit from any step, and a save that fails costs nothing."""

import functools
import os
import pickle
import resource
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from filelock import FileLock, Timeout
from slow.toys import distinct_characters, forge, prompts, save_model
from test_trainer import master_weights, without_engine
from transformers import AutoTokenizer, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from trl import GRPOTrainer

from qarl_trl import QaRLConfig, QaRLTrainer
from qarl_trl.checkpoints.folder import damage, finished
from qarl_trl.checkpoints.lock import LOCK
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


@pytest.mark.slow
def test_a_resume_from_any_step_ends_in_the_same_bits(model, straight, tmp_path):
    folder, expected = Path(straight.args.output_dir), master_weights(straight)
    # After the first update of a rollout batch, at an inner one, at the end of an epoch and within the next.
    for step in (1, 6, 8, 10):
        resumed = make(model, tmp_path / str(step), **LONG | {"save_strategy": "no"})
        resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
        assert same(master_weights(resumed), expected), step
        quantized = dict(iter_low_bit_weights(resumed.model))
        assert same(quantized, dict(iter_low_bit_weights(straight.model)))
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
    assert not same(master_weights(resumed), master_weights(straight))


def test_a_resume_when_all_is_trained_trains_nothing(model, straight, tmp_path):
    """Control: transformers' loop takes a step before it looks."""
    last = str(Path(straight.args.output_dir) / "checkpoint-11")
    resumed = make(model, tmp_path, **LONG | {"save_strategy": "no"})
    assert resumed.train(resume_from_checkpoint=last).global_step == 11
    assert same(master_weights(resumed), master_weights(straight))
    resumed = make(model, tmp_path, **LONG | {"save_strategy": "no"})
    resumed._run_epoch = lambda **kwargs: GRPOTrainer._run_epoch(resumed, **kwargs)
    assert resumed.train(resume_from_checkpoint=last).global_step == 12


def test_other_rollout_batches_cannot_continue_a_stored_one(model, straight, tmp_path):
    changes = LONG | {"steps_per_generation": 4}
    resumed, folder = make(model, tmp_path, **changes), Path(straight.args.output_dir)
    with pytest.raises(ValueError, match="another run: steps_per_generation was 2 .*, and is 4"):
        resumed.train(resume_from_checkpoint=str(folder / "checkpoint-6"))
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-8"))  # control: between two batches


def test_a_checkpoint_of_another_run_is_refused_before_a_model_loads(model, straight, tmp_path, monkeypatch):
    """Shapes are equal, so nothing else would notice: the run would go on from the other's weights."""
    checkpoint = str(Path(straight.args.output_dir) / "checkpoint-6")
    moved = shutil.copytree(model, tmp_path / "moved")
    other = save_model(tmp_path / "other", layers=1, seed=1)
    shapes = shutil.copytree(model, tmp_path / "shapes")
    shutil.copy(Path(other) / "model.safetensors", shapes)
    again = LONG | {"save_strategy": "no", "resume_from_checkpoint": checkpoint}
    with monkeypatch.context() as loading:
        fails = functools.wraps(GRPOTrainer.__init__)(lambda *_, **__: pytest.fail("loads"))
        loading.setattr(GRPOTrainer, "__init__", fails)
        with pytest.raises(ValueError, match=f"weights was .*{model}.* and is .*{shapes}"):
            make(str(shapes), tmp_path / "a", **again)
        with pytest.raises(ValueError, match="scheme was .*int4 per group 128.* and is .*int4 per group 32"):
            make(model, tmp_path / "b", **again, quant_group_size=32)
        with pytest.raises(ValueError, match="optim_muon was True.* and is False"):
            make(model, tmp_path / "b", **again | {"optim_muon": False})
        for file, old, new in (("chat_template.jinja", "", "{{ messages }}"), ("config.json", "1e-06", "1e-05")):
            content = (moved / file).read_text() if (moved / file).exists() else ""
            (moved / file).write_text(content.replace(old, new))
            with pytest.raises(ValueError, match="weights was"):
                make(str(moved), tmp_path / "c", **again)
            (moved / file).write_text(content) if content else (moved / file).unlink()
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.chat_template = "{{ messages }}"
        args = QaRLConfig(**without_engine(tmp_path / "c", **again))
        with pytest.raises(ValueError, match="tokenizer was"):
            QaRLTrainer(model, distinct_characters, args, train_dataset=prompts(4), processing_class=tokenizer)
    # Control: the same model at another place is the same run, whether the config or the call names the checkpoint.
    resumed = make(str(moved), tmp_path / "d", **again)
    resumed.train(resume_from_checkpoint=checkpoint)
    assert same(master_weights(resumed), master_weights(straight))


def test_all_files_of_a_checkpoint_have_the_rights_of_the_umask(straight):
    files = [path for path in Path(straight.args.output_dir, "checkpoint-6").iterdir() if path.is_file()]
    assert len({path.stat().st_mode for path in files}) == 1 and any(path.suffix == ".safetensors" for path in files)


def test_a_run_holds_its_output_dir_while_it_trains(model, tmp_path):
    """Two runs would delete each other's `_incoming`."""
    tried = []

    def reward(completions, **_):
        with pytest.raises(Timeout):
            FileLock(tmp_path / LOCK, timeout=0).acquire()
        tried.append((tmp_path / LOCK).read_text())
        return distinct_characters(completions)

    make(model, tmp_path, reward).train()
    assert tried and tried[0].startswith(f"process {os.getpid()} on ")
    other = FileLock(tmp_path / LOCK, timeout=0)  # free again, and now another's
    with other, pytest.raises(ValueError, match="in use by process"):
        make(model, tmp_path)
    make(model, tmp_path)


@contextmanager
def disk():
    """A function that fills the disk after some bytes of a file: Python ignores the signal, so a write fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda limit: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# Less than the master weights, and more than these but less than AdamW's state.
@pytest.mark.parametrize("limit", [1_000_000, 3_000_000])
def test_a_full_disk_is_an_error_and_leaves_the_last_checkpoint(model, tmp_path, limit):
    changes = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    trainer = make(model, tmp_path, **changes)
    save = trainer._save_checkpoint
    with disk() as fill:
        trainer._save_checkpoint = lambda *a: (trainer.state.global_step == 2 and fill(limit), save(*a))
        with pytest.raises(OSError, match="checkpoint-2 could not be saved: "):
            trainer.train()
    assert [folder.name for folder in finished(tmp_path)] == ["checkpoint-1"]
    assert damage(tmp_path / "checkpoint-1") is None
    assert not (tmp_path / "_incoming").exists() and not (tmp_path / "checkpoint-2").exists()
    assert make(model, tmp_path, **changes).train(resume_from_checkpoint="auto").global_step == 4


def test_a_full_disk_leaves_the_low_bit_model_that_was_there(model, tmp_path):
    trainer = make(model, tmp_path / "run")
    path = save_low_bit(trainer.model, trainer.processing_class, tmp_path / "low_bit")
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with torch.no_grad():
        trainer.model.model.norm.weight += 1
    for folder in (path, tmp_path / "new"):
        with disk() as fill, pytest.raises(Exception, match="(?i)file too large|os error 27"):
            fill(100_000)
            save_low_bit(trainer.model, trainer.processing_class, folder)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert not list((tmp_path / "new").iterdir())


def test_a_signal_ends_the_step_saves_and_leaves_with_its_code(model, straight, tmp_path):
    changes, calls = LONG | {"save_strategy": "no"}, []

    def reward(completions, **_):
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
        return distinct_characters(completions)

    trainer = make(model, tmp_path, reward, **changes)
    with pytest.raises(SystemExit) as left:
        trainer.train()
    assert left.value.code == EXIT_CODE == 75
    assert [folder.name for folder in finished(tmp_path)] == ["checkpoint-5"]  # the second rollout batch is of step 5
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    again = make(model, tmp_path, **changes)
    again.train(resume_from_checkpoint=True)
    assert same(master_weights(again), master_weights(straight))


@pytest.mark.parametrize("when", ["training", "evaluation"])
def test_a_signal_in_the_last_step_or_an_evaluation_is_obeyed(model, tmp_path, when):
    args = without_engine(tmp_path, eval_strategy="steps", eval_steps=1, max_steps=3, per_device_eval_batch_size=4)
    data = {"train_dataset": prompts(4), "eval_dataset": prompts(1)}
    trainer = QaRLTrainer(model, distinct_characters, QaRLConfig(**args), **data)
    real = trainer._generate_and_score_completions

    def killed_in_the_last_step(inputs):
        if trainer.state.global_step == 2 and trainer.model.training == (when == "training"):
            os.kill(os.getpid(), signal.SIGTERM)
        return real(inputs)

    trainer._generate_and_score_completions = killed_in_the_last_step
    with pytest.raises(SystemExit):
        trainer.train()
    last = "checkpoint-3" if when == "training" else "checkpoint-2"
    assert {folder.name for folder in finished(tmp_path)} == {last}


@pytest.fixture(scope="module")
def vision(tmp_path_factory):
    """A Qwen2.5-VL with a text model of one layer and an eye of one."""
    folder = tmp_path_factory.mktemp("vision")
    save_model(folder, layers=1)
    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
    text = sizes | {"num_attention_heads": 2, "num_key_value_heads": 1, "eos_token_id": 1, "pad_token_id": 0}
    text["rope_parameters"] = {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 1e4}
    eye = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128}
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(text_config=text, vision_config=eye, tie_word_embeddings=False)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    return str(folder)


def test_a_model_of_several_parts_resumes_in_the_same_bits(vision, tmp_path):
    def trainer(folder, **changes):
        ignore = ["lm_head", "re:.*visual.*"]
        args = QaRLConfig(**without_engine(folder, quant_ignore=ignore, **changes))
        tokenizer = AutoTokenizer.from_pretrained(vision)
        return QaRLTrainer(vision, distinct_characters, args, train_dataset=prompts(8), processing_class=tokenizer)

    straight = trainer(tmp_path / "a", save_strategy="steps", save_steps=1)
    straight.train()
    half = str(tmp_path / "a" / "checkpoint-1")
    resumed = trainer(tmp_path / "b")
    resumed.train(resume_from_checkpoint=half)
    assert same(master_weights(resumed), master_weights(straight))
    # Control: its weights are stored under other names, which transformers' own way does not find.
    other = trainer(tmp_path / "c")
    with pytest.raises(RuntimeError, match="lacks 32 weights"):
        GRPOTrainer._load_from_checkpoint(other, half)


class Attack:
    """A pickle that makes a folder when it is read by `pickle`."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "rollout_0.pt"])
def test_a_pickle_in_a_checkpoint_does_not_run(model, straight, tmp_path, name):
    folder = shutil.copytree(Path(straight.args.output_dir) / "checkpoint-6", tmp_path / "checkpoint-6")
    torch.save(Attack(tmp_path / "ran"), folder / name)
    forge(folder)
    resumed = make(model, tmp_path, **LONG | {"save_strategy": "no"})
    with pytest.raises(pickle.UnpicklingError, match="(?i)weights.only"):
        resumed.train(resume_from_checkpoint=str(folder))
    assert not (tmp_path / "ran").exists()
    torch.load(folder / name, weights_only=False)  # control
    assert (tmp_path / "ran").exists()
