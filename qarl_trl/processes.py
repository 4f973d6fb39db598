"""Run a function in a subprocess with clear failures: if it crashes, is killed or hangs, one error names the step.

The subprocess does not run the caller's `__main__` again, as `multiprocessing` does with "spawn", so a script needs no
guard. Functions are pickled by name: define them in a module, not in `__main__`.
"""

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


class ProcessDied(RuntimeError):
    """The process ended before its function returned. The message names the signal or the exit code."""


def ending(exitcode: int) -> str:
    """Describe how a process ended, by its exit code (negative: a signal, as in `subprocess`)."""
    if exitcode == -signal.SIGKILL:
        return "died of SIGKILL. Most often the machine ran out of memory (`dmesg` says so): make the run smaller."
    how = f"ended with exit code {exitcode}" if exitcode >= 0 else f"died of {signal.Signals(-exitcode).name}"
    return f"{how}. What it printed above may say why."


def in_fresh_process(step: str, function: Callable[..., Any], *args: Any, limit_s: float) -> Any:
    """
    Call `function(*args)`, all pickled, in a new process; afterwards kill it and all processes that it started.

    Errors name `step`: `ProcessDied`, `TimeoutError` after `limit_s` seconds, `RuntimeError` for errors of the function.
    """
    with closing(Worker()) as worker:
        return worker.call(step, function, *args, limit_s=limit_s)


class Worker:
    """
    A process for many calls, from any thread. The first call starts it, as does the next one after it died.

    Functions run in its main thread, where SIGALRM works. Ctrl-C reaches only the caller; the process ends with the caller.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.process: Any = None  # a `subprocess.Popen` while it runs, and a `Connection` to it
        self._pipe: Any = None

    def call(self, step: str, function: Callable[..., Any], *args: Any, limit_s: float) -> Any:
        """Call `function(*args)` in the process; arguments and errors as for [`in_fresh_process`]."""
        with self._lock:
            if self.process is None or self.process.poll() is not None:  # it may have died between two calls
                self.close()
                self._start()
            process, end = self.process, time.monotonic() + limit_s
            try:
                self._pipe.send((function, args))
                # A fork of it (vLLM's engine is one) may keep its end of the pipe open, so also poll the process.
                while not self._pipe.poll(min(1.0, limit_s)):
                    if process.poll() is not None:
                        raise EOFError
                    if time.monotonic() >= end:
                        raise TimeoutError(f"{step}: no result within {limit_s:g} s, so its process was killed.")
                result, error = self._pipe.recv()
            except (EOFError, ConnectionError):
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=10)
                self.close()
                raise ProcessDied(f"{step}: its process {ending(process.returncode)}") from None
            except BaseException:  # the limit, Ctrl-C, an unreadable result
                self.close()
                raise
        if error:
            raise RuntimeError(f"{step}: {error[0]}") from RuntimeError(f"in another process:\n{error[1]}")
        return result

    def close(self) -> None:
        """Kill the process and all processes that it started."""
        if self.process is not None:
            _kill_group(self.process.pid)
            self.process.wait()
            self._pipe.close()
        self.process = self._pipe = None

    def _start(self) -> None:
        self._pipe, theirs = Pipe()
        program = _PROGRAM.format(path=sys.path, module=__name__, fd=theirs.fileno(), caller=os.getpid())
        # A new session, so that Ctrl-C does not reach it, and it can be killed with all processes that it starts.
        how: Any = {"stdin": subprocess.DEVNULL, "pass_fds": [theirs.fileno()], "start_new_session": True}
        self.process = subprocess.Popen([sys.executable, "-c", program], **how)
        theirs.close()


def _serve(fd: int, caller: int) -> None:
    """Runs in the process: serve requests until the caller is gone."""

    def watch() -> None:
        while os.getppid() == caller:
            time.sleep(1)
        _kill_group(os.getpid())

    threading.Thread(target=watch, daemon=True).start()
    pipe = Connection(fd)
    with suppress(EOFError):  # the caller is gone
        while True:
            request = pipe.recv_bytes()
            try:
                function, args = pickle.loads(request)
                answer: Any = function(*args), None
            except BaseException as error:  # as text: not every exception can be pickled
                answer = None, (f"{type(error).__name__}: {error}", traceback.format_exc())
            sys.stdout.flush()  # it will be killed
            pipe.send(answer)


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a group that has ended
        os.killpg(pid, signal.SIGKILL)
