"""`qarl_trl.rollout.server.files`: what a trainer writes is what a server's workers read."""

import os
import time

import pytest
import torch
from safetensors.torch import load_file

from qarl_trl.rollout.server.files import read_parts, remove_leftovers, save_parts


TENSORS = {f"{name}.{number}": torch.arange(8) + number for number in range(3) for name in "ba"}


def test_parts_end_at_their_size_and_hold_views_of_one_storage(tmp_path):
    # 32, 32 and 64 bytes.
    whole = torch.arange(8)
    stream = [("b", whole[:4]), ("a", whole[4:]), ("c", whole)]

    assert save_parts(stream, tmp_path, limit=64) == 2

    # Views of one storage, which safetensors itself refuses.
    first = load_file(tmp_path / "0.safetensors")
    second = load_file(tmp_path / "1.safetensors")
    assert torch.equal(torch.cat([first["b"], first["a"]]), second["c"])


def test_a_part_has_the_mode_that_the_umask_says(tmp_path):
    save_parts(TENSORS.items(), tmp_path)

    # safetensors writes without regard to the umask, and a server may be another user's.
    ordinary = tmp_path / "ordinary"
    ordinary.touch()
    assert (tmp_path / "0.safetensors").stat().st_mode == ordinary.stat().st_mode


@pytest.fixture
def root(tmp_path):
    """A sync folder, as a server names it, with one sync of one file in `run-1`."""
    shared = tmp_path / "shared"
    (shared / "run-1").mkdir(parents=True)
    assert save_parts(TENSORS.items(), shared / "run-1") == 1
    return str(shared)


def test_a_sync_is_read_by_the_name_of_its_folder(root):
    read = dict(read_parts(root, "run-1", 1))

    assert read.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(read[name], tensor), name


def test_no_other_folder_is_read(root, tmp_path):
    # One that is not there, the parent in three ways, and the sync folder itself.
    for elsewhere in ("run-2", "..", "../shared/..", str(tmp_path), "."):
        with pytest.raises(ValueError, match="has no folder .* in its sync_folder .*both must mount the same"):
            read_parts(root, elsewhere, 1)


def test_a_file_that_is_missing_or_truncated_is_an_error_before_anything_is_read(root, tmp_path):
    with pytest.raises(ValueError, match=r"cannot read all 2 files of .*run-1"):
        read_parts(root, "run-1", 2)

    # By one byte.
    part = tmp_path / "shared" / "run-1" / "0.safetensors"
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"cannot read all 1 files of .*run-1"):
        read_parts(root, "run-1", 1)


def test_what_a_killed_trainer_left_is_removed_and_nothing_else(tmp_path):
    """A folder of the model's size, which nobody else would remove."""
    # Young, as that of another run; a user's by its name, by its files.
    names = ("0123abcd-7", "0123abcd-8", "my-run-1", "89abcdef-1")
    for name in names:
        (tmp_path / name).mkdir()
        save_parts(TENSORS.items(), tmp_path / name)
    (tmp_path / "89abcdef-1" / "notes.txt").touch()
    an_hour_ago = time.time() - 3600
    for path in tmp_path.rglob("*"):
        if "0123abcd-8" not in str(path):
            os.utime(path, (an_hour_ago, an_hour_ago))

    assert remove_leftovers(tmp_path, 60) == [tmp_path / "0123abcd-7"]

    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])
    assert remove_leftovers(tmp_path / "not yet", 60) == []
