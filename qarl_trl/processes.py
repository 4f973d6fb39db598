"""Run a function in a subprocess with clear failures: if it crashes, is killed or hangs, one error names the step.

The subprocess does not run the caller's `__main__` again, as `multiprocessing` does with "spawn", so a script needs no
guard. Functions are pickled by name: define them in a module, not in `__main__`.

`concurrent.futures` does not do that. Its `ProcessPoolExecutor` starts processes by `multiprocessing`, which runs
`__main__` again, or forks a process that has threads. Its time limit ends the waiting and not the work. A process that
dies gives `BrokenProcessPool` without the signal, and leaves what it started.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import closing, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any


# `-c` and not `-m`: Python must search modules only where the caller does.
_PROGRAM = "import sys; sys.path[:] = {path!r}; from {module} import _serve; _serve({fd}, {caller})"
# Seconds between two looks at whether the other process lives.
_LOOK_S = 1.0


class ProcessDied(RuntimeError):
    """The process ended before its function returned. The message names the signal or the exit code."""


def ending(exitcode: int) -> str:
    """
    Describe how a process ended.

    Args:
        exitcode: Its exit code, or the negative number of a signal, as in `subprocess`.
    """
    if exitcode == -signal.SIGKILL:
        return "died of SIGKILL. Most often the machine ran out of memory (`dmesg` says so): make the run smaller."

    how = f"ended with exit code {exitcode}"
    if exitcode < 0:
        how = f"died of {signal.Signals(-exitcode).name}"
    return f"{how}. What it printed above may say why."


def in_fresh_process(step: str, function: Callable[..., Any], *args: Any, limit_s: float) -> Any:
    """
    Call `function(*args)` in a new process; afterwards kill it and all processes that it started.

    Args:
        step: What the call does; errors name it.
        function: Defined in a module: it is pickled by name.
        args: Its arguments, pickled.
        limit_s: Seconds until the process is killed.

    Returns:
        What the function returns, pickled.

    Raises:
        ProcessDied: if the process ends before the function returns.
        TimeoutError: after `limit_s` seconds.
        RuntimeError: for an error of the function, with its traceback as text.
    """
    with closing(Worker()) as worker:
        return worker.call(step, function, *args, limit_s=limit_s)


class Worker:
    """
    A process for many calls, from any thread. The first call starts it, as does the next one after it died.

    Functions run in its main thread, where SIGALRM works. Ctrl-C reaches only the caller. The process ends with the
    caller.

    Attributes:
        process: The process while it runs, else `None`.
    """

    def __init__(self) -> None:
        self.forget_process()

    def forget_process(self) -> None:
        """Forget the process, and let it run: for a fork of the caller, to which it does not belong."""
        # Another thread of the caller may have held the lock.
        self._lock = threading.Lock()
        self.process: subprocess.Popen | None = None
        self._pipe: Any = None

    def call(self, step: str, function: Callable[..., Any], *args: Any, limit_s: float) -> Any:
        """
        Call `function(*args)` in the process.

        Args:
            step: What the call does; errors name it.
            function: As for [`in_fresh_process`], as are results and errors.
            args: Its arguments.
            limit_s: Seconds until the process is killed. The start of the process counts.
        """
        with self._lock:
            process = self._running_process()
            end = time.monotonic() + limit_s
            try:
                self._pipe.send((function, args))
                while not self._pipe.poll(min(_LOOK_S, limit_s)):
                    # A fork of it (vLLM's engine is one) may keep its end of the pipe open, so look at the process,
                    # too.
                    if process.poll() is not None:
                        raise EOFError
                    if time.monotonic() >= end:
                        raise TimeoutError(f"{step}: no result within {limit_s:g} s, so its process was killed.")
                result, error = self._pipe.recv()
            except (EOFError, ConnectionError):
                # The pipe breaks before there is an exit code.
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=10)
                self.close()
                raise ProcessDied(f"{step}: its process {ending(process.returncode)}") from None
            except BaseException:
                # The limit, Ctrl-C, an unreadable result: the process may still be at work.
                self.close()
                raise

        if error is not None:
            raise RuntimeError(f"{step}: {error[0]}") from RuntimeError(f"in another process:\n{error[1]}")
        return result

    def close(self) -> None:
        """Kill the process and all processes that it started."""
        if self.process is not None:
            _kill_group(self.process.pid)
            self.process.wait()
            self._pipe.close()
        self.process = None
        self._pipe = None

    def _running_process(self) -> subprocess.Popen:
        """The process, which is started if it does not run: it may have died between two calls."""
        if self.process is None or self.process.poll() is not None:
            self.close()
            self.process = self._start()
        return self.process

    def _start(self) -> subprocess.Popen:
        """Start the process, with a pipe to it."""
        self._pipe, other_end = Pipe()
        program = _PROGRAM.format(path=sys.path, module=__name__, fd=other_end.fileno(), caller=os.getpid())

        process = subprocess.Popen(
            [sys.executable, "-c", program],
            # It must not take what is typed for the caller.
            stdin=subprocess.DEVNULL,
            pass_fds=[other_end.fileno()],
            # So that Ctrl-C does not reach it, and it can be killed with all processes that it starts.
            start_new_session=True,
        )
        # Else the pipe would not break when the process dies.
        other_end.close()
        return process


def _serve(fd: int, caller: int) -> None:
    """Runs in the process: serve requests until the caller is gone."""
    threading.Thread(target=_end_with, args=[caller], daemon=True).start()
    pipe = Connection(fd)

    # Its end: the caller is gone.
    with suppress(EOFError):
        while True:
            answer = _answer(pipe.recv_bytes())
            # It will be killed, so nothing else would print this.
            sys.stdout.flush()
            pipe.send(answer)


def _answer(request: bytes) -> tuple[Any, tuple[str, str] | None]:
    """Result and `None`, or `None` and an error with its traceback, as text: not every error can be pickled."""
    try:
        function, args = pickle.loads(request)
        return function(*args), None
    except BaseException as error:
        return None, (f"{type(error).__name__}: {error}", traceback.format_exc())


def _end_with(caller: int) -> None:
    """Kill this process and all that it started when the caller is gone."""
    # An orphan gets another parent.
    while os.getppid() == caller:
        time.sleep(_LOOK_S)
    _kill_group(os.getpid())


def _kill_group(pid: int) -> None:
    """Kill a process and all that it started, if they run."""
    # macOS says the latter of a group that has ended.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
