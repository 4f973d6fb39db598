"""One run at a time in an `output_dir`, also after a kill."""

import errno
import os
import signal
import socket
import subprocess
import sys
from contextlib import nullcontext

import pytest
from accelerate import PartialState
from conftest import make_model, make_tokenizer

from qarl_trl import cli
from qarl_trl.checkpoints.lock import holding


# A process that holds the lock until it is killed.
# It says when it has the lock, and then waits long enough for any test.
HOLDS = """
import sys, time
from pathlib import Path
from qarl_trl.checkpoints.lock import holding
with holding(Path(sys.argv[1])):
    print("holds", flush=True)
    time.sleep(60)
"""
# The same, with a fork that lives on when its parent is killed. It prints the fork's process id.
HOLDS_AND_FORKS = """
import os, sys, time
from pathlib import Path
from qarl_trl.checkpoints.lock import holding
with holding(Path(sys.argv[1])):
    child = os.fork()
    if not child:
        print(os.getpid(), flush=True)
    time.sleep(60)
"""


def start(code, folder):
    """A process that runs `code` for a folder."""
    return subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)


@pytest.fixture
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model(num_hidden_layers=1).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def other(tmp_path):
    """Another process that holds the lock."""
    # Without that line the test would be a race.
    with start(HOLDS, tmp_path) as process:
        assert process.stdout.readline() == "holds\n"
        yield process
        process.kill()


def test_the_second_run_is_told_who_has_the_folder_and_a_kill_frees_it(tmp_path, other):
    named = f"in use by process {other.pid} on {socket.gethostname()}"
    # Who holds it, and where: the file system may be shared by several machines.
    with pytest.raises(ValueError, match=named), holding(tmp_path):
        pytest.fail("two at once")

    other.kill()
    other.wait()

    with holding(tmp_path):
        pass


def test_an_export_does_not_write_into_the_folder_of_a_run(tmp_path, other, model_folder, capsys):
    argv = ["export", str(model_folder), str(tmp_path), "--group_size", "32"]
    with pytest.raises(SystemExit):
        cli.main(argv)
    assert f"in use by process {other.pid}" in capsys.readouterr().err

    # Control: after the run it does.
    other.kill()
    other.wait()
    cli.main(argv)
    assert (tmp_path / "config.json").is_file()


def test_a_child_that_outlives_a_killed_run_does_not_keep_the_folder(tmp_path):
    """A reward function's fork has a copy of all that its parent opened."""
    with start(HOLDS_AND_FORKS, tmp_path) as process:
        child = int(process.stdout.readline())
        process.kill()
        process.wait()
        os.kill(child, 0)  # control: it lives

        # A lock of the kernel belongs to the open file, of which the fork has a copy. filelock closes it there.
        try:
            with holding(tmp_path):
                pass
        finally:
            os.kill(child, signal.SIGKILL)


def test_one_process_may_hold_it_twice(tmp_path):
    same_folder = tmp_path / "." / ""

    # As a script with two trainers in one folder does, and with the folder named in two ways.
    with holding(tmp_path), holding(same_folder):
        pass
    with holding(tmp_path):
        pass


# An error of the disk is no lack of locks, so it stops the run.
@pytest.mark.parametrize(("number", "goes_on"), [(errno.ENOLCK, True), (errno.ENOSYS, True), (errno.EIO, False)])
def test_a_file_system_without_locks_stops_no_run(tmp_path, monkeypatch, caplog, number, goes_on):
    """NFS without its lock service says ENOLCK."""
    PartialState()  # for the log

    def fails(descriptor, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", fails)
    entered = False
    with nullcontext() if goes_on else pytest.raises(OSError, match="Input/output"), holding(tmp_path):
        entered = True

    assert entered == goes_on
    assert ("without locks" in caplog.text) == goes_on
