"""`qarl_trl.rollout.server.client`: what a trainer refuses of a server. The real one: tests/slow/test_server.py."""

import copy
import json
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from qarl_trl.rollout.server import files
from qarl_trl.rollout.server.client import ServerClient
from qarl_trl.rollout.server.facts import RANDOM, engine_facts
from qarl_trl.rollout.server.files import read_parts
from qarl_trl.rollout.server.key import find_key, make_key
from qarl_trl.rollout.vllm.adapters import ADAPTER_NAME


class Stub(BaseHTTPRequestHandler):
    """The routes that a trainer asks, and what they answer; a callable answers by the request's body."""

    def do_GET(self):
        body = self.read_json()
        self.server.asked.append((self.path, body, self.headers.get("Authorization")))

        answer = self.server.answers.get(self.path, {})
        status = 200
        if callable(answer):
            status, answer = answer(body)
        if status == 0:
            # The server dies before it has answered.
            self.connection.close()
            return

        raw = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    do_POST = do_GET

    def read_json(self):
        length = int(self.headers.get("Content-Length", 0))
        return json.loads(self.rfile.read(length) or "{}")

    def log_message(self, *args):
        pass


@contextmanager
def client_of(answers, folder="nowhere", connection_timeout=0.0):
    """A client of a stub with these answers; `client.asked` lists path, body and key of every request."""
    stub = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    # What TRL's constructor asks.
    stub.answers = {"/v1/models": {"data": [{"id": "m"}]}, "/get_world_size": {"world_size": 1}} | answers
    stub.asked = []
    # It looks every 0.02 s whether to stop, so that a test does not wait for the usual half second.
    threading.Thread(target=stub.serve_forever, args=(0.02,), daemon=True).start()

    try:
        address = f"http://127.0.0.1:{stub.server_address[1]}"
        client = ServerClient(folder, base_url=address, connection_timeout=connection_timeout)
        client.asked = stub.asked
        yield client
    finally:
        stub.shutdown()
        stub.server_close()


def asked_paths(client):
    return [path for path, _, _ in client.asked]


# The server -----------------------------------------------------------------------------------------------------


QUANTIZATION = {"config_groups": {"group_0": {"weights": {"num_bits": 4}, "input_activations": None}}}


def changed_facts(config, changes):
    """The facts of a server with `changes` in its config, its quantization, its vLLM or its revision."""
    # The trainer's own facts are made of the same object.
    config = copy.deepcopy(config)
    for name in changes.keys() & config.to_dict().keys():
        setattr(config, name, changes[name])

    quantization = copy.deepcopy(QUANTIZATION)
    quantization["config_groups"]["group_0"]["input_activations"] = changes.get("activations")

    cache_dtype = changes.get("cache", "auto")
    facts = engine_facts(config, changes.get("quantization", quantization), cache_dtype, changes.get("adapter"))
    for name in ("vllm", "revision of qarl_trl"):
        if name in changes:
            facts[name] = changes[name]
    return facts


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        # One fact each: of the model, its quantization, the cache, an adapter, vLLM, this package, and of the ranks.
        ({"rms_norm_eps": 1e-5}, "config.rms_norm_eps must be 1e-06, got 1e-05"),
        ({"layer_types": ["sliding_attention"]}, "config.layer_types must be"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "rope_theta must be 10000.0, got 5.0"),
        ({"quantization": None}, "group_0.weights.num_bits must be 4, got None"),
        ({"activations": {"num_bits": 8}}, "input_activations.num_bits must be None, got 8"),
        ({"cache": "fp8"}, "kv_cache_dtype must be 'auto', got 'fp8'"),
        ({"adapter": {"max_lora_rank": 8}}, "adapter.max_lora_rank must be None, got 8"),
        ({"vllm": "0.1"}, "vllm must be '0.3"),
        ({"revision of qarl_trl": "older"}, "got 'older'"),
        ({"ranks": 2}, "ranks must be 1, got 2"),
    ],
)
def test_a_server_that_is_not_the_engine_of_the_run_is_refused(tiny_model, changes, words):
    config = tiny_model().config
    needed = engine_facts(config, QUANTIZATION)
    answers = {
        "/qarl_state": [{"version": RANDOM, "facts": changed_facts(config, changes)}],
        "/get_world_size": {"world_size": changes.get("ranks", 1)},
    }

    with client_of(answers) as client, pytest.raises(ValueError, match="is not the engine of this run") as error:
        client.check(needed)

    assert words in str(error.value)


def test_a_server_that_was_started_again_between_two_syncs_is_compared_again(tiny_model, tmp_path):
    config = tiny_model().config
    server = {"version": RANDOM, "facts": changed_facts(config, {})}

    def load(body):
        server["version"] = body[0]
        return 200, [None]

    answers = {
        "/qarl_state": lambda body: (200, [dict(server)]),
        "/qarl_load": load,
        "/reset_prefix_cache": {"success": True},
    }

    with client_of(answers, tmp_path) as client:
        client.check(engine_facts(config, QUANTIZATION))
        client.sync(TENSORS.items())
        assert client.holds_last_sync()

        # By the same recipe, and by another one.
        server["version"] = RANDOM
        assert not client.holds_last_sync()
        client.check_again()
        server["facts"] = changed_facts(config, {"cache": "fp8"})
        with pytest.raises(ValueError, match="kv_cache_dtype must be 'auto', got 'fp8'"):
            client.check_again()


@pytest.mark.parametrize(("version", "random"), [(RANDOM, True), ("of an earlier run", False), (None, False)])
def test_a_server_with_other_settings_of_no_matter_is_taken(tiny_model, version, random):
    """And it says whether its weights are random."""
    config = tiny_model().config
    # None of these changes the log-prob of a token.
    changes = {"use_cache": False, "eos_token_id": 7, "attention_dropout": 0.1}
    answers = {"/qarl_state": [{"version": version, "facts": changed_facts(config, changes)}]}

    with client_of(answers) as client:
        assert client.check(engine_facts(config, QUANTIZATION)) is random


def test_a_server_that_nobody_started_as_ours_is_told_how():
    answers = {"/qarl_state": lambda body: (404, {"detail": "Not Found"})}

    with client_of(answers) as client, pytest.raises(ValueError, match="404.*qarl-trl serve --config"):
        client.check({})


def test_no_server_or_something_else_at_the_address_is_one_clear_error():
    # Nobody listens at port 9.
    nobody = r"No vLLM server answers at http://127.0.0.1:9 after 0 s.*qarl-trl serve"
    with pytest.raises(ConnectionError, match=nobody):
        ServerClient("nowhere", base_url="http://127.0.0.1:9")

    # Another program, which has no such route.
    refusing = {"/health": lambda body: (403, "give `qarl-trl serve` the name")}
    # At once: the guard's answer does not change.
    with pytest.raises(PermissionError, match="refuses this trainer.*the name"), client_of(refusing, "", 60):
        pass
    with pytest.raises(ConnectionError, match="404"), client_of({"/health": lambda body: (404, {})}):
        pass


def test_a_run_that_waits_for_its_server_says_so_once_and_takes_the_key_that_the_server_makes(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setattr("qarl_trl.rollout.server.client.time.sleep", lambda seconds: None)
    folder = tmp_path / "sync"
    starts = iter([503, 503, 200])

    def health(body):
        status = next(starts)
        if status == 200:
            make_key(str(folder))
        return status, {}

    with client_of({"/health": health}, folder, connection_timeout=30) as client:
        client._get(f"{client.base_url}/weights")

    (said,) = [record.getMessage() for record in caplog.records if record.name.endswith("server.client")]
    assert f"at {client.base_url} yet: waiting for up to 30 s" in said
    assert "qarl-trl serve --config" in said
    assert client.asked[-1][2] == f"Bearer {find_key(folder)}"
    assert len(find_key(folder)) == 32

    # Control: where the server is there, nothing is said.
    caplog.clear()
    with client_of({}, folder, connection_timeout=30):
        assert caplog.records == []


def test_the_key_goes_with_every_request_and_a_wrong_one_is_a_permission_error(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "sesame")

    with client_of({"/weights": lambda body: (401, {})}) as client:
        with pytest.raises(PermissionError):
            client._get(f"{client.base_url}/weights")

        # `/health` needs none.
        keys = {key for path, _, key in client.asked if path != "/health"}
        assert keys == {"Bearer sesame"}


def test_a_machine_that_vanishes_is_noticed_by_keepalive_packets():
    with client_of({}) as client:
        # A connection as `requests` would make it, by urllib3: `requests` itself says nothing of its sockets.
        manager = client.session.get_adapter(client.base_url).poolmanager
        pool = manager.connection_from_url(client.base_url)
        connection = pool.ConnectionCls(pool.host, pool.port, **pool.conn_kw)
        connection.connect()

        assert connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        # Linux waits two hours before it asks for the first time.
        assert connection.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < 300
        connection.close()


# Completions ----------------------------------------------------------------------------------------------------


COMPLETION = {"choices": [{"prompt_token_ids": [1, 2], "token_ids": [3], "logprobs": None}]}


def states_in_turn(*versions):
    """A route that answers with the versions of all ranks, one list after the other."""
    answers = iter(versions)
    return lambda body: (200, [{"version": version} for version in next(answers)])


def test_a_completion_of_the_synced_weights_is_returned():
    # The version before and after the batch: in between another run may have synced.
    answers = {"/qarl_state": states_in_turn(["mine"], ["mine"]), "/v1/completions": COMPLETION}

    with client_of(answers) as client:
        client.version = "mine"
        answer = client.generate([[1, 2]], n=1)

        client.raise_failure()  # there is none
        assert answer["completion_ids"] == [[3]]


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (["old"], ["old"], "must hold version 'mine' of the weights, got 'old'"),
        ([None], [None], "got None: it was started again"),
        (["mine"], ["other"], "got 'other'"),
        (["mine", "old"], ["mine"], "'old'"),  # of two ranks
    ],
)
def test_no_completion_of_other_weights_is_returned(before, after, words):
    answers = {"/qarl_state": states_in_turn(before, after), "/v1/completions": COMPLETION}

    with client_of(answers) as client:
        client.version = "mine"
        answer = client.generate([[1, 2]], n=1)

        # The error comes later, when all processes have their answers.
        assert answer["completion_ids"] == []
        with pytest.raises(RuntimeError, match="resume from the last checkpoint") as error:
            client.raise_failure()
        assert words in str(error.value)
        client.raise_failure()  # once


def test_images_are_refused_when_all_processes_have_their_answers():
    answers = {"/qarl_state": states_in_turn(["mine"], ["mine"]), "/v1/completions": COMPLETION}

    with client_of(answers) as client:
        client.version = "mine"
        # In the place of TRL's request, which the server does not have.
        assert client.image_features([["an image"], None]) == [None, None]
        assert client.generate([[1], [2]], n=1)["completion_ids"] == []
        with pytest.raises(ValueError, match="takes text only, got images in a prompt"):
            client.raise_failure()

        # Control: text.
        assert client.generate([[1, 2]], n=1)["completion_ids"] == [[3]]
        client.raise_failure()  # there is none


def test_a_later_answer_does_not_make_up_for_an_error():
    """A `rollout_func` may take no completions for an answer, and ask for the next turn."""
    answers = {"/qarl_state": states_in_turn(["old"], ["mine"], ["mine"]), "/v1/completions": COMPLETION}

    with client_of(answers) as client:
        client.version = "mine"
        assert client.generate([[1, 2]], n=1)["completion_ids"] == []
        assert client.generate([[1, 2]], n=1)["completion_ids"] == [[3]]
        with pytest.raises(RuntimeError, match="must hold version 'mine'"):
            client.raise_failure()


def test_a_server_that_dies_is_asked_once():
    with client_of({"/qarl_state": lambda body: (0, {})}) as client:
        client.version = "mine"
        client.generate([[1, 2]], n=1)

        with pytest.raises(ConnectionError, match="died or hung up during /qarl_state"):
            client.raise_failure()
        # Not again: it may have sampled the answer that was lost.
        assert asked_paths(client).count("/qarl_state") == 1


# Syncs ----------------------------------------------------------------------------------------------------------


TENSORS = {"b": torch.arange(8), "a": torch.arange(8) + 1}


def reading_answers(folder, received):
    """The routes of a stub that reads a weight sync from a folder as the server does."""

    def load(body):
        version, files, _ = body
        for name, tensor in read_parts(str(folder), version, files):
            received.append((name, tensor.clone()))
        return 200, [None]

    return {"/qarl_load": load, "/reset_prefix_cache": {"success": True}}


def is_empty(folder):
    return list(folder.iterdir()) == []


def test_a_sync_arrives_and_its_files_are_removed(tmp_path):
    received = []

    with client_of(reading_answers(tmp_path, received), tmp_path) as client:
        client.sync(TENSORS.items())

        (asked,) = [body for path, body, _ in client.asked if path == "/qarl_load"]
        # Version, number of files, and whether an adapter lies beside them.
        assert asked == [client.version, 1, False]
        assert client.version.endswith("-1")

    assert sorted(name for name, _ in received) == ["a", "b"]
    for name, tensor in received:
        assert torch.equal(tensor, TENSORS[name]), name
    assert is_empty(tmp_path)


FACTORS = {
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(4, 8),
    "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": torch.ones(8, 4),
}


@pytest.mark.parametrize("base", [TENSORS, {}], ids=["with its base", "alone"])
def test_an_adapter_lies_beside_the_files_of_the_base_and_is_the_model_of_later_requests(tmp_path, base):
    received = []
    adapters = []

    # The adapter's file is there while the server loads, and it is gone afterwards.
    def load(body):
        folder = tmp_path / body[0]
        adapters.append(load_file(folder / "adapter_model.safetensors"))
        return answers["/qarl_load"](body)

    answers = reading_answers(tmp_path, received)
    with client_of(answers | {"/qarl_load": load}, tmp_path) as client:
        client.model = "base"
        client.sync((base | FACTORS).items())

        (asked,) = [body for path, body, _ in client.asked if path == "/qarl_load"]
        # No file of the base where only the adapter is sent.
        assert asked == [client.version, len(base) and 1, True]
        assert client.model == ADAPTER_NAME

    assert sorted(name for name, _ in received) == sorted(base)
    (adapter,) = adapters
    assert adapter.keys() == FACTORS.keys()
    assert is_empty(tmp_path)


@pytest.mark.parametrize(
    ("route", "answer", "words"),
    [
        # The server itself, one of its ranks, and a cache that would answer with old weights.
        ("/qarl_load", (500, {"error": "unknown"}), "refused /qarl_load .500.*unknown"),
        ("/qarl_load", (200, [None, {"error": "kept old"}]), "failed in 1 of 2 ranks .*rank 1: kept"),
        ("/reset_prefix_cache", (200, {"success": False}), "could not reset its prefix cache"),
    ],
)
def test_a_sync_that_the_server_refuses_leaves_nothing_to_sample_from(tmp_path, route, answer, words):
    answers = reading_answers(tmp_path, []) | {route: lambda body: answer}

    with client_of(answers, tmp_path) as client:
        client.version = "mine"
        with pytest.raises(RuntimeError, match=words):
            client.sync(TENSORS.items())

        # No version: no completion can be of these weights.
        assert client.version is None
        assert is_empty(tmp_path)


def test_a_full_folder_is_said_with_its_name_and_the_server_is_not_asked(tmp_path):
    full = patch.object(files, "save_file", side_effect=OSError(28, "No space left on device"))

    with client_of(reading_answers(tmp_path, []), tmp_path) as client, full:
        with pytest.raises(RuntimeError, match=f"sync_folder '{tmp_path}'.*No space left"):
            client.sync(TENSORS.items())

        assert "/qarl_load" not in asked_paths(client)
        assert is_empty(tmp_path)
