"""The slow tests' own processes: one that dies is named by its signal, within seconds, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import time

import pytest

from qarl_trl.processes import ProcessDied
from slow.isolated import isolated, isolated_group


pytestmark = pytest.mark.slow


def _die(number: int, forks: bool) -> None:
    if forks and os.fork() == 0:
        time.sleep(60)  # holds every pipe of its parent open
        os._exit(0)
    os.kill(os.getpid(), number)
    time.sleep(60)


def _die_on_one_rank() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGILL)
    time.sleep(60)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGILL"])
@pytest.mark.parametrize("forks", [False, True])
def test_death_is_named(name, forks):
    isolated(os.getpid)  # the start of the server, which imports everything
    start = time.monotonic()
    with pytest.raises(ProcessDied, match=f"_die: its process died of {name}"):
        isolated(_die, getattr(signal, name), forks, timeout=60)
    assert time.monotonic() - start < 30


def test_death_of_one_rank_ends_the_group():
    isolated(os.getpid)
    start = time.monotonic()
    with pytest.raises(ProcessDied, match="_die_on_one_rank: its process died of SIGILL"):
        isolated_group(_die_on_one_rank, 2, timeout=60)
    assert time.monotonic() - start < 30


def test_hanging_process_reaches_its_limit():
    with pytest.raises(TimeoutError, match="sleep did not finish in 1 s"):
        isolated(time.sleep, 60, timeout=1)
