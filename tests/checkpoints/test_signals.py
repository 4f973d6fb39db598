"""A signal stops a run, and not the children that its reward functions fork."""

import multiprocessing
import os
import signal
import time

from qarl_trl.checkpoints.signals import StopOnSignal


# Without the event the signal could come before the child has its parent's handlers.
def sleep(running):
    """What a forked child does: say that it runs, and wait for its end."""
    running.set()
    time.sleep(60)


def test_a_child_still_ends_when_it_is_told_to():
    # A fork has the handlers of its parent. A spawned process would not show the fault.
    context = multiprocessing.get_context("fork")
    running = context.Event()
    # One process agrees with itself.
    stop = StopOnSignal(lambda flag: flag)

    with stop.listening():
        child = context.Process(target=sleep, args=(running,))
        child.start()
        assert running.wait(10)

        child.terminate()
        child.join(10)
        # It would have noted the signal for the end of a step that never comes.
        assert child.exitcode == -signal.SIGTERM
        assert not stop.received

        # Control: the run itself notes it, and lives.
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received

    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
