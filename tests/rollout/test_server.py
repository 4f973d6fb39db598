"""`qarl_trl.rollout.server`: what a trainer refuses of a server. The real server is in tests/slow/test_server.py."""

import copy
import json
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from vllm.v1.worker.gpu_worker import Worker

from qarl_trl.rollout import _vllm, sync_files
from qarl_trl.rollout._vllm_server import WorkerExtension
from qarl_trl.rollout.server import ServerClient, engine_facts
from qarl_trl.rollout.sync_files import read_parts, save_parts


class Stub(BaseHTTPRequestHandler):
    """The routes that a trainer asks, and what they answer; a callable answers by the request's body."""

    def do_GET(self):
        answer = self.server.answers.get(self.path, {})
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        self.server.asked.append((self.path, body, self.headers.get("Authorization")))
        status, answer = answer(body) if callable(answer) else (200, answer)
        if status == 0:
            return self.connection.close()  # dies before it has answered
        raw = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    do_POST = do_GET

    def log_message(self, *args):
        pass


@contextmanager
def client_of(answers, folder="nowhere"):
    stub = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    stub.answers = {"/v1/models": {"data": [{"id": "m"}]}, "/get_world_size": {"world_size": 1}} | answers
    stub.asked = []
    threading.Thread(target=stub.serve_forever, args=(0.02,), daemon=True).start()
    try:
        client = ServerClient(folder, base_url=f"http://127.0.0.1:{stub.server_address[1]}")
        client.asked = stub.asked
        yield client
    finally:
        stub.shutdown()
        stub.server_close()


QUANTIZATION = {"config_groups": {"group_0": {"weights": {"num_bits": 4}, "input_activations": None}}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_cache": False, "eos_token_id": 7, "attention_dropout": 0.1}, None),
        ({"rms_norm_eps": 1e-5}, "config.rms_norm_eps must be 1e-06, got 1e-05"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "rope_theta must be 10000.0, got 5.0"),
        ({"quantization": None}, "group_0.weights.num_bits must be 4, got None"),
        ({"activations": {"num_bits": 8}}, "input_activations.num_bits must be None, got 8"),
        ({"vllm": "0.1"}, "vllm must be '0.3"),
        ({"ranks": 2}, "ranks must be 1, got 2"),
    ],
)
def test_a_server_that_is_not_the_engine_of_the_run_is_refused(tiny_model, changes, words):
    config, quantization = tiny_model().config, copy.deepcopy(QUANTIZATION)
    needed = engine_facts(config, quantization)
    group = quantization["config_groups"]["group_0"]
    group["input_activations"] = changes.get("activations")
    for name in changes.keys() & config.to_dict().keys():
        setattr(config, name, changes[name])
    facts = engine_facts(config, changes.get("quantization", quantization))
    facts |= {name: changes[name] for name in changes.keys() & {"vllm"}}
    state = {"version": None, "facts": facts}
    answers = {"/qarl_state": lambda body: (200, [state])}
    with client_of(answers | {"/get_world_size": {"world_size": changes.get("ranks", 1)}}) as client:
        if words is None:
            assert client.check(needed) is True  # its weights are random
            state["version"] = "of an earlier run"
            assert client.check(needed) is False
            return
        with pytest.raises(ValueError, match="is not the engine of this run") as error:
            client.check(needed)
        assert words in str(error.value)


def test_a_server_that_nobody_started_as_ours_is_told_how():
    answers = {"/qarl_state": lambda body: (404, {"detail": "Not Found"})}
    with client_of(answers) as client, pytest.raises(ValueError, match="404.*qarl-trl serve --config"):
        client.check({})


def test_no_server_or_something_else_at_the_address_is_one_clear_error():
    with pytest.raises(
        ConnectionError, match=r"No vLLM server answers at http://127.0.0.1:9 after 0 s.*qarl-trl serve"
    ):
        ServerClient("nowhere", base_url="http://127.0.0.1:9")
    with pytest.raises(ConnectionError, match="404"), client_of({"/health": lambda body: (404, {})}):
        pass


def test_the_key_goes_with_every_request_and_a_wrong_one_is_a_permission_error(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    with client_of({"/weights": lambda body: (401, {})}) as client:
        with pytest.raises(PermissionError):
            client._get(f"{client.base_url}/weights")
        assert {key for path, _, key in client.asked if path != "/health"} == {"Bearer sesame"}


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (["mine"], ["mine"], None),
        (["old"], ["old"], "must hold version 'mine' of the weights, got 'old'"),
        ([None], [None], "got None: it was started again"),
        (["mine"], ["other"], "got 'other'"),
        (["mine", "old"], ["mine"], "'old'"),  # of two ranks
    ],
)
def test_no_completion_of_other_weights_is_returned(before, after, words):
    states = iter([before, after])
    answers = {
        "/qarl_state": lambda body: (200, [{"version": version} for version in next(states)]),
        "/v1/completions": {"choices": [{"prompt_token_ids": [1, 2], "token_ids": [3], "logprobs": None}]},
    }
    with client_of(answers) as client:
        client.version = "mine"
        answer = client.generate([[1, 2]], n=1)
        if words is None:
            client.raise_failure()
            assert answer["completion_ids"] == [[3]]
            return
        assert answer["completion_ids"] == []
        with pytest.raises(RuntimeError, match="resume from the last checkpoint") as error:
            client.raise_failure()
        assert words in str(error.value)
        client.raise_failure()  # once


def test_a_server_that_dies_is_asked_once():
    with client_of({"/qarl_state": lambda body: (0, {})}) as client:
        client.version = "mine"
        client.generate([[1, 2]], n=1)
        with pytest.raises(ConnectionError, match="died or hung up during /qarl_state"):
            client.raise_failure()
        assert [path for path, *_ in client.asked].count("/qarl_state") == 1


def test_a_machine_that_vanishes_is_noticed_by_keepalive_packets():
    with client_of({}) as client:
        pool = client.session.get_adapter(client.base_url).poolmanager.connection_from_url(client.base_url)
        connection = pool.ConnectionCls(pool.host, pool.port, **pool.conn_kw)
        connection.connect()
        assert connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert connection.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < 300
        connection.close()


# The folder -----------------------------------------------------------------------------------------------------------

TENSORS = {f"{name}.{i}": torch.arange(8, dtype=torch.int32) + i for i in range(3) for name in "ba"}


def reads(folder, got):
    """Answers of a stub that reads a weight sync as the server does."""

    def call(body):
        got.extend((name, tensor.clone()) for name, tensor in read_parts(str(folder), *body))
        return 200, [None]

    return {"/qarl_load": call, "/reset_prefix_cache": {"success": True}}


def test_a_sync_arrives_and_its_files_are_removed(tmp_path):
    got = []
    with client_of(reads(tmp_path, got), tmp_path) as client:
        client.sync(TENSORS.items())
        (asked,) = [body for path, body, _ in client.asked if path == "/qarl_load"]
        assert asked == [client.version, 1] and client.version.endswith("-1")
    assert {name for name, _ in got} == TENSORS.keys() and len(got) == len(TENSORS)
    assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in got)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("route", "answer", "words"),
    [
        ("/qarl_load", (500, {"error": "unknown"}), "refused /qarl_load .500.*unknown"),
        ("/qarl_load", (200, [None, {"error": "kept old"}]), "failed in 1 of 2 ranks .*rank 1: kept"),
        ("/reset_prefix_cache", (200, {"success": False}), "could not reset its prefix cache"),
    ],
)
def test_a_sync_that_the_server_refuses_leaves_nothing_to_sample_from(tmp_path, route, answer, words):
    with client_of(reads(tmp_path, []) | {route: lambda body: answer}, tmp_path) as client:
        client.version = "mine"
        with pytest.raises(RuntimeError, match=words):
            client.sync(TENSORS.items())
        assert client.version is None and list(tmp_path.iterdir()) == []


def test_parts_end_at_their_size_and_hold_views_of_one_storage(tmp_path):
    whole = torch.arange(8)
    parts = save_parts([("b", whole[:4]), ("a", whole[4:]), ("c", whole)], tmp_path, limit=64)
    assert parts == 2
    first, second = (load_file(tmp_path / f"{number}.safetensors") for number in (0, 1))
    (tmp_path / "plain").touch()
    assert (tmp_path / "0.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode  # as the umask says
    assert torch.equal(torch.cat([first["b"], first["a"]]), second["c"])


def test_a_full_folder_is_said_with_its_name_and_the_server_is_not_asked(tmp_path):
    full = patch.object(sync_files, "save_file", side_effect=OSError(28, "No space left on device"))
    with client_of(reads(tmp_path, []), tmp_path) as client, full:
        with pytest.raises(RuntimeError, match=f"sync_folder '{tmp_path}'.*No space left"):
            client.sync(TENSORS.items())
        assert "/qarl_load" not in [path for path, *_ in client.asked] and list(tmp_path.iterdir()) == []


def test_the_server_reads_its_folder_only_and_whole_files(tmp_path):
    inside, root = tmp_path / "shared" / "run-1", str(tmp_path / "shared")
    inside.mkdir(parents=True)
    assert save_parts(TENSORS.items(), inside) == 1
    assert {name for name, _ in read_parts(root, "run-1", 1)} == TENSORS.keys()
    for elsewhere in ("run-2", "..", "../shared/..", str(tmp_path), "."):
        with pytest.raises(ValueError, match="has no folder .* in its sync_folder .*both must mount the same"):
            read_parts(root, elsewhere, 1)
    with pytest.raises(ValueError, match=r"cannot read all 2 files of .*run-1"):
        read_parts(root, "run-1", 2)
    part = inside / "0.safetensors"
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"cannot read all 1 files of .*run-1"):
        read_parts(root, "run-1", 1)


# The workers ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """vLLM's worker with our methods, without device and model; its reload fails where `worker.fails`."""
    worker = object.__new__(type("Extended", (Worker, WorkerExtension), {}))
    model, worker.seen, worker.fails = torch.nn.Linear(1, 1), [], False
    worker.vllm_config = SimpleNamespace(additional_config={"sync_folder": str(tmp_path)}, model_config=None)
    worker.model_runner = SimpleNamespace(get_model=lambda: model, reset_lora_state=lambda: None)
    worker._weight_update_active = worker._weight_update_is_draft = False

    def reload(model, run):
        worker.seen.append(model.qarl_version)
        if worker.fails:
            raise RuntimeError("The engine kept old values")

    monkeypatch.setattr(_vllm, "reload_model", reload)
    (tmp_path / "run-1").mkdir()
    save_parts(TENSORS.items(), tmp_path / "run-1")
    return worker


def test_weights_have_a_version_only_after_a_whole_sync(worker):
    model = worker.model_runner.get_model()
    assert worker.qarl("qarl_load", "run-1", 1) is None and model.qarl_version == "run-1"
    # A folder that lacks something leaves the weights and their version, and the next sync goes on (review D7).
    assert "cannot read" in worker.qarl("qarl_load", "run-1", 2)["error"]
    assert model.qarl_version == "run-1" and worker.qarl("qarl_load", "run-1", 1) is None
    # What fails amid the reload may have left a mix.
    worker.fails = True
    assert "kept old" in worker.qarl("qarl_load", "run-1", 1)["error"] and model.qarl_version is None
    worker.fails = False
    assert "start it again" in worker.qarl("qarl_load", "run-1", 1)["error"]
    assert worker.seen == [None] * 3 and model.qarl_version is None
