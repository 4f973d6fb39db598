"""Handle a scheduler's signal: finish the step, save a checkpoint, and exit."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from accelerate.logging import get_logger
from transformers import TrainerCallback


# EX_TEMPFAIL of sysexits.h: the caller should start the run again.
EXIT_CODE = 75

logger = get_logger(__name__)


class StopOnSignal(TrainerCallback):
    """After SIGTERM or SIGUSR1 to any process (`agree` asks all of them): finish the step, save, and exit with `EXIT_CODE`."""

    def __init__(self, agree: Callable[[bool], bool]) -> None:
        self.received, self._agree, self._process = False, agree, os.getpid()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals inside the block; Python allows that only in the main thread."""
        main = threading.current_thread() is threading.main_thread()
        free = [n for n in (signal.SIGTERM, signal.SIGUSR1) if main and signal.getsignal(n) is signal.SIG_DFL]
        for number in free:
            signal.signal(number, self._receive)
        try:
            yield
        finally:
            for number in free:
                signal.signal(number, signal.SIG_DFL)

    def _receive(self, number: int, _: Any) -> None:
        if os.getpid() != self._process:  # a fork of a reward function, which the signal must end
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.received = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ask for a checkpoint."""
        if self._agree(self.received):
            control.should_save = True

    on_evaluate = on_step_end  # a signal may come during an evaluation

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Exit, also after the last step."""
        if self._agree(self.received):
            logger.warning("Stopped by a signal at step %d, saved; exit code %d.", state.global_step, EXIT_CODE)
            raise SystemExit(EXIT_CODE)
