"""`qarl_trl.rollout.adapter_folder`: where it is; a killed run's is removed by the next, and nobody else's."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from qarl_trl.rollout.adapter_folder import PREFIX, AdapterFolder, adapter_place, remove_leftovers


# A process that holds a folder until it is killed.
HOLDS = """
import sys, time
from qarl_trl.rollout.adapter_folder import AdapterFolder
folder = AdapterFolder(sys.argv[1])
print(folder.path, flush=True)
time.sleep(60)
"""


@pytest.fixture
def other(tmp_path):
    """Another process, and its folder."""
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        yield process, tmp_path / os.path.basename(process.stdout.readline().strip())
        process.kill()


def test_what_a_killed_run_left_is_removed_by_the_next_and_a_living_ones_is_not(tmp_path, other):
    process, folder = other
    (folder / "adapter_model.safetensors").write_text("weights")
    # The other process lives, so its folder is locked.
    own = AdapterFolder(str(tmp_path))
    assert folder.exists()

    process.kill()
    process.wait()
    assert folder.exists()  # control: nothing else removes it
    again = AdapterFolder(str(tmp_path))

    assert not folder.exists()
    assert own.path.exists()
    assert again.path.exists()


def test_what_is_not_such_a_folder_stays(tmp_path):
    (tmp_path / f"{PREFIX}without_lock").mkdir()  # as between the first two steps of another run
    (tmp_path / f"{PREFIX}file").write_text("mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "lock").write_text("")

    remove_leftovers(tmp_path)

    assert len(list(tmp_path.iterdir())) == 3


def test_a_run_that_ends_leaves_nothing(tmp_path):
    folder = AdapterFolder(str(tmp_path))
    del folder

    assert not list(tmp_path.iterdir())


# 1000 numbers of 2 bytes, twice.
@pytest.mark.parametrize(("free", "place"), [(4001, "/dev/shm"), (4000, None)])
def test_an_adapter_goes_to_memory_where_it_fits_and_else_to_disk(monkeypatch, free, place):
    # Only the factors count, and not the base beside them.
    parameters = [("q.lora_A.weight", torch.empty(1000)), ("q.weight", torch.empty(9**6))]
    model = SimpleNamespace(named_parameters=lambda: parameters)
    monkeypatch.setattr("os.path.isdir", lambda path: True)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free))

    assert adapter_place(model) == place
