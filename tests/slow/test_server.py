"""A trainer and its engine in two processes: `qarl-trl serve`, vLLM's real server on loopback with a key, and a shared folder."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import yaml

from slow.isolated import ENVIRONMENT, isolated, isolated_group
from slow.toys import make_trainer, save_model, settings


pytestmark = pytest.mark.slow
KEY = "sesame"


@contextmanager
def serving(recipe: Path, port: int) -> Iterator[subprocess.Popen]:
    """A server of `recipe` that answers; it ends with the block, or before."""
    command = [sys.executable, "-m", "qarl_trl.cli", "serve", "--config", str(recipe), "--vllm_server_port", str(port)]
    log = recipe.with_suffix(".log").open("a")
    environment = os.environ | ENVIRONMENT | {"VLLM_API_KEY": KEY}
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        while process.poll() is None and not answers(f"http://127.0.0.1:{port}/health"):
            time.sleep(0.5)
        assert process.poll() is None, Path(log.name).read_text()[-3000:]
        yield process
    finally:
        end(process)


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


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    data = folder / "data.jsonl"
    data.write_text('{"problem": "1+1", "answer": "2"}\n')
    place = {"folder": str(folder), "model": save_model(folder / "model", norms=True), "port": port}
    fields = {"model_name_or_path": place["model"], "dataset_name_or_path": str(data), "report_to": "none"}
    recipe = settings(folder / "run", **fields, publish_folder=str(folder / "publishes"))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return place


@pytest.fixture(scope="module")
def server(place) -> Iterator[dict[str, Any]]:
    with serving(Path(place["folder"], "recipe.yaml"), place["port"]) as process:
        yield place | {"pid": process.pid}


def over_there(place: dict[str, Any], key: str | None = KEY, **changes: Any) -> dict[str, Any]:
    """Settings of a trainer whose engine is the server."""
    os.environ.pop("VLLM_API_KEY", None)
    if key is not None:
        os.environ["VLLM_API_KEY"] = key
    address = f"http://127.0.0.1:{place['port']}"
    shared = {"vllm_server_base_url": address, "publish_folder": f"{place['folder']}/publishes"}
    return {"vllm_mode": "server", "vllm_server_timeout": 5.0} | shared | changes


def outcome(function: Any, *args: Any) -> str:
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _start(place: dict[str, Any], key: str | None, changes: dict[str, Any]) -> str:
    return outcome(
        lambda: make_trainer(place["model"], Path(place["folder"], "x"), **over_there(place, key, **changes))
    )


def _train(place: dict[str, Any], server: bool) -> dict[str, Any]:
    """A short run; its log, what the last publish weighed, and the canary's prompt after the first and the last publish."""
    from qarl_trl.rollout.scores import engine_logps

    changes = over_there(place) if server else {}
    trainer = make_trainer(place["model"], Path(place["folder"], f"run-{server}"), publish_verify=1, **changes)
    engine = trainer.vllm_generation
    llm, tokens = engine if server else engine.llm, engine.canary.token_ids
    random = engine.canary._before
    engine.sync_weights()
    first = engine_logps(llm, tokens)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "mismatch/logp_gap_mean" in row]
    return {
        "gaps": [row["mismatch/logp_gap_mean"] for row in rows],
        "bytes": engine.last_publish.num_bytes,
        "publishes": engine.num_publishes,
        "bf16": sum(2 * p.numel() for p in trainer.model.parameters()),
        "embeddings": sum(
            2 * p.numel() for n, p in trainer.model.named_parameters() if "embed" in n or "lm_head" in n
        ),
        "random": random.tolist(),
        "first": first.tolist(),
        "last": engine_logps(llm, tokens).tolist(),
        "left": [str(path) for path in Path(place["folder"], "publishes").glob("*")],
    }


def test_a_server_of_another_scheme_or_without_the_key_is_refused_before_training(server):
    found = isolated(_start, server, KEY, {"quant_scheme": "W8A8"})
    assert (
        "ValueError" in found
        and "is not the engine of this run" in found
        and "input_activations.num_bits must be 8, got None" in found
    )
    found = isolated(_start, server, KEY, {"quant_group_size": 32})
    assert "group_size must be 32, got 128" in found
    assert "PermissionError" in isolated(_start, server, "wrong", {})
    assert isolated(_start, server, KEY, {}) == "no error"  # control


def test_without_the_key_nobody_replaces_the_weights(server):
    url = f"http://127.0.0.1:{server['port']}"
    assert answers(f"{url}/health") == 200
    assert {answers(f"{url}/{path}") for path in ("v1/models", "weight_info", "server_info", "metrics")} == {401}


def test_a_run_through_a_server_is_the_colocated_one(server):
    far, near = isolated(_train, server, True), isolated(_train, server, False)
    assert far["publishes"] >= 3
    assert far["first"] == near["first"]  # all bits of 62 log-probs of the same weights
    assert far["random"] != far["first"] != far["last"]  # control: they are of the weights
    assert max(far["gaps"]) < 1e-6 and max(near["gaps"]) < 1e-6  # as tests/slow/test_gap.py
    # 4.1 bits a weight: codes, and a scale of 16 bits for 128 of them.
    low_bit = (far["bytes"] - far["embeddings"]) / (far["bf16"] - far["embeddings"])
    assert far["bytes"] == near["bytes"] and 0.25 < low_bit < 0.28
    assert far["left"] == []


def _pair(place: dict[str, Any]) -> dict[str, Any]:
    """One of two trainer processes: its completions have the learner's log-probs, and a stop of the main one is its own."""
    from slow.kills import digests

    changes = over_there(place, publish_verify=1, ddp_backend="gloo")
    trainer = make_trainer(place["model"], Path(place["folder"], "pair"), **changes)
    trainer.train()
    engine = trainer.vllm_generation
    rows = [row for row in trainer.state.log_history if "mismatch/logp_gap_max" in row]
    if trainer.accelerator.is_main_process:
        engine.vllm_client.version = "another"
    prompt = [2, 3, 4 + trainer.accelerator.process_index]
    return {
        "processes": trainer.accelerator.num_processes,
        "gaps": [row["mismatch/logp_gap_max"] for row in rows],
        "masters": digests(trainer),
        "stopped": outcome(engine.generate, [prompt] * 4, None, 4),
    }


def test_two_trainers_share_a_server(server):
    first, second = isolated_group(_pair, 2, server)
    assert first["processes"] == second["processes"] == 2
    assert (
        max(first["gaps"]) < 1e-5 and len(first["gaps"]) >= 2
    )  # of all processes: each has the completions of its prompts
    assert first["masters"] == second["masters"]
    assert "must hold version 'another'" in first["stopped"]
    assert "The main process could not ask the server, and says why" in second["stopped"]


def _stale(place: dict[str, Any]) -> str:
    from qarl_trl.rollout.server import ServerClient

    changes = over_there(place, publish_verify=1, learning_rate=1e-2)
    trainer = make_trainer(place["model"], Path(place["folder"], "x"), **changes)
    send, first = ServerClient._publish_files, []

    def send_the_first(client: Any, stream: Any, version: str) -> None:
        now = [(name, tensor.clone()) for name, tensor in stream]
        first.extend(now if not first else [])
        send(client, first, version)

    ServerClient._publish_files = send_the_first
    return outcome(trainer.train)


def test_old_weights_under_a_new_version_are_caught_by_the_canary(server):
    found = isolated(_stale, server)
    assert "After publish 2 the engine's log-probs" in found and "the engine is stale" in found


def _faults(place: dict[str, Any]) -> list[str]:
    from qarl_trl.rollout.server import ServerClient

    trainer = make_trainer(place["model"], Path(place["folder"], "x"), publish_verify="off", **over_there(place))
    engine, found = trainer.vllm_generation, []

    def sample() -> None:
        engine._failed = None  # each fault by itself
        ids, completions, *_ = engine.generate([[2, 3, 4]] * 4, None, 4)
        assert len(ids) == len(completions) == 4

    found.append(outcome(sample))  # nothing published yet
    engine._failed = None
    engine.sync_weights()
    found.append(outcome(sample))
    send, ServerClient._publish_files = ServerClient._publish_files, lambda self, stream, version: list(stream)
    found.append(outcome(engine.sync_weights))  # a publish that never gets there
    found.append(outcome(sample))
    ServerClient._publish_files = send
    engine._failed, stream = None, engine._iter_named_params
    engine._iter_named_params = lambda: ((n, t) for n, t in stream() if "layers.1.mlp.down_proj.weight_scale" not in n)
    found.append(outcome(engine.sync_weights))  # a tensor is missing
    found.append(outcome(sample))
    engine._iter_named_params, engine._failed = stream, None
    found.append(outcome(engine.sync_weights))  # vLLM's reload would go on with what that one had buffered
    os.killpg(place["pid"], signal.SIGKILL)
    found.append(outcome(sample))
    with serving(Path(place["folder"], "recipe.yaml"), place["port"]):
        found.append(outcome(sample))
        engine._failed = None
        engine.sync_weights()
        found.append(outcome(sample))
    return found


def test_no_answer_of_other_weights_is_trained_on(server):
    unpublished, ok, lost, after, partial, mixed, spoilt, dead, restarted, healthy = isolated(_faults, server)
    assert "must hold version None" in unpublished
    assert ok == healthy == "no error"
    assert lost == "no error" and "-2' of the weights, got '" in after and "-1': it was started again" in after
    assert "kept old values for 1 tensors, first ['model.layers.1.mlp.down_proj.weight_scale']" in partial
    assert "must hold version None of the weights, got None" in mixed
    assert "an earlier publish to this server failed" in spoilt
    assert "ConnectionError" in dead and "died or hung up during /collective_rpc" in dead
    assert "got None" in restarted and "started again (None: random weights)" in restarted
