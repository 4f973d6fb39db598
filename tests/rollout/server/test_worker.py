"""`qarl_trl.rollout.server.worker`: the workers' side of a sync. The real server is in tests/slow/test_server.py."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.worker.gpu_worker import Worker

from qarl_trl.rollout.server.files import save_parts
from qarl_trl.rollout.server.worker import WorkerExtension
from qarl_trl.rollout.vllm import reloading


class Extended(Worker, WorkerExtension):
    """vLLM's worker with our methods, without device and model."""

    def __init__(self, sync_folder):
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

    def reload(model, run, has_graphs):
        worker.seen.append(model.qarl_version)
        if worker.fails:
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
