"""`qarl_trl.rollout.server`: what a trainer refuses of a server. The real server is in tests/slow/test_server.py."""

import json
import socket
import threading
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from trl.generation import vllm_client
from vllm.config import VllmConfig, WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.v1.worker.gpu_worker import Worker

from qarl_trl.rollout import _vllm, server
from qarl_trl.rollout._vllm_server import WorkerExtension, tensors_of, weights_of
from qarl_trl.rollout.server import ServerClient, differences, engine_facts, needed_of_server, save_parts


class Stub(BaseHTTPRequestHandler):
    """The routes that a trainer asks, and what they answer; a callable answers by the request's body."""

    def do_GET(self):
        path = self.path.partition("?")[0]
        answer = self.server.answers.get(path, {})
        size = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(size) or "{}")
        self.server.asked.append((path, body, self.headers.get("Authorization")))
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
def client_of(answers, folder=None, **kwargs):
    stub = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    stub.answers = {"/v1/models": {"data": [{"id": "m"}]}, "/get_world_size": {"world_size": 1}} | answers
    stub.asked = []
    threading.Thread(target=stub.serve_forever, args=(0.02,), daemon=True).start()
    try:
        client = ServerClient(folder, base_url=f"http://127.0.0.1:{stub.server_address[1]}", **kwargs)
        client.asked, client.answers = stub.asked, stub.answers
        yield client
    finally:
        stub.shutdown()
        stub.server_close()


@pytest.fixture
def needed(tiny_model):
    return needed_of_server(tiny_model().config, {"config_groups": {"group_0": {"num_bits": 4}}}, "cpu", "folder", 1)


def state_of(needed, version=None, **changes):
    """What a worker says that runs what is needed, as JSON has it, but for `changes` by dotted names."""
    state = json.loads(json.dumps(needed)) | {
        "version": version,
        "random": version is None,
        "config_class": "transformers.models.qwen3",
    }
    for name, value in changes.items():
        inner, *path = state, *name.split("__")
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
    return state


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"config__use_cache": False, "config__eos_token_id": 7, "config__transformers_version": "9"}, None),
        ({"config__attention_dropout": 0.1, "config__router_aux_loss_coef": 0.5}, None),
        ({"config_class": "vllm.transformers_utils.configs", "config__a_field_of_its_own": 2}, None),
        ({"config__hidden_size": 64}, "config.hidden_size must be 128, got 64"),
        ({"config__rms_norm_eps": 1e-5}, "config.rms_norm_eps must be 1e-06, got 1e-05"),
        ({"config__tie_word_embeddings": True}, "config.tie_word_embeddings must be False, got True"),
        ({"config__rope_parameters__rope_theta": 5.0}, "config.rope_parameters.rope_theta must be 10000.0, got 5.0"),
        ({"config__rope_parameters__factor": 4.0}, "config.rope_parameters.factor must be None, got 4.0"),
        ({"config__rope_parameters": None}, "config.rope_parameters.rope_theta must be 10000.0, got None"),
        ({"config__a_field_of_its_own": 2}, "config.a_field_of_its_own must be None, got 2"),
        ({"engine__eos_token_id": 7}, "engine.eos_token_id must be 1, got 7"),
        ({"quantization_config__config_groups__group_0__num_bits": 8}, "num_bits must be 4, got 8"),
        ({"quantization_config": None}, "quantization_config.config_groups.group_0.num_bits must be 4, got None"),
        ({"engine__vllm": "0.1"}, "engine.vllm must be '0.31"),
        ({"engine__logprobs_mode": "raw_logprobs"}, "engine.logprobs_mode must be 'processed_logprobs'"),
        ({"engine__transport": "nccl"}, "engine.transport must be 'folder', got 'nccl'"),
        ({"engine__device": "cuda"}, "engine.device must be 'cpu', got 'cuda'"),
    ],
)
def test_a_server_that_is_not_the_engine_of_the_run_is_refused(needed, changes, words):
    states = [state_of(needed, **changes)]
    with client_of({"/collective_rpc": lambda body: (200, {"results": states})}) as client:
        if words is None:
            assert client.check(needed) is True  # its weights are random
            states[0]["random"] = False  # an earlier run's, or anybody's
            assert client.check(needed) is False
            return
        with pytest.raises(ValueError, match="is not the engine of this run") as error:
            client.check(needed)
        assert words in str(error.value)


def test_another_library_may_know_other_fields_of_a_config_and_no_other_values():
    mine = {"config": {"hidden_size": 8, "rope": None, "text_config": {"layers": 2, "new": 0}, "window": 4}}
    theirs = {"config": {"hidden_size": 8, "rope": {"factor": 4}, "text_config": {"layers": 3}, "old": 1}}
    known = {"config.rope.factor": (None, 4), "config.text_config.layers": (2, 3)}
    assert differences(mine, theirs, same_library=False) == known
    unknown = {"config.old": (None, 1), "config.text_config.new": (0, None), "config.window": (4, None)}
    assert differences(mine, theirs) == known | unknown


def test_a_data_parallel_server_is_refused(needed):
    answers = {"/collective_rpc": {"results": [state_of(needed)]}, "/get_world_size": {"world_size": 2}}
    with client_of(answers) as client, pytest.raises(ValueError, match="data parallel"):
        client.check(needed)


def test_a_server_that_nobody_started_as_ours_is_told_how(needed):
    answers = {"/collective_rpc": lambda body: (500, {"error": "'CPUWorker' object has no attribute 'qarl_state'"})}
    with client_of(answers) as client, pytest.raises(ValueError, match="no attribute.*qarl-trl serve --config"):
        client.check(needed)


def test_no_server_is_one_clear_error():
    with pytest.raises(
        ConnectionError,
        match=r"No vLLM server answers at http://127.0.0.1:9/health after 0 s.*ConnectionError.*qarl-trl serve",
    ):
        ServerClient(None, base_url="http://127.0.0.1:9")


def test_something_else_at_the_address_is_no_server_and_a_slash_too_many_does_no_harm():
    with client_of({}) as client:
        assert ServerClient(None, base_url=f"{client.base_url}/").base_url == client.base_url
        assert client.asked[-1][0] != "//health"
    with pytest.raises(ConnectionError, match="got status 404"), client_of({"/health": lambda body: (404, {})}):
        pass


def test_the_key_goes_with_every_request_and_a_wrong_one_is_named(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    with client_of({"/weights": lambda body: (401, {})}) as client:
        with pytest.raises(PermissionError, match="wants another key: set VLLM_API_KEY"):
            client._get(f"{client.base_url}/weights")
        assert {key for path, _, key in client.asked if path != "/health"} == {"Bearer sesame"}


def generation(client):
    return client.generate([[1, 2]], n=1)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("mine", "mine", None),
        ("old", "old", "must hold version 'mine' of the weights, got 'old'"),
        (None, None, "got None: it was started again"),
        ("mine", None, "got None"),
        ("mine", "other", "got 'other'"),
    ],
)
def test_no_completion_of_other_weights_is_returned(before, after, words):
    versions = iter([before, after])
    choice = {"prompt_token_ids": [1, 2], "token_ids": [3], "logprobs": None}
    answers = {
        "/collective_rpc": lambda body: (200, {"results": [{"version": next(versions)}]}),
        "/v1/completions": {"choices": [choice]},
    }
    with client_of(answers) as client:
        client.version = "mine"
        answer = generation(client)
        if words is None:
            client.raise_failure()
            assert answer["completion_ids"] == [[3]]
            return
        assert answer["completion_ids"] == []
        with pytest.raises(RuntimeError, match="resume from the last checkpoint") as error:
            client.raise_failure()
        assert words in str(error.value)
        client.raise_failure()  # once


def test_workers_must_agree_on_the_version():
    answers = {"/collective_rpc": {"results": [{"version": "mine"}, {"version": "old"}]}}
    with client_of(answers) as client:
        client.version = "mine"
        with pytest.raises(RuntimeError, match="got .*'old'"):
            client.require_synced()


def test_a_server_that_dies_is_asked_once():
    with client_of({"/collective_rpc": lambda body: (0, {})}) as client:
        client.version = "mine"
        generation(client)
        with pytest.raises(ConnectionError, match="died or hung up during /collective_rpc.*resume"):
            client.raise_failure()
        assert [path for path, *_ in client.asked].count("/collective_rpc") == 1


# The folder -----------------------------------------------------------------------------------------------------------

TENSORS = {f"{name}.{i}": torch.arange(8, dtype=torch.int32) + i for i in range(3) for name in "ba"}


def load(folder, answers, got):
    """Let the stub read a weight sync as the server does."""

    def call(body):
        method, args = body["method"], body["args"]
        if method == "qarl_load":
            got.extend((n, t.clone()) for n, t in tensors_of(str(folder), args[0], json.loads(args[1])))
        return 200, {"results": [None]}

    return {"/collective_rpc": call, "/reset_prefix_cache": {"success": True}} | answers


def test_a_sync_arrives_in_order_and_its_files_are_removed(tmp_path):
    got = []
    with client_of(load(tmp_path, {}, got), tmp_path) as client:
        client.sync(TENSORS.items(), None, "cpu")
        (asked,) = [body for path, body, _ in client.asked if path == "/collective_rpc"]
        assert asked["args"] == [client.version, PARTS]
        assert "/reset_encoder_cache" in [path for path, *_ in client.asked]
        assert client.version.endswith("-1")
        assert [name for name, _ in got] == list(TENSORS)
        assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in got)
        assert list(tmp_path.iterdir()) == []


def test_a_sync_that_the_server_refuses_leaves_nothing_to_sample_from(tmp_path):
    one_rank = {"results": [None, {"error": "RuntimeError: The engine kept old values"}]}
    for status, answer, words in (
        (500, {"error": "unknown"}, "refused /collective_rpc .500.*unknown"),
        (200, one_rank, "qarl_load failed in 1 of 2 ranks .*: rank 1: RuntimeError: The engine kept old values"),
    ):
        refused = {"/collective_rpc": lambda body, said=(status, answer): said}
        with client_of(load(tmp_path, refused, []), tmp_path) as client:
            client.version = "mine"
            with pytest.raises(RuntimeError, match=words):
                client.sync(TENSORS.items(), None, "cpu")
            assert client.version is None
            assert list(tmp_path.iterdir()) == []
    with client_of(load(tmp_path, {"/reset_prefix_cache": {"success": False}}, []), tmp_path) as client:
        with pytest.raises(RuntimeError, match="could not reset its prefix cache"):
            client.sync(TENSORS.items(), None, "cpu")
        assert client.version is None


def test_parts_end_at_their_size_and_hold_views_of_one_storage(tmp_path):
    whole = torch.arange(8)
    parts = save_parts([("b", whole[:4]), ("a", whole[4:]), ("c", whole)], tmp_path, limit=64)
    assert parts == [["b", "a"], ["c"]]  # in order, which the files do not keep
    first, second = (load_file(tmp_path / f"{number}.safetensors") for number in (0, 1))
    (tmp_path / "plain").touch()
    assert (tmp_path / "0.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode  # as the umask says
    assert torch.equal(torch.cat([first["b"], first["a"]]), second["c"])


def test_a_full_folder_is_said_with_its_name_and_the_server_is_not_asked(tmp_path):
    def full(*_):
        raise OSError(28, "No space left on device")

    with client_of(load(tmp_path, {}, []), tmp_path) as client, patch.object(server, "save_file", full):
        with pytest.raises(RuntimeError, match=f"sync_folder '{tmp_path}'.*No space left.*Make room"):
            client.sync(TENSORS.items(), None, "cpu")
        assert "/collective_rpc" not in [path for path, *_ in client.asked]
        assert list(tmp_path.iterdir()) == []


def test_the_server_reads_its_folder_only_and_all_that_was_named(tmp_path):
    inside, names = tmp_path / "shared" / "run-1", list(TENSORS)
    inside.mkdir(parents=True)
    assert save_parts(TENSORS.items(), inside) == [names]
    root = str(tmp_path / "shared")
    assert [name for name, _ in tensors_of(root, "run-1", [names])] == names
    for elsewhere in ("run-2", "..", "../shared/..", str(tmp_path), "."):
        with pytest.raises(ValueError, match="give trainer and server the same folder"):
            tensors_of(root, elsewhere, [names])
    with pytest.raises(ValueError, match="lacks 1 tensors of the sync, first 'c'"):
        tensors_of(root, "run-1", [[*names, "c"]])
    with pytest.raises(ValueError, match=r"cannot read .*1\.safetensors"):
        tensors_of(root, "run-1", [names, names])
    part = inside / "0.safetensors"
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"cannot read .*0\.safetensors"):
        tensors_of(root, "run-1", [names])


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """vLLM's worker with our methods, without device and model; its reload fails where `worker.fails`."""
    worker = object.__new__(type("Extended", (Worker, WorkerExtension), {}))
    model, worker.seen, worker.fails = torch.nn.Linear(1, 1), [], False
    worker.vllm_config = SimpleNamespace(additional_config={"sync_folder": str(tmp_path)}, model_config=None)
    worker.model_runner = SimpleNamespace(get_model=lambda: model, reset_lora_state=lambda: None)
    worker._weight_update_active = worker._weight_update_is_draft = False

    def reload(model, run):
        worker.seen.append(weights_of(model).version)
        if worker.fails:
            raise RuntimeError("The engine kept old values")

    monkeypatch.setattr(_vllm, "reload_model", reload)
    (tmp_path / "run-1").mkdir()
    save_parts(TENSORS.items(), tmp_path / "run-1")
    return worker


PARTS = json.dumps([list(TENSORS)])


def test_weights_have_a_version_only_after_a_whole_sync(worker):
    weights = weights_of(worker.model_runner.get_model())
    assert not weights.touched
    assert worker.qarl_load("run-1", PARTS) is None and weights.version == "run-1"
    # A folder that lacks something leaves the weights and their version, and the next sync goes on (review D7).
    assert "lacks 1 tensors" in worker.qarl_load("run-1", json.dumps([[*TENSORS, "c"]]))["error"]
    assert "no folder" in worker.qarl_load("run-3", PARTS)["error"]
    assert weights.version == "run-1" and worker.qarl_load("run-1", PARTS) is None
    # What fails amid the reload may have left a mix.
    worker.fails = True
    assert "kept old" in worker.qarl_load("run-1", PARTS)["error"] and weights.version is None
    worker.fails = False
    for begin in (lambda: worker.qarl_load("run-1", PARTS), lambda: worker.qarl_mark("")):
        assert "start it again" in begin()["error"]
    assert worker.seen == [None] * 3 and weights.version is None and weights.touched


@pytest.mark.parametrize("another", [False, True])
def test_a_sync_over_nccl_is_one_update_between_two_marks(worker, monkeypatch, another):
    """TRL's client, vLLM's session and our backend; only the group of GPUs is left out."""
    sent, order, model = [], [], worker.model_runner.get_model()
    worker.vllm_config = VllmConfig()
    config = WeightTransferConfig(backend="qarl_nccl")
    worker.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
        config, worker.vllm_config, torch.device("cpu"), model
    )
    monkeypatch.setattr(vllm_client, "packed_nccl_broadcast_producer", lambda iterator, **_: sent.extend(iterator))
    monkeypatch.setattr(server, "_wait_for_device", lambda: order.append(len(sent)))

    def route(name):
        def answer(body):
            try:
                if name == "finish_weight_update" and another:
                    worker.update_weights(NCCL)  # of somebody else, before the mark
                method = getattr(worker, body["method"] if name == "collective_rpc" else name)
                return 200, {"results": [method(*body.get("args", body.values()))]}
            except RuntimeError as error:
                return 500, {"error": str(error)}

        return {f"/{name}": answer}

    answers = {"/reset_prefix_cache": {"success": True}}
    for name in ("collective_rpc", "start_weight_update", "update_weights", "finish_weight_update"):
        answers |= route(name)
    with client_of(answers) as client:
        client.communicator = None
        metadata = [(name, "int32", [8]) for name in TENSORS]
        with pytest.raises(RuntimeError, match="must be one update.*got 2") if another else nullcontext():
            client.sync(TENSORS.items(), metadata, "cpu")
        assert client.version == weights_of(model).version == (None if another else f"{client._run}-1")
    assert [name for name, _ in sent] == list(TENSORS) and worker.seen == [None] * (2 if another else 1)
    assert order == [0, len(TENSORS)]  # the device is waited for before and after (review F9)


NCCL = {"names": [], "dtype_names": [], "shapes": []}


def test_what_is_sent_and_not_acknowledged_is_given_up_as_soon_as_an_idle_wait():
    with client_of({}) as client:
        pool = client.session.get_adapter(client.base_url).poolmanager.connection_pool_kw["socket_options"]
        set_to = {option: value for level, option, value in pool if level == socket.IPPROTO_TCP}
    idle = set_to[socket.TCP_KEEPIDLE] + set_to[socket.TCP_KEEPINTVL] * set_to[socket.TCP_KEEPCNT]
    assert set_to[socket.TCP_USER_TIMEOUT] == 1000 * idle and idle < 180


def test_what_decides_how_an_engine_rounds_has_the_version():
    assert engine_facts("cuda").keys() == {"device", "vllm"}
    assert engine_facts("cpu").keys() == {"device", "vllm", "avx512_bf16"}
