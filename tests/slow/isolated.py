"""Run a function in a fresh process: a vLLM engine keeps global state, so each engine gets a process of its own.

The processes are forked from one that has imported everything and run nothing, which saves a quarter of a minute each.
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
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
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


@dataclass(frozen=True)
class _Child:
    """A process, and the pipe by which it sends what its function returned."""

    process: Any
    receiver: Connection


def isolated(function: Callable[..., Any], *args: Any, timeout: float = 600, threads: int | None = None) -> Any:
    """
    `function(*args)` in a process of its own; its exception is raised here with the child's traceback.

    `threads` is torch's number of them there, by default that of this process.
    """
    (result,) = _run(function, args, [{}], timeout, threads)
    return result


def isolated_group(function: Callable[..., Any], number: int, *args: Any, timeout: float = 600) -> list[Any]:
    """`function(*args)` in `number` processes that find each other as those of `torchrun` do; what each returned."""
    # Names vLLM's shared memory, where no worker of vLLM names it.
    identity = f"qarl{uuid4().hex}"
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "VLLM_DIST_IDENT": identity,
        "WORLD_SIZE": str(number),
        "LOCAL_WORLD_SIZE": str(number),
    }
    environments = []
    for rank in range(number):
        environments.append({"RANK": str(rank), "LOCAL_RANK": str(rank), **shared})

    # An engine over several processes on a CPU leaves its shared memory behind, and a worker of vLLM gives it the same
    # name in every run: what an earlier run left would be taken for this one's.
    patterns = ("-tp:0-*-cpushm_*", f"{identity}-*")
    _unlink_shared_memory(*patterns)
    try:
        return _run(function, args, environments, timeout)
    finally:
        _unlink_shared_memory(*patterns)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _unlink_shared_memory(*patterns: str) -> None:
    for pattern in patterns:
        for file in Path("/dev/shm").glob(pattern):
            file.unlink()


# In the parent -------------------------------------------------------------------------------------------------------


def _run(
    function: Callable[..., Any],
    args: tuple,
    environments: list[dict[str, str]],
    timeout: float,
    threads: int | None = None,
) -> list[Any]:
    """What `function(*args)` returned in one process for each environment."""
    os.environ.update(ENVIRONMENT)
    context = _context()
    children: list[_Child] = []
    try:
        for environment in environments:
            children.append(_start(context, function, args, environment, threads or torch.get_num_threads()))
        return _collect(function.__name__, children, timeout)
    finally:
        for child in children:
            _kill(child.process)


def _context() -> Any:
    # A fork could not use CUDA if one of the preloaded modules has used it.
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _start(
    context: Any, function: Callable[..., Any], args: tuple, environment: dict[str, str], threads: int
) -> _Child:
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(sender, function, args, dict(os.environ) | environment, threads))
    process.start()
    # The child has its own: as long as this one is open, the end of the child would not end the pipe.
    sender.close()
    return _Child(process, receiver)


def _collect(name: str, children: list[_Child], timeout: float) -> list[Any]:
    """What each child returned; the first that fails ends the wait for the others."""
    deadline = time.monotonic() + timeout
    results: dict[int, Any] = {}

    while len(results) < len(children):
        rank_of = {}
        for rank, child in enumerate(children):
            if rank not in results:
                rank_of[child.receiver] = rank
                # A process may end and send nothing.
                rank_of[child.process.sentinel] = rank

        ready = wait(list(rank_of), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"{name} did not finish in {timeout} s")

        # A set: of one child both may be ready, and it sends once.
        for rank in {rank_of[source] for source in ready}:
            results[rank] = _receive(name, children[rank])

    # In the order of ranks, not of their ends.
    return [results[rank] for rank in range(len(children))]


def _receive(name: str, child: _Child) -> Any:
    """What a child returned that has sent something or ended."""
    try:
        # A fork of a child that is gone may hold the pipe open, and then `recv` would wait for ever.
        if not child.receiver.poll():
            raise EOFError
        succeeded, result = child.receiver.recv()
    except EOFError:
        child.process.join()
        raise ProcessDied(f"{name}: its process {ending(child.process.exitcode)}") from None

    if not succeeded:
        raise AssertionError(f"in {name}:\n{result}")
    return result


def _kill(process: Any) -> None:
    """End a child with what it started: a vLLM engine in a process of its own outlives its parent, and spins."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


# In the child --------------------------------------------------------------------------------------------------------


def _call(sender: Any, function: Callable[..., Any], args: tuple, environment: dict[str, str], threads: int) -> None:
    os.setpgrp()
    # The fork server has the environment of its own start.
    os.environ.clear()
    os.environ.update(environment)
    choose_arithmetic()
    torch.set_num_threads(threads)

    try:
        outcome = (True, function(*args))
    except BaseException:
        outcome = (False, traceback.format_exc())
    sender.send(outcome)
