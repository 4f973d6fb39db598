"""Which checkpoint a run resumes from: decided before a model loads, and never one that is cut off."""

import errno
import shutil
from pathlib import Path

import pytest
from configs import config
from peft import LoraConfig
from slow.toys import forge
from test_train import base, problems  # noqa: F401

from qarl_trl import cli
from qarl_trl.checkpoints.resume import identity_of, resume_path
from qarl_trl.train import parse

from .test_folder import write


@pytest.fixture
def args(tmp_path):
    return config(tmp_path)


def cut(folder):
    (folder / "low_bit" / "config.json").write_text("{")


@pytest.mark.parametrize("wish", [True, "auto"])
def test_the_newest_complete_one_is_found_and_others_are_named_and_left_alone(tmp_path, args, wish, caplog):
    found = [write(tmp_path, step) for step in (1, 2, 3)]
    cut(found[2])
    (tmp_path / "checkpoint-4").mkdir()
    shutil.copytree(found[0], tmp_path / "checkpoint-9-keep")
    assert resume_path(wish, args) == str(found[1])
    assert resume_path("false", args) is resume_path(None, args) is None
    named = " ".join(record.getMessage() for record in caplog.records)
    for step, words in ((3, "config.json has 1 bytes"), (4, "manifest.json is missing")):
        assert f"checkpoint-{step} (" in named and words in named
    assert "checkpoint-1" not in named
    assert (found[2] / "model.safetensors").exists() and (tmp_path / "checkpoint-4").exists()


def test_without_any_true_is_an_error_and_auto_starts_anew(tmp_path, args):
    (tmp_path / "_incoming" / "checkpoint-5").mkdir(parents=True)  # killed in the first save
    assert resume_path("auto", args) is None
    with pytest.raises(ValueError, match=r"resume_from_checkpoint=True found no checkpoint.*'auto'"):
        resume_path(True, args)


def test_with_damaged_ones_alone_a_run_stops_and_says_how_to_start_over(tmp_path, args):
    for step in (1, 2):
        cut(write(tmp_path, step))
    for wish in ("true", "auto"):
        with pytest.raises(ValueError, match="only damaged.*To start over.*checkpoint-1 .*checkpoint-2 "):
            resume_path(wish, args)
    assert len(list(tmp_path.glob("checkpoint-*/model.safetensors"))) == 2


def test_an_error_while_reading_stops_a_run_and_is_not_taken_for_damage(tmp_path, args, monkeypatch):
    """As of a network file system: the run would go on from an older checkpoint, or from the beginning."""
    folders = [write(tmp_path, step) for step in (1, 2)]
    stat = Path.stat

    def stale(path, **kwargs):
        if path.name == "model.safetensors" and path.parent == folders[1]:
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return stat(path, **kwargs)

    monkeypatch.setattr(Path, "stat", stale)
    with pytest.raises(OSError, match="Stale file handle.*checkpoint-2/model.safetensors"):
        resume_path("auto", args)


def test_a_path_must_be_a_whole_checkpoint_of_this_trainer(tmp_path, args):
    good, bad = write(tmp_path, 1), write(tmp_path, 2)
    assert resume_path(str(good), args) == str(good)
    cut(bad)
    for folder, words in (
        (bad, "config.json has 1 bytes, needs 2"),
        (tmp_path / "nowhere", "manifest.json is miss"),
    ):
        with pytest.raises(
            ValueError, match=f"{folder.name}' is not a complete checkpoint of this trainer: .*{words}"
        ):
            resume_path(str(folder), args)


def test_what_cannot_be_continued_exactly_is_refused(tmp_path, args):
    folder = write(tmp_path, 1, model="a", world_size=4)
    with pytest.raises(ValueError, match="another run: world_size was 4 .*, and is 1"):
        resume_path("true", args, {"model": "a", "world_size": 1})
    with pytest.raises(ValueError, match="sync_ref_model"):
        resume_path("true", config(tmp_path, sync_ref_model=True, beta=0.1))
    (folder / "scheduler.pt").unlink()
    forge(folder)
    with pytest.raises(ValueError, match="weights without the optimizer"):
        resume_path("true", args)


def test_an_adapter_of_another_scale_is_another_run(tmp_path, args):
    def of(**changes):
        settings = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "up_proj"]} | changes
        return identity_of("a", args, None, {"peft_config": LoraConfig(**settings)})

    write(tmp_path, 1, **of())
    assert resume_path("true", args, of(target_modules=["up_proj", "q_proj"]))  # control
    for changes in ({"r": 8}, {"lora_alpha": 64}, {"use_rslora": True}, {"target_modules": "all-linear"}):
        with pytest.raises(ValueError, match=f"another run: adapter was .*{next(iter(changes))}"):
            resume_path("true", args, of(**changes))
    with pytest.raises(ValueError, match="another run: adapter was"):
        resume_path("true", args, identity_of("a", args, None, {}))


def test_a_recipe_is_refused_before_anything_loads(base, tmp_path, capsys):  # noqa: F811
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "out"
    recipe.write_text("resume_from_checkpoint: true\n")
    with pytest.raises(SystemExit) as left:
        cli.main(["train", "--config", str(recipe), *base])
    assert left.value.code == 2
    assert "found no checkpoint" in capsys.readouterr().err
    folder = write(out, 3)
    assert parse(["--config", str(recipe), *base])[1].resume_from_checkpoint == str(folder)


def test_a_checkpoint_between_its_two_renames_is_put_in_its_place(tmp_path):
    folder = write(tmp_path, 4)
    (tmp_path / "_incoming").mkdir(exist_ok=True)
    folder.rename(tmp_path / "_incoming" / folder.name)
    assert resume_path("true", config(tmp_path)) == str(folder)
