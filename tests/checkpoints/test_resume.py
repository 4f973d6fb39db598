"""Which checkpoint a run resumes from: decided before a model loads, and never one that is cut off."""

import shutil

import pytest
from configs import config
from test_train import base, problems  # noqa: F401

from qarl_trl import cli
from qarl_trl.checkpoints.resume import resume_path
from qarl_trl.train import parse

from .test_folder import write


@pytest.fixture
def args(tmp_path):
    return config(tmp_path)


def save(tmp_path, step):
    folder = write(tmp_path, step, str(step))
    for name in ("trainer_state.json", "scheduler.pt"):
        (folder / name).write_text("")
    return folder


@pytest.mark.parametrize("wish", [None, False, "false"])
def test_none_is_asked_for(tmp_path, args, wish):
    save(tmp_path, 1)
    assert resume_path(wish, args) is None


@pytest.mark.parametrize("wish", [True, "true", "True", "auto"])
def test_the_newest_complete_one_is_found_and_others_are_named_and_left_alone(tmp_path, args, wish, caplog):
    found = [save(tmp_path, step) for step in (1, 2, 3)]
    (found[2] / "model.safetensors").write_text("?")
    (tmp_path / "checkpoint-4").mkdir()
    (tmp_path / "_incoming" / "checkpoint-5").mkdir()
    assert resume_path(wish, args) == str(found[1])
    named = " ".join(record.getMessage() for record in caplog.records)
    for step, words in ((3, "model.safetensors is not what"), (4, "has no manifest.json"), (5, "is incomplete")):
        assert f"checkpoint-{step} is not resumed from and left alone" in named and words in named
    assert "checkpoint-1" not in named
    assert (found[2] / "model.safetensors").exists() and (tmp_path / "checkpoint-4").exists()


def test_without_any_true_is_an_error_and_auto_starts_anew(tmp_path, args):
    (tmp_path / "checkpoint-4").mkdir()
    assert resume_path("auto", args) is None
    with pytest.raises(ValueError, match=r"resume_from_checkpoint=True found no complete checkpoint.*'auto'"):
        resume_path(True, args)


def test_a_path_must_be_a_whole_training_checkpoint(tmp_path, args, caplog):
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    assert resume_path(str(good), args) == str(good)
    assert not caplog.records
    (bad / "model.safetensors").write_text("cut")
    with pytest.raises(ValueError, match=r"checkpoint-2 is damaged: model.safetensors has 3 bytes, must have 1\."):
        resume_path(str(bad), args)
    with pytest.raises(ValueError, match="nowhere.*no training checkpoint"):
        resume_path(str(tmp_path / "nowhere"), args)
    (good / "manifest.json").unlink()  # as plain TRL writes them
    assert resume_path(str(good), args) == str(good)
    assert "cannot be checked" in caplog.text


def test_what_cannot_be_continued_exactly_is_refused_or_named(tmp_path, args, caplog):
    folder = save(tmp_path, 1)
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"processes": 1', '"processes": 4'))
    assert resume_path("true", args) == str(folder)
    assert "written by 4 processes, and this run has 1" in caplog.text
    with pytest.raises(ValueError, match="sync_ref_model"):
        resume_path("true", config(tmp_path, sync_ref_model=True, beta=0.1))
    (folder / "scheduler.pt").unlink()
    with pytest.raises(ValueError, match="weights without the optimizer"):
        resume_path("true", args)


def test_a_recipe_is_refused_before_anything_loads(base, tmp_path, capsys):  # noqa: F811
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "out"
    recipe.write_text("resume_from_checkpoint: true\n")
    with pytest.raises(SystemExit) as left:
        cli.main(["train", "--config", str(recipe), *base])
    assert left.value.code == 2
    assert "found no complete checkpoint" in capsys.readouterr().err
    out.mkdir()
    folder = save(out, 3)
    assert parse(["--config", str(recipe), *base])[1].resume_from_checkpoint == str(folder)
    recipe.write_text("resume_from_checkpoint: auto\n")
    shutil.rmtree(folder)
    assert parse(["--config", str(recipe), *base])[1].resume_from_checkpoint is None


def test_transformers_own_way_to_save_on_a_signal_is_refused(tmp_path):
    with pytest.raises(ValueError, match="enable_jit_checkpoint"):
        config(tmp_path, enable_jit_checkpoint=True)


def test_a_checkpoint_between_its_two_renames_is_put_in_its_place(tmp_path):
    folder = save(tmp_path, 4)
    (tmp_path / "_incoming").mkdir(exist_ok=True)
    folder.rename(tmp_path / "_incoming" / folder.name)
    assert resume_path("true", config(tmp_path)) == str(folder)
