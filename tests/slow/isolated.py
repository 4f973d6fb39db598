"""Run a function in a fresh process: a vLLM engine keeps global state, so each gets a process of its own.

The processes are forked from one that has imported everything and run nothing, which saves each a quarter of a minute.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any


# No compiler needed, and the same arithmetic in every engine started here.
ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    # The engine in the same process: nothing that outlives it, and half the start.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
PRELOADED = ["qarl_trl.trainer", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"]


def isolated(function: Callable[..., Any], *args: Any, timeout: float = 600) -> Any:
    """`function(*args)` in a spawned process; its exception is raised here with the child's traceback."""
    os.environ.update(ENVIRONMENT)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(sender, function, args, dict(os.environ)))
    process.start()
    sender.close()
    try:
        if not receiver.poll(timeout):
            raise TimeoutError(f"{function.__name__} did not finish in {timeout} s")
        ok, result = receiver.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"{function.__name__} died with exit code {process.exitcode}") from None
    finally:
        # With what it started: a vLLM engine in a process of its own outlives its parent, and spins.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
    if not ok:
        raise AssertionError(f"in {function.__name__}:\n{result}")
    return result


def _call(sender: Any, function: Callable[..., Any], args: tuple, environment: dict[str, str]) -> None:
    os.setpgrp()
    os.environ.clear()
    os.environ.update(environment)  # the server has that of its start
    try:
        outcome = (True, function(*args))
    except BaseException:
        outcome = (False, traceback.format_exc())
    sender.send(outcome)
