"""A trainer beside `qarl-trl serve`: vLLM's real server on loopback, with a key and a shared folder."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from qarl_trl.processes import ProcessDied
from slow.isolated import isolated, isolated_group
from slow.servers import (
    KEY,
    address,
    amid_a_sync,
    answers,
    command_of,
    kill_amid_a_generation,
    make_place,
    outcome,
    over_there,
    serving,
    start,
    status,
    trainer_of,
    wait_for,
)
from slow.servers import free_port as free_port  # for benchmarks/faults.py
from slow.toys import copies, logged, make_trainer, random_adapter, randomize_adapter, save_model


pytestmark = [pytest.mark.slow, pytest.mark.alone]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> dict[str, Any]:
    return make_place(tmp_path_factory.mktemp("server"))


@pytest.fixture(scope="module")
def server(place) -> Iterator[dict[str, Any]]:
    """A server that answers, and what a run with an engine of its own finds, which is made while the server starts."""
    with start(place) as process:
        colocated = isolated(_train, place, False)
        wait_for(process, place)
        yield place | {"pid": process.pid, "colocated": colocated}


# Refusals ------------------------------------------------------------------------------------------------------------


def _start_all(place: dict[str, Any], runs: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, str]:
    """What each of several runs says at its start, by its key and its changed settings."""
    messages = {}
    for name, (key, changes) in runs.items():
        arguments = {"model": place["model"]} | over_there(place, key, **changes)
        messages[name] = outcome(_start_one, Path(place["folder"], "x"), arguments)
    return messages


def _start_one(folder: Path, arguments: dict[str, Any]) -> None:
    make_trainer(folder=folder, **arguments)


def test_a_server_of_another_run_or_without_the_key_is_refused_before_training(server):
    other = save_model(Path(server["folder"], "other"), family="Qwen2")
    runs = {
        "scheme": (KEY, {"quant_scheme": "W8A8"}),
        "model": (KEY, {"model": other}),
        "key": ("wrong", {}),
        "control": (KEY, {}),
    }

    messages = isolated(_start_all, server, runs)

    assert "ValueError" in messages["scheme"]
    assert "is not the engine of this run" in messages["scheme"]
    assert "input_activations.num_bits must be 8, got None" in messages["scheme"]
    assert "is not the engine of this run: config." in messages["model"]
    assert "PermissionError" in messages["key"]
    assert messages["control"] == "no error"


def test_nobody_but_a_trainer_gets_in(server):
    """What the middleware refuses is in tests/rollout/server/test_guard.py; this is vLLM's own server behind it."""
    url = address(server)
    get_model = '{"method": "get_model"}'

    assert answers(f"{url}/health") == 200
    for page in ("v1/models", "weight_info", "server_info", "metrics"):
        assert answers(f"{url}/{page}") == 401, page
    assert status(server, "POST", "/qarl_state", "[]") == 200
    assert status(server, "POST", "/qarl_state", "[]", Origin="http://evil.example") == 403
    assert status(server, "POST", "/collective_rpc", get_model) == 404
    assert status(server, "POST", "/sleep", "{}") == 404


# Runs ----------------------------------------------------------------------------------------------------------------


def _train(place: dict[str, Any], server: bool, adapted: bool = False) -> dict[str, Any]:
    """A short run: its log, the size of the last sync, and log-probs of a prompt after the first and the last sync."""
    # A rollout, and so a sync and a check of it, before each of two steps.
    changes: dict[str, Any] = {"verify_sync": 1, "steps_per_generation": 1, "max_steps": 2}
    if server:
        changes |= over_there(place)
    adapter = random_adapter() if adapted else None
    trainer = make_trainer(place["model"], Path(place["folder"], f"run-{server}"), adapter, **changes)
    randomize_adapter(trainer.model)

    engine = trainer.vllm_generation
    tokens = engine.sync_check.token_ids
    # What the engine answered with random weights; `None` beside a server that an earlier run synced to.
    random = engine.sync_check.before
    engine.sync_weights()
    first = engine.prompt_logps(tokens)
    trainer.train()

    every_weight, embeddings = _bytes_in_bfloat16(trainer.model)
    return {
        "logp_diffs": logged(trainer, "mismatch/logp_diff_mean"),
        "bytes": engine.synced_bytes,
        "syncs": engine.num_syncs,
        "names": [name for name, _ in engine._iter_named_params()],
        "bf16": every_weight,
        "embeddings": embeddings,
        "random": None if random is None else random.tolist(),
        "first": first.tolist(),
        "last": engine.prompt_logps(tokens).tolist(),
        "left": [str(path) for path in Path(place["folder"], "syncs").glob("*")],
    }


def _bytes_in_bfloat16(model: torch.nn.Module) -> tuple[int, int]:
    """The bytes of all parameters, and those of embeddings and output layer, which stay in high precision."""
    every_weight = 0
    embeddings = 0
    for name, parameter in model.named_parameters():
        every_weight += 2 * parameter.numel()
        if "embed" in name or "lm_head" in name:
            embeddings += 2 * parameter.numel()
    return every_weight, embeddings


def _train_twice(place: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return _train(place, True), _train(place, True, adapted=True)


def test_a_run_through_a_server_is_the_colocated_one(server):
    colocated = server["colocated"]

    remote, adapted = isolated(_train_twice, server)

    assert remote["syncs"] >= 3
    # All bits of 62 log-probs of the same weights.
    assert remote["first"] == colocated["first"]
    # Control: they are of the weights.
    assert remote["random"] != remote["first"] != remote["last"]
    # As in tests/slow/test_mismatch.py.
    assert max(remote["logp_diffs"]) < 1e-6
    assert max(colocated["logp_diffs"]) < 1e-6

    # 4.1 bits a weight: quantized values, and a scale of 16 bits for 128 of them.
    low_bit = (remote["bytes"] - remote["embeddings"]) / (remote["bf16"] - remote["embeddings"])
    assert remote["bytes"] == colocated["bytes"]
    assert 0.25 < low_bit < 0.28

    # LoRA: the merged weights, in the same tensors.
    assert len(adapted["logp_diffs"]) == 2
    assert max(adapted["logp_diffs"]) < 1e-6
    assert adapted["names"] == remote["names"]
    assert adapted["bytes"] == remote["bytes"]
    # Control: the adapter takes part, and was trained.
    assert remote["first"] != adapted["first"] != adapted["last"]

    assert remote["left"] == adapted["left"] == []


def _train_others(place: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """RLOO and a distillation: the checks of their syncs, and the engine's answers after the first and the last."""
    from slow.test_other_trainers import make_other_trainer

    runs = {}
    for kind in ("rloo", "distillation"):
        trainer = make_other_trainer(
            kind, place["model"], Path(place["folder"], kind), **over_there(place, verify_sync=1)
        )
        engine = trainer.vllm_generation
        tokens = engine.sync_check.token_ids
        engine.sync_weights()
        first = engine.prompt_logps(tokens)
        trainer.train()

        runs[kind] = {
            "losses": logged(trainer, "loss"),
            "sync_checks": logged(trainer, "sync/verify_logp_diff"),
            "moved": (engine.prompt_logps(tokens) - first).abs().max().item(),
        }
    return runs


def test_rloo_and_distillation_train_through_the_server(server):
    runs = isolated(_train_others, server)

    for kind, run in runs.items():
        assert len(run["losses"]) >= 2, kind
        # As in tests/slow/test_mismatch.py: the server's log-probs of the learner's own weights.
        assert max(run["sync_checks"]) < 1e-5, kind
        # Control: the weights moved, so that a sync of old ones would be seen.
        assert run["moved"] > 1e-4, kind


def _train_beside_another(place: dict[str, Any]) -> dict[str, Any]:
    """One of two trainer processes: two refused starts, a run, and a generation that the main process stops."""
    from slow.kills import digests

    absent = {"vllm_server_base_url": "http://127.0.0.1:9", "vllm_server_timeout": 0.0, "ddp_backend": "gloo"}
    refused = _start_all(place, {"absent": (KEY, absent), "key": ("wrong", {"ddp_backend": "gloo"})})

    changes = {"verify_sync": 1, "ddp_backend": "gloo", "steps_per_generation": 1, "max_steps": 2}
    trainer = trainer_of(place, "pair", **changes)
    trainer.train()
    logp_diffs = logged(trainer, "mismatch/logp_diff_max")
    master_weights = digests(trainer)

    # Only the main process asks the server for its version, and the other must hear what it was told.
    engine = trainer.vllm_generation
    if trainer.accelerator.is_main_process:
        engine.vllm_client.version = "another"
    prompt = [2, 3, 4 + trainer.accelerator.process_index]
    return refused | {
        "processes": trainer.accelerator.num_processes,
        "logp_diffs": logp_diffs,
        "master_weights": master_weights,
        "stopped": outcome(engine.generate, [prompt] * 4, None, 4),
    }


def test_two_trainers_share_a_server(server):
    first, second = isolated_group(_train_beside_another, 2, server)

    assert first["processes"] == second["processes"] == 2
    # Of all processes: each has the completions of its prompts.
    assert len(first["logp_diffs"]) >= 2
    assert max(first["logp_diffs"]) < 1e-5
    assert first["master_weights"] == second["master_weights"]
    assert "must hold version 'another'" in first["stopped"]

    # Refusals come to all processes at the same time, as errors that are one line at the start.
    words = {"absent": "No vLLM server answers", "key": "wants another key", "stopped": "'another'"}
    for name, reason in words.items():
        assert reason in first[name]
        assert reason in second[name]
        assert second[name].startswith("OSError: The first process failed, and says why: ")


# Old weights, other weights ------------------------------------------------------------------------------------------


def _train_on_stale_weights(place: dict[str, Any]) -> str:
    """Send the weights of the first sync at every later one, too."""
    from qarl_trl.rollout.server.client import ServerClient

    trainer = trainer_of(place, verify_sync=1, learning_rate=1e-2)
    send = ServerClient.sync
    first: dict[str, torch.Tensor] = {}

    def send_the_first(client: Any, stream: Any) -> None:
        # The stream is read in any case, as a sync reads it.
        tensors = copies(stream)
        if not first:
            first.update(tensors)
        send(client, first.items())

    ServerClient.sync = send_the_first
    return outcome(trainer.train)


def test_old_weights_under_a_new_version_are_caught_by_the_sync_check(server):
    message = isolated(_train_on_stale_weights, server)

    assert "After sync 2 the engine's log-probs" in message
    assert "The engine is stale" in message


def _sync_by_another_path(place: dict[str, Any]) -> dict[str, Any]:
    """The trainer has another path to the folder than the server; the sync check's prompt of weights A, B and A."""
    mounted = Path(place["folder"], "mounted")
    # The server is told the name of a sync alone, and looks for it in its own folder.
    mounted.symlink_to(Path(place["folder"], "syncs"))
    trainer = trainer_of(place, verify_sync="off", sync_folder=str(mounted))
    engine = trainer.vllm_generation
    # Not quantized, and the whole answer follows it.
    head = trainer.model.lm_head.weight
    original = head.detach().clone()

    results: dict[str, Any] = {}
    for name, weight in (("original", original), ("other", torch.randn_like(original)), ("again", original)):
        with torch.no_grad():
            head.copy_(weight)
        engine.sync_weights()
        results[name] = engine.vllm_client.prompt_logps([2, 3, 4, 5])

    # The engine has room for 64 tokens, and a completion for 24.
    for name, tokens in (("fits", 64 - 24), ("long", 64 - 23)):
        results[name] = outcome(engine.generate, [[2] * tokens] * 4, None, 4)
    return results


def test_the_folder_may_have_another_path_and_a_long_prompt_is_refused(server):
    results = isolated(_sync_by_another_path, server)

    assert results["original"] == results["again"] != results["other"]
    assert results["fits"] == "no error"
    assert "refused /v1/completions (400)" in results["long"]
    assert "64" in results["long"]


# Deaths --------------------------------------------------------------------------------------------------------------


def _die_amid_a_sync(place: dict[str, Any]) -> None:
    trainer = trainer_of(place, verify_sync="off")
    amid_a_sync(lambda last: os.kill(os.getpid(), signal.SIGKILL))
    trainer.vllm_generation.sync_weights()


class _Faults:
    """A trainer beside a server, and what it says after each fault; the faults come one after the other."""

    def __init__(self, place: dict[str, Any]) -> None:
        self.place = place
        self.engine = trainer_of(place, verify_sync="off").vllm_generation
        self.results: dict[str, str] = {}

    def sample(self, number: int = 4) -> str:
        # Each fault by itself.
        self.engine._failed = None
        return outcome(self._sample, number)

    def _sample(self, number: int) -> None:
        _, completions, *_ = self.engine.generate([[2, 3, 4]] * number, None, 4)
        assert len(completions) == number

    def sync(self) -> str:
        self.engine._failed = None
        return outcome(self.engine.sync_weights)

    def before_and_after_a_sync(self) -> None:
        version = self.engine.vllm_client.ask_workers("qarl_state")[0]["version"]
        self.results["left"] = version
        self.results["unsynced"] = self.sample()
        self.results["sync"] = self.sync()
        self.results["ok"] = self.sample()

    def lose_a_sync(self) -> None:
        """A weight sync that never gets there."""
        from qarl_trl.rollout.server.client import ServerClient

        ask_workers = ServerClient.ask_workers

        def ask_all_but_load(client: Any, method: str, *args: Any) -> list[Any]:
            return [] if method == "qarl_load" else ask_workers(client, method, *args)

        ServerClient.ask_workers = ask_all_but_load
        self.results["lost"] = self.sync()
        # The trainer has a new version, the server the old weights.
        self.results["after"] = self.sample()
        ServerClient.ask_workers = ask_workers
        self.sync()

    def kill_the_server(self) -> None:
        kill_amid_a_generation(self.place)
        # So many that it is still at them.
        self.results["killed"] = self.sample(1600)
        self.results["dead"] = self.sample()

    def sync_to_the_next_server(self) -> None:
        self.results["restarted"] = self.sample()
        self.results["resync"] = self.sync()
        self.results["healthy"] = self.sample()

    def sync_in_part(self) -> None:
        stream = self.engine._iter_named_params

        def all_but_one() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in stream():
                if "layers.1.mlp.down_proj.weight_scale" not in name:
                    yield name, tensor

        self.engine._iter_named_params = all_but_one
        self.results["partial"] = self.sync()
        self.results["mixed"] = self.sample()

        self.engine._iter_named_params = stream
        # vLLM's reload would go on with what that one had buffered.
        self.results["spoilt"] = self.sync()


def _run_faults(place: dict[str, Any]) -> dict[str, str]:
    faults = _Faults(place)
    faults.before_and_after_a_sync()
    faults.lose_a_sync()

    # Of vLLM's own server, without the way there.
    command, environment = command_of(place["pid"])
    faults.kill_the_server()
    with serving(place, command, environment) as restarted:
        wait_for(restarted, place)
        faults.sync_to_the_next_server()
        faults.sync_in_part()
    return faults.results


def test_no_answer_of_other_weights_is_trained_on(server):
    """The last test of this server."""
    with pytest.raises(ProcessDied, match="SIGKILL"):
        isolated(_die_amid_a_sync, server)
    (left,) = Path(server["folder"], "syncs").iterdir()

    results = isolated(_run_faults, server)
    # Only now has the server read it.
    shutil.rmtree(left)

    # The server read on after the death of the trainer.
    assert results["left"] == left.name
    assert "must hold version None" in results["unsynced"]
    for name in ("sync", "ok", "lost", "resync", "healthy"):
        assert results[name] == "no error", name
    assert "-2' of the weights, got '" in results["after"]
    assert "-1': it was started again" in results["after"]
    assert "ConnectionError" in results["killed"]
    assert "died or hung up during /v1/completions" in results["killed"]
    assert "ConnectionError" in results["dead"]
    assert "died or hung up during /qarl_state" in results["dead"]
    assert "got 'random': it was started again" in results["restarted"]
    assert "kept old values for 1 tensors, first ['model.layers.1.mlp.down_proj.weight_scale']" in results["partial"]
    assert "must hold version None of the weights, got None" in results["mixed"]
    assert "an earlier sync to this server failed" in results["spoilt"]
