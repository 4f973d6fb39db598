"""`qarl-trl serve` for tests: a process that serves, what it answers, and faults at chosen moments.

A `place` is a dict: the `folder` with the server's recipe, log and `syncs`, the `model`, the `port`, and the `pid` of
a server that runs.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import psutil
import yaml

from slow.isolated import ENVIRONMENT
from slow.toys import make_trainer, save_model, settings


KEY = "sesame"


# A server ------------------------------------------------------------------------------------------------------------


def make_place(folder: Path) -> dict[str, Any]:
    """A model, and the recipe of a server that serves it."""
    data = folder / "data.jsonl"
    data.write_text('{"problem": "1+1", "answer": "2"}\n')
    model = save_model(folder / "model", norms=True)

    fields = {"model_name_or_path": model, "dataset_name_or_path": str(data), "report_to": "none"}
    recipe = settings(folder / "run", **fields, sync_folder=str(folder / "syncs"))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return {"folder": str(folder), "model": model, "port": free_port()}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(place: dict[str, Any], *options: str) -> AbstractContextManager[subprocess.Popen]:
    """A server of the recipe with `options`, as `serving` has it."""
    command = [
        *(sys.executable, "-m", "qarl_trl.cli", "serve"),
        *("--config", f"{place['folder']}/recipe.yaml"),
        *("--vllm_server_port", str(place["port"])),
        *options,
    ]
    # vLLM would bind the threads of each rank to cores, of which the trainer needs some.
    environment = os.environ | ENVIRONMENT | {"VLLM_API_KEY": KEY, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return serving(place, command, environment)


@contextmanager
def serving(place: dict[str, Any], command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen]:
    """A server that starts; it ends with the block, or before."""
    with _log(place).open("a") as log:
        # In a session of its own, so that the kill of its group ends its engine, too.
        process = subprocess.Popen(
            command, start_new_session=True, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        # Several ranks leave it behind.
        for shared_memory in Path("/dev/shm").glob("vllm_dist_*-cpushm_*"):
            shared_memory.unlink()


def _log(place: dict[str, Any]) -> Path:
    return Path(place["folder"], "server.log")


def wait_for(process: subprocess.Popen, place: dict[str, Any]) -> None:
    """Wait until a server answers."""
    # Without a limit of its own: pytest's ends a server that neither answers nor dies.
    while process.poll() is None and not answers(f"{address(place)}/health"):
        time.sleep(0.2)
    assert process.poll() is None, _log(place).read_text()[-3000:]


def command_of(pid: int) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment that a process has now: `qarl-trl serve` becomes vLLM's own server."""
    words = _strings(Path(f"/proc/{pid}/cmdline"))

    environment = {}
    for entry in _strings(Path(f"/proc/{pid}/environ")):
        # Only the first one separates: values have some, too.
        name, _, value = entry.partition("=")
        environment[name] = value
    return words, environment


def _strings(file: Path) -> list[str]:
    return file.read_text().split("\0")[:-1]


def rank_of(place: dict[str, Any], name: str = "EngineCore") -> int:
    """A process of the server's engine, by the name that vLLM gives it."""
    for process in psutil.Process(place["pid"]).children(recursive=True):
        if process.cmdline()[:1] == [f"VLLM::{name}"]:
            return process.pid
    raise AssertionError(f"the server has no process {name}")


# What it answers -----------------------------------------------------------------------------------------------------


def address(place: dict[str, Any]) -> str:
    return f"http://127.0.0.1:{place['port']}"


def answers(url: str) -> int:
    """The status of a page without a key; 0 where nobody listens."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status
    except HTTPError as error:
        return error.code
    except OSError:
        return 0


def status(place: dict[str, Any], method: str, path: str, body: str | None = None, **headers: str) -> int:
    """The status of a request with the key."""
    data = None if body is None else body.encode()
    request = urllib.request.Request(f"{address(place)}{path}", data, method=method)
    with_key = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    for name, value in (with_key | headers).items():
        request.add_header(name, value)

    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status
    except HTTPError as error:
        return error.code


def sampled_tokens(place: dict[str, Any]) -> float:
    """How many tokens the server has sampled."""
    request = urllib.request.Request(f"{address(place)}/metrics")
    request.add_header("Authorization", f"Bearer {KEY}")
    with urllib.request.urlopen(request, timeout=60) as page:
        lines = page.read().decode().splitlines()

    tokens = 0.0
    # One line for each engine of the server.
    for line in lines:
        if line.startswith("vllm:generation_tokens_total"):
            tokens += float(line.split()[-1])
    return tokens


# Its trainers --------------------------------------------------------------------------------------------------------


def over_there(place: dict[str, Any], key: str | None = KEY, **changes: Any) -> dict[str, Any]:
    """Settings of a trainer whose engine is the server."""
    # A trainer reads the key from the environment.
    os.environ.pop("VLLM_API_KEY", None)
    if key is not None:
        os.environ["VLLM_API_KEY"] = key

    arguments = {
        "vllm_mode": "server",
        # Most tests have a server that answers, and those of a dead one need not wait for a new one.
        "vllm_server_timeout": 5.0,
        "vllm_server_base_url": address(place),
        "sync_folder": f"{place['folder']}/syncs",
    }
    return arguments | changes


def trainer_of(place: dict[str, Any], run: str = "x", **changes: Any) -> Any:
    """A trainer whose engine is the server."""
    return make_trainer(place["model"], Path(place["folder"], run), **over_there(place, **changes))


def outcome(function: Callable[..., Any], *args: Any) -> str:
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# Faults --------------------------------------------------------------------------------------------------------------


def amid_a_sync(act: Callable[[int], None]) -> None:
    """
    In the next sync of this process, call `act` on the last file when the server opens it; the server waits meanwhile.

    The kernel does that for a lease: it signals the process that has one, and holds back the one that opens the file.
    """
    from qarl_trl.rollout.server import client as trainers_side

    ask_workers = trainers_side.ServerClient.ask_workers

    def with_a_lease(client: Any, method: str, *args: Any) -> list[Any]:
        if method == "qarl_load":
            files = sorted(Path(client.sync_folder, args[0]).iterdir())
            assert len(files) > 1
            _lease(files[-1], act)
        return ask_workers(client, method, *args)

    trainers_side.ServerClient.ask_workers = with_a_lease
    # Small parts, so that the server has read some of a sync before it opens the last one.
    trainers_side.save_parts = partial(trainers_side.save_parts, limit=1 << 18)


def _lease(file: Path, act: Callable[[int], None]) -> None:
    # A lease lasts as long as the file is open. One for writing also holds back those who open the file to read.
    descriptor = os.open(file, os.O_RDWR)

    def let_go(*_: Any) -> None:
        act(descriptor)
        os.close(descriptor)

    signal.signal(signal.SIGIO, let_go)
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)


def kill_amid_a_generation(place: dict[str, Any]) -> None:
    """Kill the server as soon as it has sampled some tokens more."""
    # From the server's own metrics: only they tell that a generation is under way.
    before = sampled_tokens(place)

    def watch() -> None:
        while sampled_tokens(place) < before + 32:
            time.sleep(0.01)
        os.killpg(place["pid"], signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
