"""`qarl_trl.rollout.server.worker`: the workers' side of a sync. The real server is in tests/slow/test_server.py."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.worker.gpu_worker import Worker

from qarl_trl.rollout.server import worker as worker_module
from qarl_trl.rollout.server.facts import RANDOM
from qarl_trl.rollout.server.files import save_parts
from qarl_trl.rollout.server.worker import WorkerExtension
from qarl_trl.rollout.vllm import adapters, reloading


class Extended(Worker, WorkerExtension):
    """vLLM's worker with our methods, without device and model."""

    def __init__(self, sync_folder):
        # Any module: a version is an attribute of it.
        model = torch.nn.Linear(1, 1)
        self.model_runner = SimpleNamespace(get_model=lambda: model, reset_lora_state=lambda: None)
        self.vllm_config = SimpleNamespace(
            additional_config={"sync_folder": str(sync_folder)},
            model_config=SimpleNamespace(enforce_eager=True),
        )
        self._weight_update_active = False
        self._weight_update_is_draft = False


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """A worker with a sync in `run-1`. Its reload notes the model's version in `seen`, and fails if `fails` is set."""
    worker = Extended(tmp_path)
    worker.seen = []
    worker.fails = False

    def reload(model, weights, run, has_graphs):
        worker.seen.append(model.qarl_version)
        if worker.fails:
            # As `reload_model` says that a tensor is missing: some of the weights are then new.
            raise RuntimeError("The engine kept old values")

    monkeypatch.setattr(reloading, "reload_model", reload)

    (tmp_path / "run-1").mkdir()
    save_parts([("a", torch.arange(8))], tmp_path / "run-1")
    return worker


def test_weights_have_a_version_only_after_a_whole_sync(worker):
    model = worker.model_runner.get_model()

    assert worker.qarl("qarl_load", "run-1", 1) is None
    assert model.qarl_version == "run-1"
    assert worker.seen == [None]


def test_an_incomplete_folder_leaves_weights_and_version_and_the_next_sync_goes_on(worker):
    model = worker.model_runner.get_model()
    worker.qarl("qarl_load", "run-1", 1)

    # It has one file, not two.
    assert "cannot read" in worker.qarl("qarl_load", "run-1", 2)["error"]
    assert model.qarl_version == "run-1"
    assert worker.seen == [None]

    assert worker.qarl("qarl_load", "run-1", 1) is None
    assert worker.seen == [None, None]


def test_an_adapter_alone_needs_the_base_of_its_own_run(worker, tmp_path, monkeypatch):
    loaded = []
    monkeypatch.setattr(adapters, "load_adapter", lambda model, add, folder: loaded.append(folder.name))
    model = worker.model_runner.get_model()
    # A folder without files of a base.
    for folder in ("run-2", "other-1"):
        (tmp_path / folder).mkdir()

    # Random weights are nobody's base.
    assert "the server holds 'random'" in worker.qarl("qarl_load", "run-2", 0, True)["error"]
    assert worker.qarl("qarl_load", "run-1", 1, True) is None
    assert "a base of run other, but the server holds 'run-1'" in worker.qarl("qarl_load", "other-1", 0, True)["error"]
    assert model.qarl_version == "run-1"

    # Control: of its own run. The base is not loaded again.
    assert worker.qarl("qarl_load", "run-2", 0, True) is None
    assert model.qarl_version == "run-2"
    assert loaded == ["run-1", "run-2"]
    assert worker.seen == [None]


def test_weights_are_random_until_a_sync_and_unknown_after_a_failed_one(worker, monkeypatch):
    monkeypatch.setattr(worker_module, "engine_facts", lambda *_: {})
    worker.vllm_config.model_config.hf_config = SimpleNamespace(to_dict=dict)
    worker.vllm_config.cache_config = SimpleNamespace(cache_dtype="auto")
    assert worker.qarl("qarl_state")["version"] == RANDOM

    worker.qarl("qarl_load", "run-1", 1)
    assert worker.qarl("qarl_state")["version"] == "run-1"

    worker.fails = True
    worker.qarl("qarl_load", "run-1", 1)
    assert worker.qarl("qarl_state")["version"] is None


def test_after_a_failed_reload_no_sync_is_taken(worker):
    """What fails amid the reload may have left a mix."""
    model = worker.model_runner.get_model()
    worker.qarl("qarl_load", "run-1", 1)

    worker.fails = True
    assert "kept old" in worker.qarl("qarl_load", "run-1", 1)["error"]
    assert model.qarl_version is None

    # Also one that would succeed, and it does not even begin.
    worker.fails = False
    assert "start it again" in worker.qarl("qarl_load", "run-1", 1)["error"]
    assert model.qarl_version is None
    assert worker.seen == [None, None]
