"""Several ranks of a server, and a learner in shards: each rank gets the weights, and says what it did not get."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from slow.isolated import isolated, isolated_group
from slow.processes import FLOOR, as_tensors, trainer_of_two, whole_arrays
from slow.servers import amid_a_sync, make_place, outcome, over_there, rank_of, start, trainer_of, wait_for
from slow.toys import logged


pytestmark = [pytest.mark.slow, pytest.mark.alone]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> Iterator[dict[str, Any]]:
    place = make_place(tmp_path_factory.mktemp("ranks"))
    with start(place, "--vllm_tensor_parallel_size", "2") as process:
        wait_for(process, place)
        yield place | {"pid": process.pid}


@contextmanager
def keeping_syncs(folder: Path) -> Iterator[None]:
    """Copy what the server reads, sync by sync."""
    from qarl_trl.rollout.server.client import ServerClient

    ask_workers = ServerClient.ask_workers

    def keep_and_ask(client: Any, method: str, *args: Any) -> list[Any]:
        if method == "qarl_load":
            version = args[0]
            number = version.rpartition("-")[2]
            shutil.copytree(Path(client.sync_folder, version), folder / number)
        return ask_workers(client, method, *args)

    with patch.object(ServerClient, "ask_workers", keep_and_ask):
        yield


def _train_in_shards(place: dict[str, Any]) -> dict[str, Any]:
    """One of two FSDP2 processes: a run, a sync that one rank of the server cannot read, and one that is cut short."""
    # The server has two ranks, on which a run must agree with it; the learner has two shards.
    changes = {"verify_sync": 1, "steps_per_generation": 1, "max_steps": 2, "vllm_tensor_parallel_size": 2}
    trainer = trainer_of_two(place["model"], f"{place['folder']}/shards", True, **over_there(place, **changes))
    with keeping_syncs(Path(place["folder"], "kept")):
        trainer.train()
        # Before the sync: the forward of its check leaves FSDP2's root module gathered, in bfloat16.
        master_weights = whole_arrays(trainer)
        trainer.vllm_generation.sync_weights()
    logp_diffs = logged(trainer, "mismatch/logp_diff_mean")

    unread = _sync_that_one_rank_cannot_read(trainer, place)
    cut_short = _sync_that_is_cut_short(trainer)
    return {"logp_diffs": logp_diffs, "master_weights": master_weights, "unread": unread, "cut short": cut_short}


def _sync_that_one_rank_cannot_read(trainer: Any, place: dict[str, Any]) -> dict[str, Any]:
    if not trainer.accelerator.is_main_process:
        return _sync_and_sample(trainer)

    set_limit = partial(resource.prlimit, rank_of(place, "Worker_TP1"), resource.RLIMIT_NOFILE)
    before = set_limit()
    _, hard = before
    # It can open no file more: descriptors 0 to 2 are taken.
    set_limit((3, hard))
    return _sync_and_sample(trainer, lambda: set_limit(before))


def _sync_that_is_cut_short(trainer: Any) -> dict[str, Any]:
    if trainer.accelerator.is_main_process:
        amid_a_sync(lambda last: os.ftruncate(last, 1000))
    return _sync_and_sample(trainer)


def _sync_and_sample(trainer: Any, repair: Callable[[], Any] = lambda: None) -> dict[str, Any]:
    """What a process says of a sync that fails and of a generation after it, and what version each rank then holds."""
    engine = trainer.vllm_generation
    engine._failed = None
    of_sync = outcome(engine.sync_weights)
    repair()

    # As if nobody had seen that: the server itself must know.
    engine._failed = None
    versions = []
    if trainer.accelerator.is_main_process:
        client = engine.vllm_client
        client.version = f"{client._run}-{client._count}"
        versions = [state["version"] for state in client.ask_workers("qarl_state")]
    of_generation = outcome(engine.generate, [[2, 3, 4]] * 4, None, 4)
    return {"sync": of_sync, "generation": of_generation, "versions": versions}


def test_shards_of_a_learner_sync_to_two_ranks_of_a_server(two_ranks):
    first, second = isolated_group(_train_in_shards, 2, two_ranks, timeout=120)

    assert first["logp_diffs"] == second["logp_diffs"]
    assert len(first["logp_diffs"]) == 2
    # As beside a colocated engine of two ranks; measured 0.0069.
    assert max(first["logp_diffs"]) < FLOOR
    _check_syncs(two_ranks["model"], Path(two_ranks["folder"], "kept"), first["master_weights"])

    # One rank missed a weight sync, then both, each in its own answer.
    unread = first["unread"]
    assert "qarl_load failed in 1 of 2 ranks" in unread["sync"]
    assert "rank 1: ValueError: the server cannot read" in unread["sync"]
    assert f"must hold version '{unread['versions'][0]}' of the weights, got" in unread["generation"]
    cut_short = first["cut short"]
    assert "qarl_load failed in 2 of 2 ranks" in cut_short["sync"]
    assert "rank 0: ValueError: the server cannot read" in cut_short["sync"]
    assert "must hold version" in cut_short["generation"]

    # What cannot be read leaves the weights of the last sync under its version, and the next sync is taken.
    for fault in (unread, cut_short):
        rank_0, rank_1 = fault["versions"]
        assert rank_0.endswith("-4")
        assert rank_1.endswith("-3")

    for fault in (second["unread"], second["cut short"]):
        assert "The sync failed in process " in fault["sync"]
        assert "The first process failed, and says why" in fault["generation"]


def _check_syncs(model: str, kept: Path, master_weights: dict[str, np.ndarray]) -> None:
    """The first sync and the third must be those of one process, with untrained and with trained master weights."""
    from transformers import AutoModelForCausalLM

    from qarl_trl.quant import apply_quantization

    alone = apply_quantization(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), "W4A16")
    # The first sync comes before the first update; the third was asked for after the last one.
    first = _sync_of_one_process(alone, kept / "1")

    alone.load_state_dict(as_tensors(master_weights))
    third = _sync_of_one_process(alone, kept / "3")
    # Control: it was trained.
    assert not all(torch.equal(tensor, third[name]) for name, tensor in first.items())


def _sync_of_one_process(alone: torch.nn.Module, kept: Path) -> dict[str, torch.Tensor]:
    """The tensors of a sync, which must be those of the model `alone`."""
    from safetensors.torch import load_file

    from qarl_trl.quant import iter_low_bit_weights

    sent: dict[str, torch.Tensor] = {}
    for part in kept.iterdir():
        sent |= load_file(part)

    expected = dict(iter_low_bit_weights(alone))
    assert sent.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(sent[name], tensor), name
    return sent


def _sync_and_kill_the_engine(place: dict[str, Any]) -> list[str]:
    """What a trainer says of a sync in which the engine is killed, of a generation after it, and of a second one."""
    engine = trainer_of(place, verify_sync="off", vllm_tensor_parallel_size=2).vllm_generation
    # Before it dies: then nothing has its name.
    pid = rank_of(place)
    amid_a_sync(lambda last: os.kill(pid, signal.SIGKILL))

    of_sync = outcome(engine.sync_weights)
    of_generation = outcome(engine.generate, [[2, 3, 4]] * 4, None, 4)
    engine._failed = None
    return [of_sync, of_generation, outcome(engine.generate, [[2, 3, 4]] * 4, None, 4)]


def test_an_engine_killed_amid_a_sync_stops_its_server(two_ranks):
    """The last test of this server."""
    killed, after, again = isolated(_sync_and_kill_the_engine, two_ranks, timeout=90)

    assert "refused /qarl_load (500): RuntimeError: The engine of this server died" in killed
    assert "nothing may be sampled from it" in after
    # The server is on its way down, or gone.
    assert "RuntimeError" in again or "ConnectionError" in again
