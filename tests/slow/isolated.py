"""Run a function in a fresh process: a vLLM engine keeps global state, so each gets a process of its own.

The processes are forked from one that has imported everything and run nothing, which saves each a quarter of a minute.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from qarl_trl.cpu_exact.arithmetic import choose_arithmetic
from qarl_trl.processes import ProcessDied, ending


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
    """`function(*args)` in a process of its own; its exception is raised here with the child's traceback."""
    return _run(function, args, [{}], timeout)[0]


def isolated_group(function: Callable[..., Any], number: int, *args: Any, timeout: float = 600) -> list[Any]:
    """`function(*args)` in `number` processes that find each other as those of `torchrun` do; what each returned."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    shared["VLLM_DIST_IDENT"] = f"qarl{uuid4().hex}"  # names vLLM's shared memory, where no worker of vLLM names it
    sizes = {"WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number)}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank), **shared, **sizes} for rank in range(number)]
    # An engine over several processes on a CPU leaves its shared memory, and a worker of vLLM gives it the same name in every run.
    names = ("-tp:0-*-cpushm_*", f"{shared['VLLM_DIST_IDENT']}-*")
    try:
        _unlink(*names)
        return _run(function, args, ranks, timeout)
    finally:
        _unlink(*names)


def _unlink(*names: str) -> None:
    for name in names:
        for left in Path("/dev/shm").glob(name):
            left.unlink()


def _run(function: Callable[..., Any], args: tuple, environments: list[dict[str, str]], timeout: float) -> list[Any]:
    os.environ.update(ENVIRONMENT)
    if torch.cuda.is_available():  # a fork could not use CUDA if one of the imports has
        context = multiprocessing.get_context("spawn")
    else:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
    pipes = [context.Pipe(duplex=False) for _ in environments]
    processes = [
        context.Process(target=_call, args=(sender, function, args, dict(os.environ) | environment))
        for (_, sender), environment in zip(pipes, environments, strict=True)
    ]
    for process in processes:
        process.start()
    for _, sender in pipes:
        sender.close()
    receivers = [receiver for receiver, _ in pipes]
    results: dict[int, Any] = {}
    end = time.monotonic() + timeout
    try:
        while len(results) < len(processes):
            waiting = {receivers[i]: i for i in range(len(processes)) if i not in results}
            waiting |= {processes[i].sentinel: i for i in waiting.values()}
            ready = wait(list(waiting), max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError(f"{function.__name__} did not finish in {timeout} s")
            for rank in {waiting[which] for which in ready}:
                try:
                    if not receivers[rank].poll():  # it is gone, and a fork of it holds the pipe open
                        raise EOFError
                    ok, results[rank] = receivers[rank].recv()
                except EOFError:
                    processes[rank].join()
                    code = processes[rank].exitcode
                    raise ProcessDied(f"{function.__name__}: its process {ending(code)}") from None
                if not ok:
                    raise AssertionError(f"in {function.__name__}:\n{results[rank]}")
    finally:
        # With what they started: a vLLM engine in a process of its own outlives its parent, and spins.
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
    return [results[rank] for rank in range(len(processes))]


def _call(sender: Any, function: Callable[..., Any], args: tuple, environment: dict[str, str]) -> None:
    os.setpgrp()
    os.environ.clear()
    os.environ.update(environment)  # the server has that of its start
    choose_arithmetic()
    try:
        outcome = (True, function(*args))
    except BaseException:
        outcome = (False, traceback.format_exc())
    sender.send(outcome)
