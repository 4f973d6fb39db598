"""Stop a run when its scheduler sends a signal: finish the step, save a checkpoint, and exit."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from accelerate.logging import get_logger
from transformers import TrainerCallback


# Schedulers send one of these before they kill a job.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# EX_TEMPFAIL of sysexits.h: the caller should start the run again.
EXIT_CODE = 75

logger = get_logger(__name__)


class StopOnSignal(TrainerCallback):
    """
    After SIGTERM or SIGUSR1 to any process, all processes finish the step, save, and exit with `EXIT_CODE`.

    Args:
        agree: Returns whether its argument is true in any process. It is collective: all processes must call it.

    Attributes:
        received: Whether this process got a signal.
    """

    def __init__(self, agree: Callable[[bool], bool]) -> None:
        self.received = False
        self._agree = agree
        self._process = os.getpid()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals inside the block, except for those that have a handler already."""
        unhandled = _unhandled_signals()
        for number in unhandled:
            signal.signal(number, self._receive)
        try:
            yield
        finally:
            for number in unhandled:
                signal.signal(number, signal.SIG_DFL)

    def _receive(self, number: int, _: Any) -> None:
        """Note the signal for the end of the step."""
        # A process that a reward function forked has this handler too. There the signal must end the process.
        if os.getpid() != self._process:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.received = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ask for a checkpoint if any process got a signal."""
        # Asked after every step by all processes: only some of them may have got the signal.
        if self._agree(self.received):
            control.should_save = True
            # The run ends with this checkpoint, and goes on from it: it needs the optimizer, too.
            args.save_only_model = False

    # A signal may also come during an evaluation, which follows the end of the step.
    on_evaluate = on_step_end

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Exit, now that the checkpoint is complete."""
        # The Trainer also saves after the last step. A run that is complete exits with the same code then, so it is
        # started once more, and trains nothing. If the signal came during a save without the optimizer, the next
        # step handles it.
        if self._agree(self.received) and not args.save_only_model:
            logger.warning("Stopped by a signal at step %d, saved; exit code %d.", state.global_step, EXIT_CODE)
            raise SystemExit(EXIT_CODE)


def _unhandled_signals() -> list[signal.Signals]:
    """The signals in `SIGNALS` without a handler; none if this thread may not set handlers."""
    # Python allows handlers only in the main thread.
    if threading.current_thread() is not threading.main_thread():
        return []
    return [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
