"""The paths of a run are those of its start, also if a reward changes the current folder."""

import json
import os

import pytest
from slow.toys import distinct_characters, prompts, save_model
from toy_runs import adapter, without_engine

from qarl_trl import QaRLConfig, QaRLTrainer
from qarl_trl.train import train as train_by_command


# Two checkpoints, of which one stays: rotation deletes in the folder that it finds.
SAVING = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "save_total_limit": 1}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder, in which `model/` and `data.jsonl` are."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    save_model(here / "model", layers=1)
    (here / "data.jsonl").write_text("{}")
    return here


@pytest.fixture
def moving_reward(tmp_path):
    """A reward that changes the current folder, and the folder."""
    there = tmp_path / "there"
    there.mkdir()

    def reward(completions, **_):
        os.chdir(there)
        return distinct_characters(completions)

    return reward, there


def make_trainer(reward, model, peft_config=None, **changes):
    args = QaRLConfig(**without_engine("run", **SAVING | changes))
    return QaRLTrainer(model, reward, args, train_dataset=prompts(), peft_config=peft_config)


def test_a_reward_that_changes_the_folder_moves_no_output(here, moving_reward):
    reward, there = moving_reward

    # All paths are relative. As the command does it, which writes a card and a manifest, too.
    train_by_command(make_trainer(reward, "model"), "data.jsonl")

    # Control: the reward was called.
    assert os.getcwd() == str(there)
    assert not list(there.iterdir())
    assert (here / "run" / "checkpoint-2" / "manifest.json").is_file()
    # Rotation found it.
    assert not (here / "run" / "checkpoint-1").exists()
    assert (here / "run" / "model.safetensors").is_file()


def test_an_adapter_names_a_base_that_was_relative_by_where_it_was(here, moving_reward):
    reward, there = moving_reward
    trainer = make_trainer(reward, "model", adapter())

    trainer.train()
    trainer.save_model()

    assert not list(there.iterdir())
    config = json.loads((here / "run" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(here / "model")


def test_a_resume_reads_its_checkpoint_where_it_was(here, moving_reward):
    reward, _ = moving_reward
    make_trainer(reward, "model").train()
    os.chdir(here)

    resumed = make_trainer(reward, "model", max_steps=4)
    assert resumed.train(resume_from_checkpoint="run/checkpoint-2").global_step == 4


def test_a_name_of_the_hub_stays_a_name(here, tmp_path):
    from qarl_trl.trainers.loading import anchor_model
    from qarl_trl.trainers.settings import anchor_folders

    # "some/model" may be a folder of another machine or a name. What is not here is left as it is.
    args = QaRLConfig(**without_engine("run", sync_folder="sync"))
    assert anchor_model("some/model") == "some/model"
    assert anchor_model("model") == str(here / "model")
    anchor_folders(args)
    assert args.output_dir == str(here / "run")
    assert args.sync_folder == str(here / "sync")
