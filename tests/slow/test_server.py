"""A trainer and its engine in two processes: `qarl-trl serve`, vLLM's real server on loopback with a key, and a shared folder."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.error import HTTPError

import psutil
import pytest
import torch
import yaml

from qarl_trl.processes import ProcessDied
from slow.isolated import ENVIRONMENT, isolated, isolated_group
from slow.test_processes import FLOOR, _trainer, _whole
from slow.toys import make_trainer, random_adapter, randomize_adapter, save_model, settings


pytestmark = [pytest.mark.slow, pytest.mark.alone]
KEY = "sesame"


@contextmanager
def serving(place: dict[str, Any], command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen]:
    """A server that starts; it ends with the block, or before."""
    with Path(place["folder"], "server.log").open("a") as log:
        to = {"stdout": log, "stderr": subprocess.STDOUT, "env": environment}
        process = subprocess.Popen(command, start_new_session=True, **to)
    try:
        yield process
    finally:
        end(process)
        for left in Path("/dev/shm").glob("vllm_dist_*-cpushm_*"):  # of several ranks
            left.unlink()


def wait_for(process: subprocess.Popen, place: dict[str, Any]) -> None:
    while process.poll() is None and not answers(f"http://127.0.0.1:{place['port']}/health"):
        time.sleep(0.2)
    assert process.poll() is None, Path(place["folder"], "server.log").read_text()[-3000:]


def became(pid: int) -> tuple[list[str], dict[str, str]]:
    """The command line of a process now, and its environment."""
    words, entries = (Path(f"/proc/{pid}/{name}").read_text().split("\0")[:-1] for name in ("cmdline", "environ"))
    return words, dict(entry.split("=", 1) for entry in entries)


def start(place: dict[str, Any], *options: str) -> Any:
    """A server of the recipe with `options`, as `serving` has it."""
    recipe, port = f"{place['folder']}/recipe.yaml", str(place["port"])
    command = [sys.executable, "-m", "qarl_trl.cli", "serve", "--config", recipe, "--vllm_server_port", port, *options]
    return serving(
        place, command, os.environ | ENVIRONMENT | {"VLLM_API_KEY": KEY, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    )


def rank_of(place: dict[str, Any], name: str = "EngineCore") -> int:
    """A process of the server's engine, by the name that vLLM gives it."""
    inside = psutil.Process(place["pid"]).children(recursive=True)
    return next(process.pid for process in inside if process.cmdline()[:1] == [f"VLLM::{name}"])


def end(process: subprocess.Popen) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def answers(url: str) -> int:
    """The status of a page without a key; 0 where nobody listens."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status
    except HTTPError as error:
        return error.code
    except OSError:
        return 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def amid_a_sync(act: Callable[[int], None]) -> None:
    """In the next sync of this process, `act` on the last file when the server opens it, which waits for it: a lease."""
    from qarl_trl.rollout import server

    call, server.save_parts = server.ServerClient.ask_workers, partial(server.save_parts, limit=1 << 18)

    def leased(client: Any, method: str, *args: Any) -> list[Any]:
        if method == "qarl_load":
            files = sorted(Path(client.sync_folder, args[0]).iterdir())
            assert len(files) > 1
            last = os.open(files[-1], os.O_RDWR)
            signal.signal(signal.SIGIO, lambda *_: (act(last), os.close(last)))
            fcntl.fcntl(last, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        return call(client, method, *args)

    server.ServerClient.ask_workers = leased


def sampled_tokens(place: dict[str, Any]) -> float:
    """How many the server has sampled."""
    request = urllib.request.Request(f"http://127.0.0.1:{place['port']}/metrics")
    request.add_header("Authorization", f"Bearer {KEY}")
    with urllib.request.urlopen(request, timeout=60) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total"))


def kill_amid_a_generation(place: dict[str, Any]) -> None:
    """Kill the server as soon as it has sampled some tokens more."""
    before = sampled_tokens(place)

    def watch() -> None:
        while sampled_tokens(place) < before + 32:
            time.sleep(0.01)
        os.killpg(place["pid"], signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> dict[str, Any]:
    folder, port = tmp_path_factory.mktemp("server"), free_port()
    data = folder / "data.jsonl"
    data.write_text('{"problem": "1+1", "answer": "2"}\n')
    place = {"folder": str(folder), "model": save_model(folder / "model", norms=True), "port": port}
    fields = {"model_name_or_path": place["model"], "dataset_name_or_path": str(data), "report_to": "none"}
    recipe = settings(folder / "run", **fields, sync_folder=str(folder / "syncs"))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return place


@pytest.fixture(scope="module")
def server(place) -> Iterator[dict[str, Any]]:
    """A server that answers, and what a run with an engine of its own finds, which is made while the server starts."""
    with start(place) as process:
        near = isolated(_train, place, False)
        wait_for(process, place)
        yield place | {"pid": process.pid, "near": near}


def over_there(place: dict[str, Any], key: str | None = KEY, **changes: Any) -> dict[str, Any]:
    """Settings of a trainer whose engine is the server."""
    os.environ.pop("VLLM_API_KEY", None)
    if key is not None:
        os.environ["VLLM_API_KEY"] = key
    address = f"http://127.0.0.1:{place['port']}"
    shared = {"vllm_server_base_url": address, "sync_folder": f"{place['folder']}/syncs"}
    return {"vllm_mode": "server", "vllm_server_timeout": 5.0} | shared | changes


def outcome(function: Any, *args: Any) -> str:
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _start(place: dict[str, Any], runs: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, str]:
    """What each of several runs says at its start, by its key and its changed settings."""
    found, folder = {}, Path(place["folder"], "x")
    for name, (key, changes) in runs.items():
        settings = {"model": place["model"]} | over_there(place, key, **changes)
        found[name] = outcome(lambda settings=settings: make_trainer(folder=folder, **settings))
    return found


def _train(place: dict[str, Any], server: bool, adapted: bool = False) -> dict[str, Any]:
    """A short run; its log, what the last sync weighed, and the sync check's prompt after the first and the last sync."""
    from qarl_trl.rollout.sync_check import engine_logps

    changes = {"verify_sync": 1, "steps_per_generation": 1, "max_steps": 2} | (over_there(place) if server else {})
    adapter = random_adapter() if adapted else None
    trainer = make_trainer(place["model"], Path(place["folder"], f"run-{server}"), adapter, **changes)
    randomize_adapter(trainer.model)
    engine = trainer.vllm_generation
    llm, tokens = engine if server else engine.llm, engine.sync_check.token_ids
    random = engine.sync_check.before  # of a server that an earlier run synced to, nothing
    engine.sync_weights()
    first = engine_logps(llm, tokens)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "mismatch/logp_diff_mean" in row]
    return {
        "logp_diffs": [row["mismatch/logp_diff_mean"] for row in rows],
        "bytes": engine.synced_bytes,
        "syncs": engine.num_syncs,
        "names": [name for name, _ in engine._iter_named_params()],
        "bf16": sum(2 * p.numel() for p in trainer.model.parameters()),
        "embeddings": sum(
            2 * p.numel() for n, p in trainer.model.named_parameters() if "embed" in n or "lm_head" in n
        ),
        "random": None if random is None else random.tolist(),
        "first": first.tolist(),
        "last": engine_logps(llm, tokens).tolist(),
        "left": [str(path) for path in Path(place["folder"], "syncs").glob("*")],
    }


def test_a_server_of_another_run_or_without_the_key_is_refused_before_training(server):
    other = save_model(Path(server["folder"], "other"), family="Qwen2")
    runs = {
        "scheme": (KEY, {"quant_scheme": "W8A8"}),
        "model": (KEY, {"model": other}),
        "key": ("wrong", {}),
        "control": (KEY, {}),
    }
    found = isolated(_start, server, runs)
    assert "ValueError" in found["scheme"] and "is not the engine of this run" in found["scheme"]
    assert "input_activations.num_bits must be 8, got None" in found["scheme"]
    assert "is not the engine of this run: config." in found["model"]
    assert "PermissionError" in found["key"]
    assert found["control"] == "no error"


def status(place: dict[str, Any], method: str, path: str, body: str | None = None, **headers: str) -> int:
    request = urllib.request.Request(f"http://127.0.0.1:{place['port']}{path}", body and body.encode(), method=method)
    for name, value in ({"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"} | headers).items():
        request.add_header(name, value)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status
    except HTTPError as error:
        return error.code


def test_nobody_but_a_trainer_gets_in(server):
    """What the middleware refuses is in tests/rollout/test_server_guard.py; this is vLLM's own server behind it."""
    url, method = f"http://127.0.0.1:{server['port']}", '{"method": "get_model"}'
    assert answers(f"{url}/health") == 200
    assert {answers(f"{url}/{path}") for path in ("v1/models", "weight_info", "server_info", "metrics")} == {401}
    assert status(server, "POST", "/qarl_state", "[]") == 200
    assert status(server, "POST", "/qarl_state", "[]", Origin="http://evil.example") == 403
    assert status(server, "POST", "/collective_rpc", method) == status(server, "POST", "/sleep", "{}") == 404


def _both(place: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return _train(place, True), _train(place, True, adapted=True)


def test_a_run_through_a_server_is_the_colocated_one(server):
    (far, adapted), near = isolated(_both, server), server["near"]
    assert far["syncs"] >= 3
    assert far["first"] == near["first"]  # all bits of 62 log-probs of the same weights
    assert far["random"] != far["first"] != far["last"]  # control: they are of the weights
    assert max(far["logp_diffs"]) < 1e-6 and max(near["logp_diffs"]) < 1e-6  # as tests/slow/test_mismatch.py
    # 4.1 bits a weight: quantized values, and a scale of 16 bits for 128 of them.
    low_bit = (far["bytes"] - far["embeddings"]) / (far["bf16"] - far["embeddings"])
    assert far["bytes"] == near["bytes"] and 0.25 < low_bit < 0.28
    # LoRA: the merged weights, in the same tensors.
    assert max(adapted["logp_diffs"]) < 1e-6 and len(adapted["logp_diffs"]) == 2
    assert adapted["names"] == far["names"] and adapted["bytes"] == far["bytes"]
    assert far["first"] != adapted["first"] != adapted["last"]  # control: with the adapter, which was trained
    assert far["left"] == adapted["left"] == []


def _pair(place: dict[str, Any]) -> dict[str, Any]:
    """One of two trainer processes: its completions have the learner's log-probs, and a stop of the main one is its own."""
    from slow.kills import digests

    absent = {"vllm_server_base_url": "http://127.0.0.1:9", "vllm_server_timeout": 0.0, "ddp_backend": "gloo"}
    refused = _start(place, {"absent": (KEY, absent), "key": ("wrong", {"ddp_backend": "gloo"})})
    changes = over_there(place, verify_sync=1, ddp_backend="gloo", steps_per_generation=1, max_steps=2)
    trainer = make_trainer(place["model"], Path(place["folder"], "pair"), **changes)
    trainer.train()
    engine = trainer.vllm_generation
    rows = [row for row in trainer.state.log_history if "mismatch/logp_diff_max" in row]
    if trainer.accelerator.is_main_process:
        engine.vllm_client.version = "another"
    prompt = [2, 3, 4 + trainer.accelerator.process_index]
    return refused | {
        "processes": trainer.accelerator.num_processes,
        "logp_diffs": [row["mismatch/logp_diff_max"] for row in rows],
        "master_weights": digests(trainer),
        "stopped": outcome(engine.generate, [prompt] * 4, None, 4),
    }


def test_two_trainers_share_a_server(server):
    first, second = isolated_group(_pair, 2, server)
    assert first["processes"] == second["processes"] == 2
    # Of all processes: each has the completions of its prompts.
    assert max(first["logp_diffs"]) < 1e-5 and len(first["logp_diffs"]) >= 2
    assert first["master_weights"] == second["master_weights"]
    assert "must hold version 'another'" in first["stopped"]
    # Refusals come to all processes at the same time, as errors that are one line at the start.
    said = {"absent": "No vLLM server answers", "key": "wants another key", "stopped": "'another'"}
    for name, words in said.items():
        assert words in first[name] and words in second[name]
        assert second[name].startswith("OSError: The first process failed, and says why: ")


def _stale(place: dict[str, Any]) -> str:
    from qarl_trl.rollout.server import ServerClient

    changes = over_there(place, verify_sync=1, learning_rate=1e-2)
    trainer = make_trainer(place["model"], Path(place["folder"], "x"), **changes)
    send, first = ServerClient.sync, []

    def send_the_first(client: Any, stream: Any) -> None:
        now = [(name, tensor.clone()) for name, tensor in stream]
        first.extend(now if not first else [])
        send(client, first)

    ServerClient.sync = send_the_first
    return outcome(trainer.train)


def test_old_weights_under_a_new_version_are_caught_by_the_sync_check(server):
    found = isolated(_stale, server)
    assert "After sync 2 the engine's log-probs" in found and "The engine is stale" in found


def _by_another_path(place: dict[str, Any]) -> dict[str, Any]:
    """The trainer has another path to the folder than the server; the sync check's prompt of weights A, B and A."""
    mounted = Path(place["folder"], "mounted")
    mounted.symlink_to(Path(place["folder"], "syncs"))
    changes = over_there(place, verify_sync="off", sync_folder=str(mounted))
    trainer = make_trainer(place["model"], Path(place["folder"], "x"), **changes)
    engine, head, found = trainer.vllm_generation, trainer.model.lm_head.weight, {}
    start = head.detach().clone()
    for name, weight in (("start", start), ("other", torch.randn_like(start)), ("again", start)):
        with torch.no_grad():
            head.copy_(weight)
        engine.sync_weights()
        found[name] = engine.vllm_client.prompt_logps([2, 3, 4, 5])
    for name, tokens in (("fits", 64 - 24), ("long", 64 - 23)):
        found[name] = outcome(engine.generate, [[2] * tokens] * 4, None, 4)
    return found


def test_the_folder_may_have_another_path_and_a_long_prompt_is_refused(server):
    found = isolated(_by_another_path, server)
    assert found["start"] == found["again"] != found["other"]
    assert found["fits"] == "no error"
    assert "refused /v1/completions (400)" in found["long"] and "64" in found["long"]


def _dies_amid_a_sync(place: dict[str, Any]) -> None:
    trainer = make_trainer(place["model"], Path(place["folder"], "x"), verify_sync="off", **over_there(place))
    amid_a_sync(lambda last: os.kill(os.getpid(), signal.SIGKILL))
    trainer.vllm_generation.sync_weights()


def _faults(place: dict[str, Any]) -> dict[str, str]:
    from qarl_trl.rollout.server import ServerClient

    trainer = make_trainer(place["model"], Path(place["folder"], "x"), verify_sync="off", **over_there(place))
    engine = trainer.vllm_generation
    found = {"left": engine.vllm_client.ask_workers("qarl_state")[0]["version"]}

    def sample(number: int = 4) -> str:
        engine._failed = None  # each fault by itself
        return outcome(lambda: len(engine.generate([[2, 3, 4]] * number, None, 4)[1]) == number or 1 / 0)

    def sync() -> str:
        engine._failed = None
        return outcome(engine.sync_weights)

    found["unsynced"] = sample()
    found |= {"sync": sync(), "ok": sample()}
    ask = ServerClient.ask_workers
    ServerClient.ask_workers = lambda self, method, *args: [] if method == "qarl_load" else ask(self, method, *args)
    found |= {"lost": sync(), "after": sample()}  # a weight sync that never gets there
    ServerClient.ask_workers = ask
    sync()
    again = became(place["pid"])  # vLLM's own server, without the way there
    kill_amid_a_generation(place)
    found |= {"killed": sample(1600), "dead": sample()}
    with serving(place, *again) as restarted:
        wait_for(restarted, place)
        found |= {"restarted": sample(), "resync": sync(), "healthy": sample()}
        stream, missing = engine._iter_named_params, "layers.1.mlp.down_proj.weight_scale"
        engine._iter_named_params = lambda: ((n, t) for n, t in stream() if missing not in n)
        found |= {"partial": sync(), "mixed": sample()}
        engine._iter_named_params = stream
        found["spoilt"] = sync()  # vLLM's reload would go on with what that one had buffered
    return found


def test_no_answer_of_other_weights_is_trained_on(server):
    with pytest.raises(ProcessDied, match="SIGKILL"):
        isolated(_dies_amid_a_sync, server)
    (left,) = Path(server["folder"], "syncs").iterdir()
    found = isolated(_faults, server)
    shutil.rmtree(left)  # not before the server has read it
    assert found["left"] == left.name  # the server read on
    assert "must hold version None" in found["unsynced"]
    assert {found[name] for name in ("sync", "ok", "lost", "resync", "healthy")} == {"no error"}
    assert "-2' of the weights, got '" in found["after"] and "-1': it was started again" in found["after"]
    assert "ConnectionError" in found["killed"] and "died or hung up during /v1/completions" in found["killed"]
    assert "ConnectionError" in found["dead"] and "died or hung up during /qarl_state" in found["dead"]
    assert "got None: it was started again" in found["restarted"]
    assert "kept old values for 1 tensors, first ['model.layers.1.mlp.down_proj.weight_scale']" in found["partial"]
    assert "must hold version None of the weights, got None" in found["mixed"]
    assert "an earlier sync to this server failed" in found["spoilt"]


# Several ranks of a server, and a learner in shards -------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_ranks(place) -> Iterator[dict[str, Any]]:
    there = place | {"port": free_port()}
    with start(there, "--vllm_tensor_parallel_size", "2") as process:
        wait_for(process, there)
        yield there | {"pid": process.pid}


@contextmanager
def keeping_syncs(folder: Path) -> Iterator[None]:
    """Copy what the server reads, sync by sync."""
    from qarl_trl.rollout.server import ServerClient

    call = ServerClient.ask_workers

    def kept(client: Any, method: str, *args: Any) -> list[Any]:
        if method == "qarl_load":
            shutil.copytree(Path(client.sync_folder, args[0]), folder / args[0].rpartition("-")[2])
        return call(client, method, *args)

    with patch.object(ServerClient, "ask_workers", kept):
        yield


def _shards(place: dict[str, Any]) -> dict[str, Any]:
    """One of two FSDP2 processes: a run, a weight sync that one rank of the server cannot read, and one that is cut short."""
    changes = {"verify_sync": 1, "steps_per_generation": 1, "max_steps": 2, "vllm_tensor_parallel_size": 2}
    trainer = _trainer(place["model"], f"{place['folder']}/shards", True, **over_there(place, **changes))
    engine, main = trainer.vllm_generation, trainer.accelerator.is_main_process
    with keeping_syncs(Path(place["folder"], "kept")):
        trainer.train()
        engine.sync_weights()
    rows, versions, said = trainer.state.log_history, [], []
    logp_diffs = [row["mismatch/logp_diff_mean"] for row in rows if "mismatch/logp_diff_mean" in row]
    master_weights = {name: p.numpy() for name, p in _whole(trainer).items()}

    def sync(repair: Callable[[], Any]) -> None:
        engine._failed = None
        said.append(outcome(engine.sync_weights))
        repair()
        engine._failed = None
        if main:  # as if nobody had seen that
            client = engine.vllm_client
            client.version = f"{client._run}-{client._count}"
            versions.append([state["version"] for state in client.ask_workers("qarl_state")])
        said.append(outcome(engine.generate, [[2, 3, 4]] * 4, None, 4))

    if main:
        limit = partial(resource.prlimit, rank_of(place, "Worker_TP1"), resource.RLIMIT_NOFILE)
        before = limit()
        limit((3, before[1]))  # it can open no file more
    sync(lambda: limit(before) if main else None)
    if main:
        amid_a_sync(lambda last: os.ftruncate(last, 1000))
    sync(lambda: None)
    return {"logp_diffs": logp_diffs, "master_weights": master_weights, "versions": versions, "said": said}


def test_shards_of_a_learner_sync_to_two_ranks_of_a_server(two_ranks):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from qarl_trl.quant import apply_quantization, iter_low_bit_weights

    first, second = isolated_group(_shards, 2, two_ranks, timeout=120)
    assert first["logp_diffs"] == second["logp_diffs"] and len(first["logp_diffs"]) == 2
    assert max(first["logp_diffs"]) < FLOOR  # as of a colocated engine of two ranks; measured 0.0069
    # Each sync is that of one process with the same master weights.
    alone = apply_quantization(AutoModelForCausalLM.from_pretrained(two_ranks["model"], dtype=torch.float32), "W4A16")
    sent = {number: {} for number in (1, 3)}
    for number, tensors in sent.items():
        for part in Path(two_ranks["folder"], "kept", str(number)).iterdir():
            tensors |= load_file(part)
        expected = dict(iter_low_bit_weights(alone))
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
        alone.load_state_dict({name: torch.from_numpy(tensor) for name, tensor in first["master_weights"].items()})
    assert not all(torch.equal(tensor, sent[3][name]) for name, tensor in sent[1].items())  # control: it was trained
    # One rank missed a weight sync, then both, each in its own answer.
    last, other = first["versions"]
    # What cannot be read leaves the weights of the last sync under its version, and the next sync is taken.
    assert last[0].endswith("-4") and last[1].endswith("-3") and other[0].endswith("-4") and other[1].endswith("-3")
    unread, refused, cut, refused_again = first["said"]
    assert "qarl_load failed in 1 of 2 ranks" in unread and "rank 1: ValueError: the server cannot read" in unread
    assert f"must hold version '{last[0]}' of the weights, got" in refused
    assert "qarl_load failed in 2 of 2 ranks" in cut and "rank 0: ValueError: the server cannot read" in cut
    assert "must hold version" in refused_again
    others_say = ("The sync failed in process ", "The first process failed, and says why") * 2
    assert all(words in said for words, said in zip(others_say, second["said"], strict=True))


def _engine_killed(place: dict[str, Any]) -> list[str]:
    changes = over_there(place, vllm_tensor_parallel_size=2)
    engine = make_trainer(place["model"], Path(place["folder"], "x"), verify_sync="off", **changes).vllm_generation
    pid = rank_of(place)
    amid_a_sync(lambda last: os.kill(pid, signal.SIGKILL))
    said = [outcome(engine.sync_weights), outcome(engine.generate, [[2, 3, 4]] * 4, None, 4)]
    engine._failed = None
    return [*said, outcome(engine.generate, [[2, 3, 4]] * 4, None, 4)]


def test_an_engine_killed_amid_a_sync_stops_its_server(two_ranks):
    """The last test of this server."""
    killed, after, again = isolated(_engine_killed, two_ranks, timeout=90)
    assert "refused /qarl_load (500): RuntimeError: The engine of this server died" in killed
    assert "nothing may be sampled from it" in after
    assert "RuntimeError" in again or "ConnectionError" in again  # on its way down, or gone
