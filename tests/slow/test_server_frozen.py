"""A frozen base on `qarl-trl serve`: the server keeps the base, and each later sync is the adapter's bytes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slow.isolated import isolated
from slow.servers import make_place, outcome, over_there, start, wait_for
from slow.toys import logged, make_trainer, random_adapter, randomize_adapter, trained_parameters


pytestmark = [pytest.mark.slow, pytest.mark.alone]
FROZEN = {"lora_base": "frozen"}
# The adapter of `random_adapter`, as a recipe has it.
ADAPTER = (
    *("--lora_base", "frozen", "--use_peft", "true", "--lora_r", "8", "--lora_alpha", "32", "--lora_dropout", "0"),
    *("--lora_target_modules", "q_proj", "v_proj", "o_proj", "up_proj", "down_proj"),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[dict[str, Any]]:
    """A server that answers, and what a run with an engine of its own finds, which is made while the server starts."""
    place = make_place(tmp_path_factory.mktemp("server_frozen"))
    with start(place, *ADAPTER) as process:
        colocated = isolated(_train, place, False)
        wait_for(process, place)
        yield place | {"pid": process.pid, "colocated": colocated}


def _train(place: dict[str, Any], server: bool) -> dict[str, Any]:
    """A short run: its log, what its syncs sent, and log-probs of a prompt after the first and the last sync."""
    from qarl_trl.rollout.sync_check.engine_logps import engine_logps

    changes: dict[str, Any] = {"verify_sync": 1, "steps_per_generation": 1, "max_steps": 2}
    if server:
        changes |= over_there(place)
    trainer = make_trainer(
        place["model"], Path(place["folder"], f"run-{server}"), random_adapter(), **FROZEN | changes
    )
    randomize_adapter(trainer.model)

    engine = trainer.vllm_generation
    logps = engine.prompt_logps if server else partial(engine_logps, engine.llm)
    tokens = engine.sync_check.token_ids
    engine.sync_weights()
    first_bytes = engine.synced_bytes
    first = logps(tokens)
    trainer.train()

    trained = sum(param.numel() for param in trained_parameters(trainer.model).values())
    return {
        "logp_diffs": logged(trainer, "mismatch/logp_diff_mean"),
        "bytes": [first_bytes, engine.synced_bytes],
        "adapter": 2 * trained,  # in bfloat16
        "first": first.tolist(),
        "last": logps(tokens).tolist(),
        "without": _without_adapter(engine) if server else None,
        "left": [str(path) for path in Path(place["folder"], "syncs").glob("*")],
    }


def _without_adapter(engine: Any) -> list[float]:
    """What the server answers when a request names its base."""
    client = engine.vllm_client
    adapter = client.model
    # vLLM lists its base first, then its adapters.
    client.model = client._get(f"{client.base_url}/v1/models")["data"][0]["id"]
    logps = client.prompt_logps(engine.sync_check.token_ids)
    client.model = adapter
    return logps


def test_a_run_through_a_server_is_the_colocated_one(server):
    colocated = server["colocated"]

    remote = isolated(_train, server, True)

    # All bits of 62 log-probs, and every sampled token of the run.
    assert remote["first"] == colocated["first"]
    assert max(remote["logp_diffs"]) < 1e-6
    assert len(remote["logp_diffs"]) == 2
    # The base once, and then the adapter alone.
    assert remote["bytes"] == colocated["bytes"]
    assert remote["bytes"][1] == remote["adapter"] < remote["bytes"][0] / 4
    # Control: the adapter takes part, and was trained.
    assert remote["first"] != remote["last"] != remote["without"]
    assert remote["left"] == []


def _run_of_another_base(place: dict[str, Any]) -> dict[str, str]:
    """A trainer that takes it that the server has its base, beside a server that has that of another run."""
    trainer = make_trainer(place["model"], Path(place["folder"], "x"), random_adapter(), **FROZEN | over_there(place))
    engine = trainer.vllm_generation
    # As after a first sync, which alone has the base.
    engine.num_syncs = 1
    alone = outcome(engine.sync_weights)

    engine._failed = None
    engine.num_syncs = 0
    return {"alone": alone, "with its base": outcome(engine.sync_weights)}


def test_an_adapter_is_refused_for_a_base_of_another_run(server):
    messages = isolated(_run_of_another_base, server)

    assert "an adapter came for a base of run" in messages["alone"]
    # Control: the refusal changed nothing.
    assert messages["with its base"] == "no error"


def _other_adapters(place: dict[str, Any]) -> dict[str, str]:
    """What trainers with other adapters than the server's say at their start."""
    adapters = {"rank": random_adapter(r=16), "layers": random_adapter(target_modules=["q_proj"])}
    messages = {}
    for name, adapter in adapters.items():
        start_frozen = partial(make_trainer, **FROZEN | over_there(place))
        messages[name] = outcome(start_frozen, place["model"], Path(place["folder"], "x"), adapter)
    # The same adapter as the server's, whose base the trainer would not freeze.
    start_merged = partial(make_trainer, **over_there(place))
    messages["merged"] = outcome(start_merged, place["model"], Path(place["folder"], "x"), random_adapter())
    return messages


def test_a_server_for_another_adapter_is_refused_before_training(server):
    messages = isolated(_other_adapters, server)

    for name, message in messages.items():
        assert "is not the engine of this run" in message, name
    assert "adapter.max_lora_rank must be 16, got 8" in messages["rank"]
    assert "adapter.lora_target_modules must be ['q_proj']" in messages["layers"]
