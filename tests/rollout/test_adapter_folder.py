"""The folder of an adapter: a killed run's is removed by the next, and nobody else's."""

import os
import subprocess
import sys

import pytest

from qarl_trl.rollout.adapter_folder import PREFIX, AdapterFolder, remove_leftovers


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
