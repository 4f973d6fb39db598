"""A signal stops a run, and not the children that its reward functions fork."""

import multiprocessing
import os
import signal
import time

from qarl_trl.checkpoints.signals import StopOnSignal


def sleep(running):
    """What a forked child does: say that it runs, and wait for its end."""
    running.set()
    time.sleep(60)


def test_a_child_still_ends_when_it_is_told_to():
    context = multiprocessing.get_context("fork")
    running = context.Event()
    stop = StopOnSignal(lambda flag: flag)

    with stop.listening():
        child = context.Process(target=sleep, args=(running,))
        child.start()
        assert running.wait(10)

        child.terminate()
        child.join(10)
        assert child.exitcode == -signal.SIGTERM
        assert not stop.received

        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received

    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
