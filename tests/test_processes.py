"""A process that dies, fails or hangs: one error within seconds, and nothing left behind."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from qarl_trl.processes import ProcessDied, Worker, in_fresh_process


@pytest.fixture
def worker():
    """A worker, which is killed after the test."""
    worker = Worker()
    yield worker
    worker.close()


def die(number):
    """End this process by a signal."""
    os.kill(os.getpid(), number)
    time.sleep(60)


def leave_a_fork_and_die(path, number):
    """Write the id of a fork that sleeps, and end this process by a signal."""
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    path.write_text(str(child))
    die(number)


def leave_a_process_and_hang(path):
    """Write the id of a process that sleeps, and sleep."""
    process = subprocess.Popen(["sleep", "60"])
    path.write_text(str(process.pid))
    time.sleep(60)


def fail(error, *args):
    raise error(*args)


def is_in_main_thread():
    return threading.current_thread() is threading.main_thread()


def pids():
    """The ids of this process, of its parent and of its session."""
    return os.getpid(), os.getppid(), os.getsid(0)


def gone(pid, within=5.0):
    """Whether a process ends within some seconds."""
    # The kernel ends a process some time after the signal. "Z": it has ended, and its parent has not asked how.
    end = time.monotonic() + within
    while time.monotonic() < end:
        if state(pid) in ("Z", None):
            return True
        time.sleep(0.05)
    return False


def state(pid):
    """Linux's letter for the state of a process, `None` if there is none."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            # The name before it, in brackets, may hold spaces.
            return file.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV"])
def test_death_by_a_signal_is_named_within_seconds_and_takes_what_it_started_along(tmp_path, name):
    number = getattr(signal, name)

    start = time.monotonic()
    with pytest.raises(ProcessDied, match=rf"^4/4 fresh engine: its process died of {name}\. \w+") as raised:
        # The fork holds every pipe of its parent open, as vLLM's engine does.
        in_fresh_process("4/4 fresh engine", leave_a_fork_and_die, tmp_path / "pid", number, limit_s=60)

    # The limit of the call is 60 s, which it must not wait for.
    assert time.monotonic() - start < 15
    assert ("memory" in str(raised.value)) == (name == "SIGKILL")
    assert gone(int((tmp_path / "pid").read_text()))


def test_limit_ends_what_hangs_with_all_it_started(tmp_path):
    start = time.monotonic()
    # Long enough for a process to start on a busy machine.
    with pytest.raises(TimeoutError, match="a step: no result within 10 s"):
        in_fresh_process("a step", leave_a_process_and_hang, tmp_path / "pid", limit_s=10)

    assert time.monotonic() - start < 40
    assert gone(int((tmp_path / "pid").read_text()))


def test_exit_code_is_named(worker):
    with pytest.raises(ProcessDied, match="a step: its process ended with exit code 3"):
        worker.call("a step", os._exit, 3, limit_s=60)


@pytest.mark.parametrize("error", [KeyError, TimeoutError, EOFError, SystemExit])
def test_error_arrives_as_text_with_the_line_that_raised_it_and_the_process_goes_on(worker, error):
    pid = worker.call("a step", os.getpid, limit_s=60)

    with pytest.raises(RuntimeError, match=f"a step: {error.__name__}: .*the message") as raised:
        worker.call("a step", fail, error, "the message", limit_s=60)

    assert "raise error(*args)" in str(raised.value.__cause__)
    assert worker.call("a step", os.getpid, limit_s=60) == pid


def test_worker_is_kept_in_a_session_of_its_own_and_works_in_its_main_thread(worker):
    pid, parent, session = worker.call("a step", pids, limit_s=60)

    assert parent == os.getpid()
    # Ctrl-C does not reach it.
    assert session == pid
    assert worker.call("a step", os.getpid, limit_s=60) == pid
    assert worker.call("a step", is_in_main_thread, limit_s=60)


def test_worker_is_started_again_after_a_limit_and_after_a_death(worker):
    first = worker.call("a step", os.getpid, limit_s=60)
    with pytest.raises(TimeoutError):
        worker.call("a step", time.sleep, 60, limit_s=0.5)

    second = worker.call("a step", os.getpid, limit_s=60)
    assert second != first
    with pytest.raises(ProcessDied):
        worker.call("a step", die, signal.SIGKILL, limit_s=60)

    third = worker.call("a step", os.getpid, limit_s=60)
    # Between two calls nothing is lost, so it is started again without an error.
    os.kill(third, signal.SIGKILL)
    assert gone(third)
    time.sleep(0.5)

    assert worker.call("a step", os.getpid, limit_s=60) not in (first, second, third)


def test_worker_answers_any_thread(worker):
    seen = []

    def ask():
        seen.append(worker.call("a step", os.getpid, limit_s=60))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    # One process: two answers over one pipe must not be mixed up.
    assert len(seen) == 4
    assert len(set(seen)) == 1


SCRIPT = """
import os, signal, time
from qarl_trl.processes import Worker
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell started in the background
print("started", flush=True)
worker = Worker()
print(worker.call("a step", os.getpid, limit_s=60), flush=True)
{rest}
"""


def started_script(folder, rest):
    """A script that has a worker, and the worker's id."""
    (folder / "script.py").write_text(SCRIPT.format(rest=rest))
    process = subprocess.Popen([sys.executable, folder / "script.py"], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "started\n"
    return process, int(process.stdout.readline())


def test_unguarded_script_runs_once_and_ends_with_its_worker(tmp_path):
    process, pid = started_script(tmp_path, "")

    # multiprocessing's "spawn" would print `started` again.
    assert process.communicate(timeout=30)[0] == ""
    assert process.returncode == 0
    assert gone(pid)


def test_worker_ends_when_its_caller_is_killed(tmp_path):
    process, pid = started_script(tmp_path, "time.sleep(60)")

    process.kill()
    process.wait()

    assert gone(pid)


def test_ctrl_c_ends_caller_and_worker(tmp_path):
    process, pid = started_script(tmp_path, "worker.call('a step', time.sleep, 60, limit_s=60)")
    # Between two looks of the caller, which are a second apart.
    time.sleep(0.5)

    # To the caller alone, as its worker is in a session of its own.
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)

    assert process.returncode == -signal.SIGINT
    assert gone(pid)
