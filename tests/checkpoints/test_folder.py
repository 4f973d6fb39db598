"""A checkpoint's folder: whole or named as damaged, and rotation that keeps what a resume needs."""

import json
import re

import pytest
from transformers.trainer_utils import rotate_checkpoints

from qarl_trl.checkpoints.folder import INCOMING, MANIFEST, commit, damage, finished, rotate


def write(output_dir, step, content="weights"):
    """A checkpoint, saved as the trainer does."""
    folder = output_dir / INCOMING / f"checkpoint-{step}"
    (folder / "low_bit").mkdir(parents=True)
    (folder / "model.safetensors").write_text(content)
    (folder / "low_bit" / "config.json").write_text("{}")
    target = output_dir / folder.name
    commit(folder, target, processes=1)
    return target


def test_what_was_committed_is_whole_and_in_its_place(tmp_path):
    folder = write(tmp_path, 1)
    assert damage(folder) is None
    assert not (tmp_path / INCOMING / "checkpoint-1").exists()
    manifest = json.loads((folder / MANIFEST).read_text())
    assert set(manifest["files"]) == {"model.safetensors", "low_bit/config.json"}
    # printf weights | gzip -c | tail -c8 | od -An -tu4
    assert manifest["files"]["model.safetensors"] == [7, 449999704]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: (f / "model.safetensors").write_text("weight"), "6 bytes, must have 7"),
        (lambda f: (f / "model.safetensors").write_text("Weights"), "model.safetensors is not what was written"),
        (lambda f: (f / "low_bit" / "config.json").unlink(), "incomplete.*low_bit/config.json"),
        (lambda f: (f / MANIFEST).unlink(), "incomplete.*manifest.json"),
        (lambda f: (f / MANIFEST).write_text('{"files": {'), "incomplete"),
        (lambda f: (f / MANIFEST).write_text("[]"), "incomplete"),
    ],
)
def test_damage_is_named(tmp_path, change, words):
    folder = write(tmp_path, 1)
    assert damage(folder) is None  # asked before, so that nothing remembered may hide the change
    change(folder)
    assert re.search(words, damage(folder))


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    write(tmp_path, 1, "old")
    assert (write(tmp_path, 1, "new") / "model.safetensors").read_text() == "new"
    assert [folder.name for folder in finished(tmp_path)] == ["checkpoint-1"]


def test_rotation_counts_and_deletes_complete_ones_only(tmp_path):
    for step in (1, 2, 3, 10):
        write(tmp_path, step)
    (tmp_path / "checkpoint-11").mkdir()
    rotate(tmp_path, 2, str(tmp_path / "checkpoint-1"))
    assert {f.name for f in tmp_path.glob("checkpoint-*")} == {"checkpoint-1", "checkpoint-10", "checkpoint-11"}
    rotate(tmp_path, 1, None)
    assert [f.name for f in finished(tmp_path)] == ["checkpoint-10"]
    rotate(tmp_path, None, None)
    assert damage(tmp_path / "checkpoint-10") is None
    # Control: transformers counts the incomplete one, and deletes the last that is whole.
    rotate_checkpoints(str(tmp_path), save_total_limit=1)
    assert [f.name for f in tmp_path.glob("checkpoint-*")] == ["checkpoint-11"]


def test_the_last_is_the_one_written_last(tmp_path):
    """A run that went back to step 1 goes on from there, not from what it left behind."""
    for step in (1, 7, 2):
        write(tmp_path, step)
    assert finished(tmp_path)[-1].name == "checkpoint-2"
    rotate(tmp_path, 1, None)
    assert [f.name for f in finished(tmp_path)] == ["checkpoint-2"]


def test_the_one_written_last_is_the_newest_whatever_the_clock_says(tmp_path, monkeypatch):
    for step, now in ((1, 2000.0), (2, 1000.0)):
        monkeypatch.setattr("time.time", lambda now=now: now)
        (tmp_path / "_incoming" / "x").mkdir(parents=True)
        commit(tmp_path / "_incoming" / "x", tmp_path / f"checkpoint-{step}")
    assert [folder.name for folder in finished(tmp_path)] == ["checkpoint-1", "checkpoint-2"]
