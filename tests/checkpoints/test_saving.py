"""Saving and resuming without an engine: bit for bit from any step, and a save that fails costs nothing."""

import functools
import json
import os
import pickle
import resource
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from conftest import make_neox_model, make_vision_model
from filelock import FileLock, Timeout
from slow.toys import distinct_characters, forge, prompts, save_model
from test_trainer import master_weights, without_engine
from toy_runs import adapter
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOTrainer

from qarl_trl import QaRLConfig, QaRLTrainer
from qarl_trl.checkpoints import model as saved_model
from qarl_trl.checkpoints.folder import MANIFEST, damage, finished
from qarl_trl.checkpoints.identity import identity_of
from qarl_trl.checkpoints.lock import LOCK
from qarl_trl.checkpoints.resume import why_callbacks_forget
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
    # Learning rate and momentum differ from step to step, so a state that was lost would show.
    "warmup_steps": 5,
    "optim_muon": True,
    "export_low_bit": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    # Muon multiplies in bfloat16. On a CPU without it a matrix of 256 x 256 takes eight times as long.
    return save_model(tmp_path_factory.mktemp("model"), layers=1, width=128)


def make_trainer(model, folder, reward=distinct_characters, **changes):
    args = QaRLConfig(**without_engine(folder, **changes))
    return QaRLTrainer(model, reward, args, train_dataset=prompts(4))


def make_resumed(model, folder, **changes):
    """The trainer of a run of `LONG` that goes on and saves nothing."""
    return make_trainer(model, folder, **LONG | {"save_strategy": "no"} | changes)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())


def finished_names(folder):
    return [checkpoint.name for checkpoint in finished(folder)]


def contents(files):
    """The bytes of files, by their paths."""
    return {file: file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def straight(model, tmp_path_factory):
    """A run of `LONG` without interruption."""
    trainer = make_trainer(model, tmp_path_factory.mktemp("straight"), **LONG)
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def checkpoint_of(straight):
    """The folder of a step of that run."""

    def get(step):
        return Path(straight.args.output_dir) / f"checkpoint-{step}"

    return get


# Resuming -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
# After the first update of a rollout batch, at an inner one, at the end of an epoch and within the next.
@pytest.mark.parametrize("step", [1, 6, 8, 10])
def test_a_resume_from_any_step_ends_in_the_same_bits(model, straight, checkpoint_of, tmp_path, step):
    resumed = make_resumed(model, tmp_path)

    resumed.train(resume_from_checkpoint=str(checkpoint_of(step)))

    assert same(master_weights(resumed), master_weights(straight))
    assert same(dict(iter_low_bit_weights(resumed.model)), dict(iter_low_bit_weights(straight.model)))
    assert resumed.lr_scheduler.state_dict() == straight.lr_scheduler.state_dict()
    optimizer_state = resumed.optimizer.state_dict()["state"]
    for index, expected in straight.optimizer.state_dict()["state"].items():
        assert same(optimizer_state[index], expected)


# Controls: the rest of the rollout batch, and at the end of an epoch the order of the prompts.
@pytest.mark.parametrize(("step", "method"), [(6, "_load_rng_state"), (8, "_run_epoch")])
def test_without_what_this_package_stores_a_resume_goes_another_way(
    model, straight, checkpoint_of, tmp_path, step, method, monkeypatch
):
    monkeypatch.setattr(QaRLTrainer, method, getattr(GRPOTrainer, method))
    resumed = make_resumed(model, tmp_path)

    resumed.train(resume_from_checkpoint=str(checkpoint_of(step)))

    assert not same(master_weights(resumed), master_weights(straight))


def test_a_resume_when_all_is_trained_trains_nothing_and_says_so(model, straight, checkpoint_of, tmp_path, caplog):
    # Of `max_steps` 11.
    last = str(checkpoint_of(11))

    resumed = make_resumed(model, tmp_path)
    assert resumed.train(resume_from_checkpoint=last).global_step == 11
    assert "Nothing is left to train: the checkpoint has all 11 updates." in caplog.text
    assert same(master_weights(resumed), master_weights(straight))

    # Control: transformers' loop takes a step before it looks.
    resumed = make_resumed(model, tmp_path)
    resumed._run_epoch = lambda **kwargs: GRPOTrainer._run_epoch(resumed, **kwargs)
    assert resumed.train(resume_from_checkpoint=last).global_step == 12


def test_other_rollout_batches_cannot_continue_a_stored_one(model, checkpoint_of, tmp_path):
    # Step 6 is within a rollout batch of two micro-batches, step 8 at the end of one.
    resumed = make_trainer(model, tmp_path, **LONG | {"steps_per_generation": 4})

    with pytest.raises(ValueError, match="another run: steps_per_generation was 2 .*, and is 4"):
        resumed.train(resume_from_checkpoint=str(checkpoint_of(6)))

    # Control: between two batches.
    resumed.train(resume_from_checkpoint=str(checkpoint_of(8)))


# Checkpoints of another run -----------------------------------------------------------------------------------------


@pytest.fixture
def never_loads(monkeypatch):
    """A trainer that would load a model fails the test."""

    @functools.wraps(GRPOTrainer.__init__)
    def loads(*_, **__):
        pytest.fail("loads")

    monkeypatch.setattr(GRPOTrainer, "__init__", loads)


@pytest.mark.usefixtures("never_loads")
def test_a_checkpoint_of_other_weights_is_refused(model, checkpoint_of, tmp_path):
    """Shapes are equal, so nothing else would notice: the run would go on from the other's weights."""
    other = save_model(tmp_path / "other", layers=1, seed=1)
    same_config = shutil.copytree(model, tmp_path / "same_config")
    shutil.copy(Path(other) / "model.safetensors", same_config)

    with pytest.raises(ValueError, match=f"weights was .*{model}.* and is .*{same_config}"):
        make_resumed(str(same_config), tmp_path / "run", resume_from_checkpoint=str(checkpoint_of(6)))


@pytest.mark.usefixtures("never_loads")
@pytest.mark.parametrize(
    ("file", "old", "new"), [("chat_template.jinja", "", "{{ messages }}"), ("config.json", "1e-06", "1e-05")]
)
def test_a_checkpoint_of_a_model_with_other_files_is_refused(model, checkpoint_of, tmp_path, file, old, new):
    changed = shutil.copytree(model, tmp_path / "changed")
    content = ""
    if (changed / file).exists():
        content = (changed / file).read_text()
    assert old in content
    (changed / file).write_text(content.replace(old, new))

    with pytest.raises(ValueError, match="weights was"):
        make_resumed(str(changed), tmp_path / "run", resume_from_checkpoint=str(checkpoint_of(6)))


def with_generation_config(model, folder, **changes):
    """A copy of a model with another `generation_config.json`."""
    copied = shutil.copytree(model, folder)
    file = copied / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return str(copied)


@pytest.mark.usefixtures("never_loads")
def test_a_checkpoint_of_a_model_with_other_end_tokens_is_refused(model, checkpoint_of, tmp_path):
    changed = with_generation_config(model, tmp_path / "changed", eos_token_id=[1, 5])

    with pytest.raises(ValueError, match=r"end_tokens was \[1\] .* and is \[1, 5\]"):
        make_resumed(changed, tmp_path / "run", resume_from_checkpoint=str(checkpoint_of(6)))


@pytest.mark.parametrize(
    "changes",
    [
        # To serve the model.
        {"temperature": 0.3, "top_k": 20, "do_sample": True},
        # Another way to write it.
        {"eos_token_id": [1]},
    ],
)
def test_a_generation_config_with_the_same_end_tokens_is_the_same_run(model, checkpoint_of, tmp_path, changes):
    changed = with_generation_config(model, tmp_path / "changed", **changes)

    make_resumed(changed, tmp_path / "run", resume_from_checkpoint=str(checkpoint_of(6)))


def test_without_its_generation_config_a_model_has_the_end_tokens_of_its_config(model, checkpoint_of, tmp_path):
    copied = shutil.copytree(model, tmp_path / "copied")
    (copied / "generation_config.json").unlink()

    make_resumed(str(copied), tmp_path / "run", resume_from_checkpoint=str(checkpoint_of(6)))

    # Control: if the file had others, they are gone with it.
    args = QaRLConfig(**without_engine(tmp_path / "run"))
    facts = identity_of(str(copied), args, None, {"reward_funcs": distinct_characters})
    assert facts["end_tokens"] == [1]


def test_end_tokens_count_where_a_run_samples_and_where_its_checkpoint_knows_them(model, checkpoint_of, tmp_path):
    checkpoint = tmp_path / "run" / "checkpoint-6"
    shutil.copytree(checkpoint_of(6), checkpoint)
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    # As an earlier version wrote it.
    del manifest["end_tokens"]
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))
    changed = with_generation_config(model, tmp_path / "changed", eos_token_id=[1, 5])

    make_resumed(changed, tmp_path / "run", resume_from_checkpoint=str(checkpoint))

    args = QaRLConfig(**without_engine(tmp_path / "run"))
    assert "end_tokens" in identity_of(model, args, None, {"reward_funcs": distinct_characters})
    assert "end_tokens" not in identity_of(model, args, None, {})


@pytest.mark.usefixtures("never_loads")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_group_size": 32}, "scheme was .*int4 per group 128.* and is .*int4 per group 32"),
        ({"optim_muon": False}, "optim_muon was True.* and is False"),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused(model, checkpoint_of, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        make_resumed(model, tmp_path, resume_from_checkpoint=str(checkpoint_of(6)), **changes)


@pytest.mark.usefixtures("never_loads")
def test_a_checkpoint_of_another_tokenizer_is_refused(model, checkpoint_of, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{{ messages }}"
    settings = LONG | {"save_strategy": "no", "resume_from_checkpoint": str(checkpoint_of(6))}
    args = QaRLConfig(**without_engine(tmp_path, **settings))

    with pytest.raises(ValueError, match="tokenizer was"):
        QaRLTrainer(model, distinct_characters, args, train_dataset=prompts(4), processing_class=tokenizer)


def test_the_same_model_at_another_place_is_the_same_run(model, straight, checkpoint_of, tmp_path):
    """Control of the refusals above. Both the config and the call may name the checkpoint."""
    moved = shutil.copytree(model, tmp_path / "moved")
    checkpoint = str(checkpoint_of(6))

    resumed = make_resumed(str(moved), tmp_path / "run", resume_from_checkpoint=checkpoint)
    resumed.train(resume_from_checkpoint=checkpoint)

    assert same(master_weights(resumed), master_weights(straight))


# The folder of a run ------------------------------------------------------------------------------------------------


def test_all_files_of_a_checkpoint_have_the_rights_of_the_umask(checkpoint_of):
    checkpoint = checkpoint_of(6)

    # safetensors writes its files without regard to the umask, all other writers by it.
    assert list(checkpoint.glob("*.safetensors"))
    modes = set()
    for path in checkpoint.iterdir():
        if path.is_file():
            modes.add(path.stat().st_mode)
    assert len(modes) == 1


def test_a_run_holds_its_output_dir_while_it_trains(model, tmp_path):
    """Two runs would delete each other's `_incoming`."""
    owners = []

    def reward(completions, **_):
        # While a reward is calculated, so in the middle of the run.
        with pytest.raises(Timeout):
            FileLock(tmp_path / LOCK, timeout=0).acquire()
        owners.append((tmp_path / LOCK).read_text())
        return distinct_characters(completions)

    make_trainer(model, tmp_path, reward).train()

    assert owners
    assert owners[0].startswith(f"process {os.getpid()} on ")

    # Free again, and now another's.
    with FileLock(tmp_path / LOCK, timeout=0), pytest.raises(ValueError, match="in use by process"):
        make_trainer(model, tmp_path)
    make_trainer(model, tmp_path)


def test_a_script_that_forgets_to_resume_destroys_no_checkpoint(model, tmp_path):
    changes = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    first = make_trainer(model, tmp_path, **changes)
    first.train()
    before = contents(tmp_path.glob("checkpoint-*/*.safetensors"))
    assert finished_names(tmp_path) == ["checkpoint-3", "checkpoint-4"]

    again = make_trainer(model, tmp_path, **changes)
    with pytest.raises(ValueError, match="checkpoints of an earlier run"):
        again.train()
    assert contents(tmp_path.glob("checkpoint-*/*.safetensors")) == before

    # Controls: one trainer may train twice, and a resumed one goes on.
    first.train()
    assert again.train(resume_from_checkpoint=True).global_step == 4


def test_a_script_that_names_a_checkpoint_in_its_settings_alone_does_not_begin_anew(model, checkpoint_of, tmp_path):
    """transformers reads that setting nowhere."""
    checkpoint = str(checkpoint_of(10))
    trainer = make_resumed(model, tmp_path, resume_from_checkpoint=checkpoint)

    with pytest.raises(ValueError, match=r"resume from .*checkpoint-10, but train\(\) got no resume_from_checkpoint"):
        trainer.train()
    assert trainer.state.global_step == 0

    # Controls: what `train` is told counts, and a second call goes on from the weights of the first.
    assert trainer.train(resume_from_checkpoint=checkpoint).global_step == 11
    # What was to be resumed is done: the setting must not stop a second call.
    trainer.args.max_steps = 1
    assert trainer.train().global_step == 1
    anew = make_resumed(model, tmp_path / "new", resume_from_checkpoint="auto", max_steps=1)
    assert anew.train().global_step == 1


def test_a_model_is_not_saved_into_a_checkpoint_of_another_step(model, tmp_path):
    """Its files would have the sizes of before, so nobody would see the damage."""
    args = QaRLConfig(**without_engine(tmp_path, max_steps=2, save_strategy="steps", save_steps=1))
    trainer = QaRLTrainer(model, distinct_characters, args, train_dataset=prompts(4), peft_config=adapter())
    trainer.train()
    file = tmp_path / "checkpoint-1" / "adapter_model.safetensors"
    before = file.read_bytes()

    with pytest.raises(ValueError, match="checkpoint-1 is a training checkpoint: its optimizer would not belong"):
        trainer.save_model(str(tmp_path / "checkpoint-1"))

    assert file.read_bytes() == before
    # Control: the last checkpoint has other weights.
    assert (tmp_path / "checkpoint-2" / file.name).read_bytes() != before

    # A manifest alone makes no checkpoint: other programs also call a file so.
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").write_text("{}")
    trainer.save_model(str(tmp_path / "other"))
    assert (tmp_path / "other" / file.name).is_file()
    # Nor does one of them beside the log of a run.
    trainer.save_state()
    for content in ("{}", "[]"):
        (tmp_path / "manifest.json").write_text(content)
        trainer.save_model()
    assert (tmp_path / file.name).is_file()
    # Control: one that is cut off may be a checkpoint's.
    (tmp_path / "manifest.json").write_text('{"number": 1, "fil')
    with pytest.raises(ValueError, match="is a training checkpoint"):
        trainer.save_model()


# A full disk --------------------------------------------------------------------------------------------------------


@contextmanager
def fillable_disk():
    """A function that fills the disk after some bytes of a file: Python ignores the signal, so a write fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(limit):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))

    try:
        yield fill
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# Less than the master weights, and more than these but less than AdamW's state.
@pytest.mark.parametrize("limit", [300_000, 1_000_000])
def test_a_full_disk_is_an_error_and_leaves_the_last_checkpoint(model, tmp_path, limit):
    changes = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    trainer = make_trainer(model, tmp_path, **changes)
    save_checkpoint = trainer._save_checkpoint

    with fillable_disk() as fill:

        def save_on_a_full_disk(*args):
            # The first checkpoint is complete, and the second meets a full disk.
            if trainer.state.global_step == 2:
                fill(limit)
            return save_checkpoint(*args)

        trainer._save_checkpoint = save_on_a_full_disk
        with pytest.raises(OSError, match="checkpoint-2 could not be saved: "):
            trainer.train()

    assert finished_names(tmp_path) == ["checkpoint-1"]
    assert damage(tmp_path / "checkpoint-1") is None
    assert not (tmp_path / "_incoming").exists()
    assert not (tmp_path / "checkpoint-2").exists()

    # The run goes on from there.
    again = make_trainer(model, tmp_path, **changes)
    assert again.train(resume_from_checkpoint="auto").global_step == 4


def test_a_full_disk_leaves_the_low_bit_model_that_was_there(model, tmp_path):
    trainer = make_trainer(model, tmp_path / "run")
    path = save_low_bit(trainer.model, trainer.processing_class, tmp_path / "low_bit")
    before = contents(path.iterdir())
    with torch.no_grad():
        # Other weights, so that a file that was replaced would show.
        trainer.model.model.norm.weight += 1

    for folder in (path, tmp_path / "new"):
        with fillable_disk() as fill, pytest.raises(Exception, match="(?i)file too large|os error 27"):
            # Less than the low-bit weights.
            fill(100_000)
            save_low_bit(trainer.model, trainer.processing_class, folder)

    assert contents(path.iterdir()) == before
    assert not list((tmp_path / "new").iterdir())


@pytest.fixture
def read_weights(monkeypatch):
    """The names of the low-bit weights that were read for files."""
    names = []

    def noted(*args):
        for name, tensor in iter_low_bit_weights(*args):
            names.append(name)
            yield name, tensor

    monkeypatch.setattr(saved_model, "iter_low_bit_weights", noted)
    return names


def test_a_failed_save_reads_all_weights_for_the_gathers_of_the_other_processes(model, tmp_path, read_weights):
    trainer = make_trainer(model, tmp_path / "run")
    trainer.save_model(tmp_path / "whole")
    of_whole = list(read_weights)
    assert of_whole  # control

    # Refused before a weight is read.
    # An unquantized model, which a low-bit one must not replace.
    trainer.model.save_pretrained(tmp_path / "master")
    read_weights.clear()
    with pytest.raises(ValueError, match="would be overwritten"):
        trainer.save_model(tmp_path / "master")

    assert read_weights == of_whole


def test_a_process_that_saves_nothing_stops_with_the_one_that_fails(model, tmp_path, read_weights, monkeypatch):
    trainer = make_trainer(model, tmp_path)
    monkeypatch.setattr(QaRLConfig, "should_save", False)
    # What process 0 would bring to the gather: that its save failed.
    failed_first = torch.tensor([True])
    monkeypatch.setattr(trainer.accelerator, "gather", lambda ours: torch.cat([failed_first, ours]))

    with pytest.raises(RuntimeError, match="save of the low-bit model failed in process 0"):
        trainer._save_low_bit(tmp_path)
    assert read_weights

    failed_first = torch.tensor([False])  # control
    trainer._save_low_bit(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


# Signals ------------------------------------------------------------------------------------------------------------


def test_a_signal_ends_the_step_saves_and_leaves_with_its_code(model, straight, tmp_path):
    calls = []

    def reward(completions, **_):
        calls.append(completions)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
        return distinct_characters(completions)

    trainer = make_resumed(model, tmp_path, reward=reward)
    with pytest.raises(SystemExit) as left:
        trainer.train()

    assert left.value.code == EXIT_CODE == 75
    assert finished_names(tmp_path) == ["checkpoint-5"]  # the second rollout batch is of step 5
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL

    # The run goes on from there, to the same bits.
    again = make_resumed(model, tmp_path, reward=reward)
    again.train(resume_from_checkpoint=True)
    assert same(master_weights(again), master_weights(straight))


@pytest.mark.parametrize(
    ("training", "last"), [(True, "checkpoint-3"), (False, "checkpoint-2")], ids=["training", "evaluation"]
)
def test_a_signal_in_the_last_step_or_an_evaluation_is_obeyed(model, tmp_path, training, last):
    settings = without_engine(tmp_path, eval_strategy="steps", eval_steps=1, max_steps=3, per_device_eval_batch_size=4)
    trainer = QaRLTrainer(
        model,
        distinct_characters,
        QaRLConfig(**settings),
        train_dataset=prompts(4),
        eval_dataset=prompts(1),
    )
    generate_and_score = trainer._generate_and_score_completions

    def killed_after_two_steps(inputs):
        if trainer.state.global_step == 2 and trainer.model.training == training:
            os.kill(os.getpid(), signal.SIGTERM)
        return generate_and_score(inputs)

    trainer._generate_and_score_completions = killed_after_two_steps
    with pytest.raises(SystemExit):
        trainer.train()

    assert set(finished_names(tmp_path)) == {last}


# The end of an epoch -------------------------------------------------------------------------------------------------


class KillsIn(TrainerCallback):
    """Sends SIGTERM in one update."""

    def __init__(self, update):
        self.update = update

    def on_step_begin(self, args, state, control, **_):
        if state.global_step + 1 == self.update:
            os.kill(os.getpid(), signal.SIGTERM)


def make_evaluated(model, folder, is_stream=False, **changes):
    """The trainer of two epochs of two updates each, with an evaluation after each epoch."""
    data = prompts(2).to_iterable_dataset() if is_stream else prompts(2)
    settings = {"steps_per_generation": 1, "max_steps": -1, "num_train_epochs": 2, "export_low_bit": False}
    settings |= {"eval_strategy": "epoch", "per_device_eval_batch_size": 4} | changes
    args = QaRLConfig(**without_engine(folder, **settings))
    return QaRLTrainer(model, distinct_characters, args, train_dataset=data, eval_dataset=prompts(1))


def evaluations(trainer):
    """Step and loss of each evaluation."""
    return [(entry["step"], entry["eval_loss"]) for entry in trainer.state.log_history if "eval_loss" in entry]


@pytest.mark.parametrize("step", [1, 2, 4])
def test_a_run_that_resumes_from_the_last_update_of_an_epoch_evaluates_that_epoch(model, tmp_path, step):
    """The Trainer saves at the update, and evaluates at the end of the epoch, after it."""
    straight = make_evaluated(model, tmp_path / "straight", save_strategy="steps", save_steps=1)
    straight.train()
    checkpoint = tmp_path / "straight" / f"checkpoint-{step}"
    assert [entry_step for entry_step, _ in evaluations(straight)] == [2, 4]
    assert json.loads((checkpoint / MANIFEST).read_text())["misses_epoch_end"] == (step != 1)

    resumed = make_evaluated(model, tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(checkpoint))

    assert evaluations(resumed) == evaluations(straight)
    assert same(master_weights(resumed), master_weights(straight))


def test_a_complete_run_writes_no_checkpoint_when_it_ends_its_epoch_again(model, tmp_path):
    """Its checkpoint still asks for the save that wrote it, where the states of callbacks are restored."""
    saves = {"save_strategy": "steps", "save_steps": 1, "restore_callback_states_from_checkpoint": True}
    make_evaluated(model, tmp_path / "straight", **saves).train()
    checkpoint = tmp_path / "straight" / "checkpoint-4"
    # Control: it does ask.
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["TrainerControl"]["args"]["should_save"]

    make_evaluated(model, tmp_path / "resumed", **saves).train(resume_from_checkpoint=str(checkpoint))
    assert not (tmp_path / "resumed" / "checkpoint-4").exists()


def test_a_signal_saves_the_optimizer_of_a_run_that_saves_without_it(model, tmp_path, caplog):
    settings = {"save_strategy": "steps", "save_steps": 1, "save_only_model": True}
    straight = make_evaluated(model, tmp_path / "straight", **settings)
    straight.train()
    assert "no checkpoint but that of a signal will resume this run" in caplog.text
    # Control: a checkpoint of the run itself.
    with pytest.raises(ValueError, match="weights without the optimizer"):
        make_evaluated(model, tmp_path / "straight", **settings).train(resume_from_checkpoint="auto")

    stopped = make_evaluated(model, tmp_path / "run", **settings)
    stopped.add_callback(KillsIn(3))
    with pytest.raises(SystemExit):
        stopped.train()
    again = make_evaluated(model, tmp_path / "run", **settings)
    again.train(resume_from_checkpoint="auto")

    assert same(master_weights(again), master_weights(straight))


def test_a_run_with_a_callback_that_updates_the_reference_is_not_resumed(model, tmp_path, caplog):
    """Its reference is in no checkpoint, as that of `sync_ref_model`."""

    class UpdatesReference(TrainerCallback):
        update_ref_model = True

    straight = make_evaluated(model, tmp_path / "run", save_strategy="steps", save_steps=1)
    straight.add_callback(UpdatesReference())
    straight.train()
    assert "will not resume it: A run with UpdatesReference" in caplog.text

    resumed = make_evaluated(model, tmp_path / "run")
    resumed.add_callback(UpdatesReference())
    with pytest.raises(ValueError, match=r"UpdatesReference\(update_ref_model=True\) cannot be resumed"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    # What was refused has not made the checkpoints those of this trainer, which would replace them.
    with pytest.raises(ValueError, match="checkpoint-"):
        resumed.train()

    class HasMethod(TrainerCallback):
        def update_ref_model(self):
            """A user's own, of another meaning."""

    assert why_callbacks_forget([HasMethod()]) is None


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_run_whose_steps_end_within_an_epoch_evaluates_there_also_when_it_resumes(model, tmp_path, is_stream):
    """Nobody knows before where the epochs of a stream end: it has as many as it takes."""
    straight = make_evaluated(model, tmp_path, is_stream, max_steps=3, save_strategy="steps", save_steps=1)
    straight.train()
    assert [step for step, _ in evaluations(straight)] == [2, 3]  # control

    for step in (2, 3):
        resumed = make_evaluated(model, tmp_path / f"from_{step}", is_stream, max_steps=3)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert evaluations(resumed) == evaluations(straight)
        assert same(master_weights(resumed), master_weights(straight))

    # Control: with more updates the third is one within an epoch.
    longer = make_evaluated(model, tmp_path / "longer", is_stream, max_steps=4)
    longer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert [step for step, _ in evaluations(longer)] == [2, 4]


@pytest.mark.parametrize("update", [2, 4])
def test_after_a_signal_in_the_last_update_of_an_epoch_a_run_evaluates_that_epoch(model, tmp_path, update):
    straight = make_evaluated(model, tmp_path / "straight", save_strategy="epoch")
    straight.train()
    # Control: saved after the evaluation, which no resume does again.
    manifest = json.loads((tmp_path / "straight" / "checkpoint-2" / MANIFEST).read_text())
    assert not manifest["misses_epoch_end"]
    stopped = make_evaluated(model, tmp_path / "run", save_strategy="epoch")
    stopped.add_callback(KillsIn(update))
    with pytest.raises(SystemExit):
        stopped.train()
    assert len(evaluations(stopped)) == update // 2 - 1  # control

    again = make_evaluated(model, tmp_path / "run", save_strategy="epoch")
    again.train(resume_from_checkpoint="auto")

    assert evaluations(again) == evaluations(straight)
    assert same(master_weights(again), master_weights(straight))
    assert finished_names(tmp_path / "run") == ["checkpoint-2", "checkpoint-4"]


# A model of several parts -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vision(tmp_path_factory):
    """A Qwen2.5-VL with a text model of one layer and an eye of one."""
    folder = tmp_path_factory.mktemp("vision")
    save_model(folder, layers=1)
    make_vision_model(tie_word_embeddings=False).save_pretrained(folder)
    return str(folder)


def make_vision_trainer(vision, folder, **changes):
    # transformers stores such a model under other names than it has in memory.
    args = QaRLConfig(**without_engine(folder, quant_ignore=["lm_head", "re:.*visual.*"], **changes))
    tokenizer = AutoTokenizer.from_pretrained(vision)
    return QaRLTrainer(vision, distinct_characters, args, train_dataset=prompts(8), processing_class=tokenizer)


def test_a_model_of_several_parts_resumes_in_the_same_bits(vision, tmp_path):
    straight = make_vision_trainer(vision, tmp_path / "straight", save_strategy="steps", save_steps=1)
    straight.train()
    # The first of several steps, so that a difference could grow.
    checkpoint = str(tmp_path / "straight" / "checkpoint-1")

    resumed = make_vision_trainer(vision, tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=checkpoint)

    assert same(master_weights(resumed), master_weights(straight))

    # Control: its weights are stored under other names, which transformers' own way does not find.
    other = make_vision_trainer(vision, tmp_path / "other")
    with pytest.raises(RuntimeError, match="lacks 32 weights"):
        GRPOTrainer._load_from_checkpoint(other, checkpoint)


def test_a_model_whose_head_has_another_name_in_its_files_resumes_in_the_same_bits(tmp_path):
    model = save_model(tmp_path / "model", layers=1)
    make_neox_model().save_pretrained(model)
    straight = make_trainer(model, tmp_path / "straight", save_strategy="steps", save_steps=1)
    straight.train()
    checkpoint = str(tmp_path / "straight" / "checkpoint-1")

    resumed = make_trainer(model, tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=checkpoint)

    assert same(master_weights(resumed), master_weights(straight))
    # Control: transformers' own way looks for the name in the model.
    with pytest.raises(RuntimeError, match="lacks 1 weights of the model, first 'lm_head.weight'"):
        GRPOTrainer._load_from_checkpoint(resumed, checkpoint)


# Attacks ------------------------------------------------------------------------------------------------------------


class Attack:
    """A pickle that makes a folder when it is read by `pickle`."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "rollout_0.pt"])
def test_a_pickle_in_a_checkpoint_does_not_run(model, checkpoint_of, tmp_path, name):
    folder = shutil.copytree(checkpoint_of(6), tmp_path / "checkpoint-6")
    # In each file that is no safetensors: torch.load would run it.
    torch.save(Attack(tmp_path / "ran"), folder / name)
    forge(folder)  # the manifest names the new size
    resumed = make_resumed(model, tmp_path)

    with pytest.raises(pickle.UnpicklingError, match="(?i)weights.only"):
        resumed.train(resume_from_checkpoint=str(folder))
    assert not (tmp_path / "ran").exists()

    # Control: it would have run.
    torch.load(folder / name, weights_only=False)
    assert (tmp_path / "ran").exists()
