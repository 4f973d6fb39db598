"""Which checkpoint a run resumes from: decided before a model loads, and never one that is cut off."""

import errno
import re
import shutil
from pathlib import Path

import pytest
from configs import config
from slow.toys import forge
from test_train import base, problems  # noqa: F401

from qarl_trl import cli
from qarl_trl.checkpoints.folder import INCOMING
from qarl_trl.checkpoints.resume import check_start, resume_path
from qarl_trl.train import parse

from .test_folder import write


@pytest.fixture
def args(tmp_path):
    return config(tmp_path)


def cut(folder):
    """Cut off a file of a checkpoint."""
    (folder / "model.safetensors").write_text("w")


@pytest.mark.parametrize("wish", [True, "auto"])
def test_the_newest_complete_one_is_found_and_others_are_named_and_left_alone(tmp_path, args, wish, caplog):
    first, second, third = [write(tmp_path, step) for step in (1, 2, 3)]
    cut(third)
    (tmp_path / "checkpoint-4").mkdir()
    # A copy of the user's, with a larger number: it is not this run's newest.
    shutil.copytree(first, tmp_path / "checkpoint-9-keep")

    assert resume_path(wish, args) == str(second)

    log = " ".join(record.getMessage() for record in caplog.records)
    assert re.search(r"checkpoint-3 \(.*model.safetensors has 1 bytes", log)
    assert re.search(r"checkpoint-4 \(.*manifest.json is missing", log)
    assert "checkpoint-1" not in log
    assert (third / "model.safetensors").exists()
    assert (tmp_path / "checkpoint-4").exists()


# A config file gives words, a script gives Python's values.
@pytest.mark.parametrize("wish", [None, False, "false"])
def test_who_does_not_ask_does_not_resume(tmp_path, args, wish):
    write(tmp_path, 1)

    assert resume_path(wish, args) is None


def test_without_any_true_is_an_error_and_auto_starts_from_the_beginning(tmp_path, args):
    (tmp_path / INCOMING / "checkpoint-5").mkdir(parents=True)  # as after a kill in the first save

    assert resume_path("auto", args) is None
    with pytest.raises(ValueError, match=r"resume_from_checkpoint=True found no checkpoint.*'auto'"):
        resume_path(True, args)


@pytest.mark.parametrize("wish", ["true", "auto"])
def test_with_damaged_ones_alone_a_run_stops_and_says_how_to_start_over(tmp_path, args, wish):
    for step in (1, 2):
        cut(write(tmp_path, step))

    with pytest.raises(ValueError, match="only damaged.*To start over.*checkpoint-1 .*checkpoint-2 "):
        resume_path(wish, args)
    assert len(list(tmp_path.glob("checkpoint-*/model.safetensors"))) == 2


def test_an_error_while_reading_stops_a_run_and_is_not_taken_for_damage(tmp_path, args, monkeypatch):
    """As of a network file system: the run would go on from an older checkpoint, or from the beginning."""
    write(tmp_path, 1)
    newest = write(tmp_path, 2)
    stat = Path.stat

    def stale(path, **kwargs):
        # Only the newest: if that counted as damaged, the run would go on from the older one.
        if path.name == "model.safetensors" and path.parent == newest:
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return stat(path, **kwargs)

    monkeypatch.setattr(Path, "stat", stale)

    with pytest.raises(OSError, match="Stale file handle.*checkpoint-2/model.safetensors"):
        resume_path("auto", args)


def test_a_path_must_be_a_whole_checkpoint_of_this_trainer(tmp_path, args):
    whole = write(tmp_path, 1)
    damaged = write(tmp_path, 2)
    cut(damaged)
    refusal = "is not a complete checkpoint of this trainer"

    assert resume_path(str(whole), args) == str(whole)
    with pytest.raises(ValueError, match=f"checkpoint-2' {refusal}: .*model.safetensors has 1 bytes, needs 7"):
        resume_path(str(damaged), args)
    with pytest.raises(ValueError, match=f"nowhere' {refusal}: .*manifest.json is miss"):
        resume_path(str(tmp_path / "nowhere"), args)


def test_what_cannot_be_continued_exactly_is_refused(tmp_path, args):
    folder = write(tmp_path, 1, model="a", world_size=4)

    with pytest.raises(ValueError, match="another run: world_size was 4 .*, and is 1"):
        resume_path("true", args, {"model": "a", "world_size": 1})
    with pytest.raises(ValueError, match="sync_ref_model"):
        resume_path("true", config(tmp_path, sync_ref_model=True, beta=0.1))
    averaged = config(tmp_path)
    averaged.teacher_model_kind = "ema"  # of TRL's SDPO
    with pytest.raises(ValueError, match="teacher_model_kind='ema' cannot be resumed"):
        resume_path("true", averaged)
    for optimizer in ("adalomo", "grokadamw", "galore_adamw_layerwise"):
        with pytest.raises(ValueError, match=f"{optimizer}.*its state is in no checkpoint"):
            resume_path("true", config(tmp_path, optim=optimizer))
    # Control: an optimizer with a state.
    assert resume_path("true", config(tmp_path, optim="galore_adamw")) == str(folder)

    (folder / "scheduler.pt").unlink()
    # A manifest without the file, as `save_only_model` leaves it.
    forge(folder)
    with pytest.raises(ValueError, match="weights without the optimizer"):
        resume_path("true", args)


def test_a_recipe_is_refused_before_anything_loads(base, tmp_path, capsys):  # noqa: F811
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("resume_from_checkpoint: true\n")

    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", "--config", str(recipe), *base])
    assert stopped.value.code == 2
    assert "found no checkpoint" in capsys.readouterr().err

    folder = write(tmp_path / "out", 3)
    _, training_args, _ = parse(["--config", str(recipe), *base])
    assert training_args.resume_from_checkpoint == str(folder)


# Another run in the same folder -------------------------------------------------------------------------------------


def test_a_start_beside_checkpoints_is_refused_with_the_two_ways_on(tmp_path, args):
    check_start(None, args)  # control: an empty folder

    for step in (9, 10):
        # Damaged ones count, too: a user may still be able to repair them.
        cut(write(tmp_path, step))
    with pytest.raises(
        ValueError,
        match=r"checkpoints of an earlier run \(checkpoint-9, checkpoint-10\).*resume_from_checkpoint: auto continues"
        ".*another output_dir, or moving them, starts a new one",
    ):
        check_start(None, args)


def test_a_start_beside_a_low_bit_model_that_it_would_not_replace_is_refused(tmp_path):
    """A run with a merged adapter has left it, and `export` would take it for that of a frozen base."""
    low_bit = tmp_path / "low_bit"
    low_bit.mkdir()
    (low_bit / "config.json").write_text("{}")

    check_start(None, config(tmp_path))  # control: a run that writes its own there
    others = (config(tmp_path, lora_base="frozen"), config(tmp_path, quant_scheme="none"))
    for args in others:
        with pytest.raises(ValueError, match="low_bit is the low-bit model of an earlier run, .* move it"):
            check_start(None, args)

    # A run that goes on began beside it.
    own = str(write(tmp_path, 1))
    for args in others:
        check_start(own, args)


def test_a_resume_goes_on_beside_its_own_checkpoints_only(tmp_path, args):
    own = write(tmp_path, 1)
    check_start(str(own), args)

    # Not beside those of this folder, which the run would then overwrite.
    elsewhere = write(tmp_path / "other", 1)
    with pytest.raises(ValueError, match=rf"an earlier run \(checkpoint-1\).*{own} continues"):
        check_start(str(elsewhere), args)


def test_a_resume_goes_on_from_a_checkpoint_of_which_only_a_link_is_in_the_folder(tmp_path, args):
    """As on a larger disk, to which a user moved it."""
    own = write(tmp_path, 1)
    place = tmp_path / "larger disk" / "checkpoint-1"
    place.parent.mkdir()
    own.rename(place)
    own.symlink_to(place)

    assert resume_path("auto", args) == str(own)
    check_start(str(own), args)
    check_start(str(place), args)

    # Control: another one in that place is none of this folder.
    with pytest.raises(ValueError, match="an earlier run"):
        check_start(str(write(place.parent, 2)), args)
    # A link to what is gone is none, either.
    (tmp_path / "checkpoint-3").symlink_to(tmp_path / "nowhere")
    check_start(str(own), args)


def test_a_checkpoint_that_a_kill_left_before_its_rename_is_not_lost_by_a_start(tmp_path, args):
    folder = write(tmp_path, 4)
    incoming = tmp_path / INCOMING
    incoming.mkdir(exist_ok=True)
    # Complete, with its manifest, and not yet in its place: the moment between the two renames of `commit`.
    folder.rename(incoming / folder.name)

    with pytest.raises(ValueError, match="checkpoint-4"):
        check_start(None, args)
    assert folder.exists()


def test_the_command_refuses_such_a_start_before_anything_loads(base, tmp_path, capsys):  # noqa: F811
    write(tmp_path / "out", 3)

    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", *base, "--dry_run", "true"])

    assert stopped.value.code == 2
    assert "checkpoint-3" in capsys.readouterr().err
    cli.main(["train", *base, "--dry_run", "true", "--output_dir", str(tmp_path / "new")])  # control


def test_a_checkpoint_between_its_two_renames_is_put_in_its_place(tmp_path, args):
    folder = write(tmp_path, 4)
    incoming = tmp_path / INCOMING
    incoming.mkdir(exist_ok=True)
    folder.rename(incoming / folder.name)

    assert resume_path("true", args) == str(folder)
