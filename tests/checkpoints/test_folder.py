"""A checkpoint's folder: whole or named as damaged, and rotation that keeps what a resume needs."""

import errno
import json
import re
import shutil
from pathlib import Path

import pytest
from configs import config
from transformers.trainer_utils import rotate_checkpoints

from qarl_trl.checkpoints.folder import INCOMING, MANIFEST, commit, damage, finished, rotate
from qarl_trl.checkpoints.resume import resume_path


def write(output_dir, step, content="weights", cards=(), **facts):
    """A checkpoint, saved as the trainer does."""
    folder = output_dir / INCOMING / f"checkpoint-{step}"
    # As a run leaves it: weights, the low-bit model in a sub-folder, and an empty file, which must count as well.
    (folder / "low_bit").mkdir(parents=True)
    (folder / "model.safetensors").write_text(content)
    (folder / "low_bit" / "config.json").write_text("{}")
    (folder / "scheduler.pt").write_text("")
    for card in cards:
        (folder / card).write_text("# A card")

    target = output_dir / folder.name
    commit(folder, target, **facts)
    return target


def checkpoint_names(output_dir):
    """The names of all folders that look like a checkpoint."""
    return {folder.name for folder in output_dir.glob("checkpoint-*")}


def test_what_was_committed_is_whole_and_in_its_place(tmp_path):
    folder = write(tmp_path, 1, model="toy")

    assert damage(folder) is None
    assert not (tmp_path / INCOMING / "checkpoint-1").exists()

    manifest = json.loads((folder / MANIFEST).read_text())
    # By relative paths, with their bytes. The manifest itself is not among them.
    assert manifest["files"] == {"model.safetensors": 7, "low_bit/config.json": 2, "scheduler.pt": 0}
    assert manifest["model"] == "toy"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        # Cut off by one byte, gone, and three manifests that say nothing.
        (lambda folder: (folder / "model.safetensors").write_text("weight"), "6 bytes, needs 7"),
        (lambda folder: (folder / "scheduler.pt").unlink(), "scheduler.pt is missing"),
        (lambda folder: (folder / MANIFEST).unlink(), "manifest.json is missing"),
        (lambda folder: (folder / MANIFEST).write_text('{"files": {'), "cut off"),
        (lambda folder: (folder / MANIFEST).write_text("[]"), "cut off"),
    ],
)
def test_damage_is_named(tmp_path, change, words):
    folder = write(tmp_path, 1)

    change(folder)

    assert re.search(words, damage(folder))


def test_a_card_that_a_user_edited_or_peft_wrote_again_is_no_damage(tmp_path):
    """A callback that calls `model.save_pretrained` in each checkpoint rewrites it, and no resume reads it."""
    cards = ("README.md", "low_bit/README.md")
    target = write(tmp_path, 1, cards=cards)
    manifest = json.loads((target / MANIFEST).read_text())
    # Control: the manifest does not list them.
    assert not {*cards} & manifest["files"].keys()

    (target / "README.md").write_text("My own words")
    (target / "low_bit" / "README.md").unlink()
    assert damage(target) is None
    assert finished(tmp_path) == [target]

    # One that an earlier version wrote.
    manifest["files"] |= dict.fromkeys(cards, 5)
    (target / MANIFEST).write_text(json.dumps(manifest))
    assert damage(target) is None


@pytest.mark.parametrize("moves", [False, True])
def test_a_model_that_was_edited_or_moved_away_to_be_served_is_no_damage(tmp_path, moves):
    """A resume that took it for damage would go back to an earlier checkpoint, or refuse to go on."""
    served = ["low_bit/generation_config.json", "low_bit/model.safetensors", "tokenizer_config.json"]
    write(tmp_path, 1)
    target = write(tmp_path, 2, cards=[*served, "config.json"])
    # Control: the manifest lists them.
    assert {*served} <= json.loads((target / MANIFEST).read_text())["files"].keys()

    for name in served:
        (target / name).write_text("others of mine")
    if moves:
        (target / "low_bit").rename(tmp_path / "served")

    assert damage(target) is None
    assert resume_path("auto", config(tmp_path)) == str(target)
    # Control: other files count.
    (target / "config.json").write_text("others of mine")
    assert "config.json" in damage(target)


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    write(tmp_path, 1, "old")
    new = write(tmp_path, 1, "new")

    assert (new / "model.safetensors").read_text() == "new"
    assert finished(tmp_path) == [new]


@pytest.fixture
def failing_renames(monkeypatch):
    """A function that makes renames to a checkpoint's place fail from one on, as a network file system may."""
    rename = Path.rename

    def fail(first, last):
        # Only renames out of these two count: the first brings the new checkpoint, the second brings the old one back.
        numbers = iter(range(1, 100))

        def fails_later(path, target):
            if path.parent.name in ("_incoming", "_replaced") and first <= next(numbers) <= last:
                raise OSError(errno.EIO, "Input/output error", str(path))
            return rename(path, target)

        monkeypatch.setattr(Path, "rename", fails_later)

    yield fail
    monkeypatch.undo()


def test_a_checkpoint_that_could_not_be_replaced_is_in_its_place_again(tmp_path, failing_renames):
    folder = write(tmp_path, 1, "old")

    # The new one does not arrive, and the old one returns.
    failing_renames(1, 1)
    with pytest.raises(OSError, match="Input/output error"):
        write(tmp_path, 1, "new")
    shutil.rmtree(tmp_path / INCOMING)  # as the trainer does after a failed save

    assert finished(tmp_path) == [folder]
    assert (folder / "model.safetensors").read_text() == "old"


def test_a_checkpoint_whose_return_failed_too_is_named_and_a_resume_brings_it_back(
    tmp_path, failing_renames, monkeypatch
):
    folder = write(tmp_path, 1, "old")

    # Neither arrives.
    failing_renames(1, 2)
    with pytest.raises(OSError, match="Input/output error.*the earlier checkpoint-1 is in .*_replaced"):
        write(tmp_path, 1, "new")
    monkeypatch.undo()
    shutil.rmtree(tmp_path / INCOMING)
    assert not folder.exists()

    assert resume_path("auto", config(tmp_path)) == str(folder)
    assert (folder / "model.safetensors").read_text() == "old"
    write(tmp_path, 1, "new")  # control: nothing of it is in the way
    assert (folder / "model.safetensors").read_text() == "new"
    assert not (tmp_path / "_replaced").exists()


def test_a_folder_of_a_user_that_could_not_return_outlives_later_saves_and_the_next_start_brings_it_back(
    tmp_path, failing_renames, monkeypatch
):
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "loss.png").write_text("picture")

    failing_renames(1, 2)
    with pytest.raises(OSError, match="Input/output error.*the earlier checkpoint-1 is in .*_replaced"):
        write(tmp_path, 1, "new")
    monkeypatch.undo()
    shutil.rmtree(tmp_path / INCOMING)
    # Replaces one, so it deletes what it has replaced.
    write(tmp_path, 2, "other")
    write(tmp_path, 2, "newer")

    assert resume_path("auto", config(tmp_path)) == str(tmp_path / "checkpoint-2")
    assert (tmp_path / "checkpoint-1" / "loss.png").read_text() == "picture"
    assert not any((tmp_path / "_replaced").iterdir())


def test_a_start_deletes_what_a_checkpoint_has_replaced_if_a_kill_came_before(tmp_path):
    target = write(tmp_path, 1, "new")
    replaced = write(tmp_path / "_replaced", 1, "old")
    (replaced / "loss.png").write_text("picture")

    assert resume_path("auto", config(tmp_path)) == str(target)
    # A kill came after its copy. Where none was made, it is made now.
    assert (target / "loss.png").read_text() == "picture"
    assert (target / "model.safetensors").read_text() == "new"
    assert not (tmp_path / "_replaced" / "checkpoint-1").exists()


def test_a_checkpoint_takes_the_files_of_a_folder_that_could_not_return(tmp_path, failing_renames, monkeypatch):
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "loss.png").write_text("picture")
    failing_renames(1, 2)
    with pytest.raises(OSError, match="Input/output error"):
        write(tmp_path, 1, "new")
    monkeypatch.undo()
    shutil.rmtree(tmp_path / INCOMING)  # as the trainer does after a failed save

    # The same trainer goes on, without a start in between.
    target = write(tmp_path, 1, "newer")

    assert (target / "model.safetensors").read_text() == "newer"
    assert (target / "loss.png").read_text() == "picture"
    assert not (tmp_path / "_replaced").exists()


@pytest.mark.parametrize("manifest", [False, True], ids=["user's folder", "checkpoint"])
@pytest.mark.parametrize("killed_after", [1, 2])
def test_files_of_a_user_survive_a_kill_between_the_renames_of_a_checkpoint(
    tmp_path, monkeypatch, killed_after, manifest
):
    """A folder with a callback's files makes way, and the checkpoint comes: two renames, and a kill after each."""
    if manifest:
        write(tmp_path, 1, "old")
    (tmp_path / "checkpoint-1" / "plots").mkdir(parents=True)
    (tmp_path / "checkpoint-1" / "plots" / "loss.png").write_text("picture")
    rename = Path.rename
    numbers = iter(range(1, 100))

    def renames(path, target):
        if next(numbers) > killed_after:
            raise KeyboardInterrupt
        return rename(path, target)

    def deletes(folder, **_):
        if folder.exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", renames)
    monkeypatch.setattr(shutil, "rmtree", deletes)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, 1, "new")
    monkeypatch.undo()

    target = tmp_path / "checkpoint-1"
    assert resume_path("auto", config(tmp_path)) == str(target)
    assert (target / "model.safetensors").read_text() == "new"
    assert (target / "plots" / "loss.png").read_text() == "picture"
    write(tmp_path, 1, "newer")
    assert (target / "plots" / "loss.png").read_text() == "picture"
    assert not (tmp_path / "_replaced").exists()


def test_files_of_a_user_in_a_folder_that_the_checkpoint_has_too_stay(tmp_path):
    low_bit = tmp_path / "checkpoint-1" / "low_bit"
    (low_bit / "plots").mkdir(parents=True)
    (low_bit / "plots" / "loss.png").write_text("picture")
    (low_bit / "config.json").write_text("a user's")

    target = write(tmp_path, 1)

    assert (target / "low_bit" / "plots" / "loss.png").read_text() == "picture"
    # The checkpoint's own file wins.
    assert damage(target) is None
    assert (target / "low_bit" / "config.json").read_text() == "{}"
    assert {path.name for path in tmp_path.iterdir()} <= {"checkpoint-1", INCOMING}


def test_files_that_a_user_put_into_a_checkpoint_stay_when_another_replaces_it(tmp_path):
    """A run that goes back to an earlier step saves the later ones again, and a callback writes before each save."""
    target = write(tmp_path, 1, "old", cards=["README.md"])
    (target / "metrics.json").write_text("{}")
    (target / "low_bit" / "scores.json").write_text("[]")
    (target / "samples").mkdir()
    (target / "samples" / "1.txt").write_text("a")

    write(tmp_path, 1, "newer")

    assert damage(target) is None
    assert (target / "model.safetensors").read_text() == "newer"
    assert (target / "metrics.json").read_text() == "{}"
    assert (target / "low_bit" / "scores.json").read_text() == "[]"
    assert (target / "samples" / "1.txt").read_text() == "a"
    # Nothing of the older checkpoint.
    assert not (target / "README.md").exists()
    assert not (tmp_path / "_replaced").exists()


def test_a_file_of_a_user_that_cannot_be_copied_leaves_all_as_it_was(tmp_path, monkeypatch):
    target = write(tmp_path, 1, "old")
    (target / "metrics.json").write_text("{}")

    def fails(source, place):
        raise OSError(errno.ENOSPC, "No space left on device", str(place))

    monkeypatch.setattr(shutil, "copy2", fails)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, 1, "new")

    assert damage(target) is None
    assert (target / "model.safetensors").read_text() == "old"
    assert (target / "metrics.json").read_text() == "{}"


def test_a_checkpoint_that_cannot_be_read_now_is_not_damaged(tmp_path, monkeypatch):
    folder = write(tmp_path, 1)
    read_text = Path.read_text

    def stale(path, *args):
        if path.name == MANIFEST:
            # As of a network file system whose server was restarted: the file is there, and cannot be read now.
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return read_text(path, *args)

    monkeypatch.setattr(Path, "read_text", stale)

    with pytest.raises(OSError, match="Stale file handle.*checkpoint-1"):
        damage(folder)
    # Not among the complete ones, so a rotation does not delete it.
    assert finished(tmp_path) == []


def test_rotation_leaves_what_is_damaged_or_was_not_written_by_the_trainer(tmp_path):
    """Somebody may want to repair a checkpoint of which a file was cut off; and a copy by a user is the user's."""
    # 10 sorts before 2 as a word.
    for step in (1, 2, 3, 10):
        write(tmp_path, step)
    (tmp_path / "checkpoint-2" / "model.safetensors").write_text("w")
    shutil.copytree(tmp_path / "checkpoint-1", tmp_path / "checkpoint-1-keep")
    (tmp_path / "checkpoint-11").mkdir()
    kept = {"checkpoint-2", "checkpoint-1-keep", "checkpoint-11", "checkpoint-10"}

    rotate(tmp_path, 2)
    assert checkpoint_names(tmp_path) == kept | {"checkpoint-3"}

    rotate(tmp_path, 1)
    assert checkpoint_names(tmp_path) == kept

    rotate(tmp_path, None)
    assert damage(tmp_path / "checkpoint-10") is None

    # Control: transformers counts them all, and deletes the last that is whole.
    rotate_checkpoints(str(tmp_path), save_total_limit=1)
    assert checkpoint_names(tmp_path) == {"checkpoint-11"}


def test_after_a_kill_in_its_deletion_half_of_an_old_checkpoint_does_not_return(tmp_path, monkeypatch):
    write(tmp_path, 1)
    target = write(tmp_path, 2)

    def killed(folder, **_):
        (folder / "low_bit" / "config.json").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        rotate(tmp_path, 1)
    monkeypatch.undo()
    # Control: what a resume reads is still there.
    assert (tmp_path / INCOMING / "checkpoint-1" / "model.safetensors").exists()

    assert resume_path("auto", config(tmp_path)) == str(target)
    assert checkpoint_names(tmp_path) == {"checkpoint-2"}


def test_the_last_is_the_one_written_last(tmp_path):
    """A run that went back to step 1 goes on from there, not from what it left behind."""
    # The run of step 7 was abandoned: it went back to step 1, and on from there.
    for step in (1, 7, 2):
        write(tmp_path, step)
    assert finished(tmp_path)[-1].name == "checkpoint-2"

    rotate(tmp_path, 1)
    assert [folder.name for folder in finished(tmp_path)] == ["checkpoint-2"]
