"""Work in another process, whose end is seen: if it crashes, is killed or hangs, one error names the step and the cause.

loky starts the process. It does not run the caller's `__main__` again, as `spawn` does, so a script needs no guard.
"""

import os
import pickle
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

from loky import BrokenProcessPool, ProcessPoolExecutor
from loky.process_executor import TerminatedWorkerError


START_S = 120
_LOOK_ABOVE = "What it printed above may say why."
_REMEDIES = {
    "SIGKILL": "Most often the machine ran out of memory (`dmesg` says so): make the run smaller.",
    "SIGILL": "A library used an instruction that this CPU does not allow; the stack printed above names the call.",
}


class ProcessDied(RuntimeError):
    """The process ended before its function returned. The message names the signal or the exit code."""


def ending(exitcode: int) -> str:
    """How a process ended and what to do, by its exit code (negative: a signal, as `subprocess` has it)."""
    if exitcode >= 0:
        return f"ended with exit code {exitcode}. {_LOOK_ABOVE}"
    name = signal.Signals(-exitcode).name
    return f"died of {name}. {_REMEDIES.get(name, _LOOK_ABOVE)}"


def in_fresh_process(step: str, function: Callable[..., Any], *args: Any, limit_s: float) -> Any:
    """
    `function(*args)` in a new process, which is gone afterwards with all that it started.

    Errors name `step`: `ProcessDied` if the process was killed or crashed, `TimeoutError` after `limit_s` seconds, or what
    the function raised, with the traceback of the other process. Function, arguments and result are pickled.
    """
    worker = Worker()
    try:
        return worker.call(step, function, *args, limit_s=limit_s)
    finally:
        worker.close()


class Worker:
    """
    A process kept for many calls: started by the first, and again after it died or was killed.

    Calls may come from any thread, one at a time. A function runs in the process's main thread, where SIGALRM works.
    Ctrl-C reaches only the caller; when the caller is killed, the process ends too.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """In a fork of the caller: leave the process to the parent."""
        # Kept, because loky's clean-up could wait for a lock that no thread here will release.
        self._left = getattr(self, "_executor", None)
        self._lock = threading.Lock()
        self._executor: ProcessPoolExecutor | None = None
        self._pid: int | None = None

    @property
    def running(self) -> bool:
        """Whether a process was started and not closed."""
        return self._executor is not None

    def call(self, step: str, function: Callable[..., Any], *args: Any, limit_s: float) -> Any:
        """`function(*args)` in the process; arguments and errors are those of [`in_fresh_process`]."""
        with self._lock:
            if self._executor is None:
                self._start(step)
            try:
                future = self._executor.submit(_run, function, args)
            except BrokenProcessPool:  # it died between two calls
                self.close()
                self._start(step)
                future = self._executor.submit(_run, function, args)
            return self._result(step, future, limit_s)

    def close(self) -> None:
        """Kill the process and all that it started."""
        executor, pid = self._executor, self._pid
        self._executor = self._pid = None
        if pid is not None:
            _kill_group(pid)
        if executor is not None:
            executor.shutdown(kill_workers=True)

    def _start(self, step: str) -> None:
        self._executor = ProcessPoolExecutor(max_workers=1, initializer=_lead_session, initargs=(os.getpid(),))
        self._result(f"{step} (start of its process)", self._executor.submit(_run, os.getpid, ()), START_S)

    def _result(self, step: str, future: Future, limit_s: float) -> Any:
        end = time.monotonic() + limit_s
        try:
            while not wait([future], timeout=max(0.0, min(1.0, end - time.monotonic()))).done:
                if time.monotonic() >= end:
                    raise TimeoutError(
                        f"{step}: no result within {limit_s:g} s, so its process was killed. It hung, or this machine "
                        "is far slower than expected."
                    )
                if self._pid is not None and _is_dead(self._pid):
                    _kill_group(self._pid)  # a fork of it holds its pipes open, and loky would wait for that one
            # The process may be another than before: loky replaces one whose memory grows.
            self._pid, value = future.result()
            return value
        except TerminatedWorkerError as error:
            self.close()
            code = re.search(r"\((-?\d+)\)", str(error))
            raise ProcessDied(f"{step}: its process {ending(int(code[1])) if code else 'died'}") from None
        except BaseException as error:
            if not future.done() or isinstance(error, BrokenProcessPool):  # the limit, Ctrl-C, an unreadable result
                self.close()
            raise


def _run(function: Callable[..., Any], args: tuple) -> tuple[int, Any]:
    """In the process: the result, or an error that can be sent."""
    try:
        return os.getpid(), function(*args)
    except BaseException as error:
        if isinstance(error, Exception) and _can_be_sent(error):
            raise
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
    finally:
        sys.stdout.flush()  # it will be killed


def _can_be_sent(error: Exception) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:
        return False


def _lead_session(caller: int) -> None:
    """In the process: a session of its own, which ends with its caller."""
    os.setsid()

    def watch() -> None:
        while os.getppid() == caller:
            time.sleep(1)
        _kill_group(os.getpid())

    threading.Thread(target=watch, daemon=True).start()


def _is_dead(pid: int) -> bool:
    """Whether a child has ended and loky has not seen it; its exit code is left there. Unknown on macOS."""
    with suppress(AttributeError, ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return False


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a group that has ended
        os.killpg(pid, signal.SIGKILL)
