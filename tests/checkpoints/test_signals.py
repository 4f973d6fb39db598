"""A signal stops a run, and not the children that its reward functions fork."""

import multiprocessing
import os
import signal
import time

from qarl_trl.checkpoints.signals import StopOnSignal


def test_a_child_still_ends_when_it_is_told_to():
    stop = StopOnSignal(lambda flag: flag)
    with stop.listening():
        for _ in range(20):  # told so at once: the signal comes while the child is being made
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
            child.start()
            child.terminate()
            child.join(10)
            assert child.exitcode == -signal.SIGTERM
        assert not stop.received
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received
