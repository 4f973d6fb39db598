"""Faults of a real engine, and of one process of two: the run stops everywhere, and nothing is sampled from what failed."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from trl import GRPOTrainer

from slow.isolated import isolated, isolated_group
from slow.toys import distinct_characters, engine_logprobs, make_trainer, prompts, save_model, settings


pytestmark = [pytest.mark.slow, pytest.mark.alone]


def _error(function: Callable[[], Any]) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "passed"


def _last(trainer: Any, name: str) -> float:
    return [row[name] for row in trainer.state.log_history if name in row][-1]


def _raising(call: Callable, number: int, error: BaseException) -> Callable:
    """`call`, which raises the `number`-th time."""
    calls = iter(range(1, 10**9))

    def raising(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            raise error
        return call(*args, **kwargs)

    return raising


def _without_tokens(outputs: list[Any]) -> list[Any]:
    outputs[0].outputs[0].token_ids, outputs[0].outputs[0].logprobs = [], []
    return outputs


def _engine_faults(model: str, folder: str) -> dict[str, Any]:
    from qarl_trl import trainer as module
    from qarl_trl.rollout import _vllm

    trainer = make_trainer(model, Path(folder), steps_per_generation=1, max_steps=1)
    engine, found = trainer.vllm_generation, {}
    llm, generate = engine.llm, functools.partial(engine.generate, images=None, num_generations=1)

    # A second call of train.
    trainer.train()
    trainer.train()
    found["mismatch in a second train"] = _last(trainer, "mismatch/logp_diff_mean")
    GRPOTrainer.train(trainer)
    found["the same by TRL"] = _last(trainer, "mismatch/logp_diff_mean")

    # NaN in the engine.
    sync = engine.sync_weights

    def sync_nan() -> None:
        sync()
        _vllm.engine_model(llm).model.norm.weight.data.fill_(math.nan)

    with patch.object(engine, "sync_weights", sync_nan):
        found["NaN in the engine"] = _error(trainer.train)
        with patch.object(module, "check_mismatch", lambda *_: None):
            trainer.train()
            found["mismatch that was logged"] = _last(trainer, "mismatch/logp_diff_mean")

    # A prompt that is too long, then an engine that raises in the middle.
    found["long prompt"] = _error(lambda: generate(prompts=[[2] * 100]))
    engine._failed = None
    with patch.object(llm.llm_engine, "step", _raising(llm.llm_engine.step, 3, ValueError("no memory"))):
        found["generation"] = _error(trainer.train)
    found["after it"] = _error(trainer.train)
    engine._failed = None
    found["completions of one prompt"] = _error(lambda: generate(prompts=[[2, 3]]))
    engine._failed = None

    # An engine that returns nothing, and one that returns completions without a token.
    for name, lose in (("none", lambda outputs: []), ("empty", _without_tokens)):
        with patch.object(llm, "generate", lambda *a, lose=lose, call=llm.generate, **k: lose(call(*a, **k))):
            found[f"{name} returned"] = _error(trainer.train)
        engine._failed = None

    # A weight sync that ends in the middle of a layer.
    sync()
    before, stream = engine_logprobs(llm), engine._iter_named_params

    def half() -> Any:
        for name, tensor in stream():
            if name.endswith("1.mlp.gate_proj.weight_scale"):
                raise ValueError("no such layer")
            yield name, tensor

    with patch.object(engine, "_iter_named_params", half):
        found["sync"] = _error(sync)
    found["after that"] = [_error(call) for call in (trainer.train, sync, lambda: generate(prompts=[[2, 3]]))]
    engine._failed = None
    found["a weight sync heals"] = _error(sync) == "passed" and engine_logprobs(llm) == before
    engine._failed = None
    with patch.object(_vllm, "reset_prefix_cache", _raising(None, 1, KeyboardInterrupt())):
        with pytest.raises(KeyboardInterrupt):
            sync()
        found["after Ctrl-C"] = _error(sync)
    return found


def test_nothing_is_sampled_from_an_engine_in_which_something_failed(tmp_path):
    found = isolated(_engine_faults, save_model(tmp_path / "model"), str(tmp_path / "run"))
    print(found)
    assert found["mismatch in a second train"] < 1e-6 < 1e-3 < found["the same by TRL"]  # control
    assert "the engine gave NaN to 100% of the tokens" in found["NaN in the engine"]
    assert found["mismatch that was logged"] == 0  # control: NaN looks like an engine without any mismatch
    assert "maximum context length is 64 tokens" in found["long prompt"]
    assert found["generation"] == "ValueError: no memory"
    assert "A generation of this engine failed earlier" in found["after it"]
    # Control: without the refusal those of the failed batch come back.
    assert "The engine returned 9 completions for 1 prompts" in found["completions of one prompt"]
    assert "The engine returned 0 completions for 8 prompts" in found["none returned"]
    assert "The engine returned 8 completions for 8 prompts, 1 of them empty" in found["empty returned"]
    assert found["sync"] == "ValueError: no such layer"
    assert all("A sync of this engine failed earlier" in message for message in found["after that"])
    assert not found["a weight sync heals"]  # control
    assert "A sync of this engine failed earlier" in found["after Ctrl-C"]


def _without_engine(model: str, folder: str, reward: Callable, **changes: Any) -> Any:
    from learner.test_features import rollout

    from qarl_trl import QaRLConfig, QaRLTrainer

    small = {"use_vllm": False, "bf16": False, "max_completion_length": 20, "per_device_train_batch_size": 4}
    config = QaRLConfig(**settings(Path(folder), **small | changes))
    trajectories = functools.partial(rollout, tools=False, ends=True)
    return QaRLTrainer(model, reward, config, train_dataset=prompts(), rollout_func=trajectories)


def _one_of_two(model: str, folder: str) -> dict[str, Any]:
    """The second process has a fault; what each says, and after how many seconds."""
    torch.set_num_threads(1)
    found, second = {}, False

    def run(name: str, trainer: Any) -> None:
        start = time.monotonic()
        found[name] = (_error(trainer.train), time.monotonic() - start)

    def faulty(kind: str) -> Callable:
        def reward(completions: list[str], **_: Any) -> list[float]:
            rewards = distinct_characters(completions)
            if second and kind == "raises":
                raise KeyError("no such answer")
            return [math.inf, *rewards[1:]] if second and kind == "infinite" else rewards

        return reward

    for kind in ("raises", "infinite"):
        trainer = _without_engine(model, folder, faulty(kind))
        second = trainer.accelerator.process_index == 1
        run(f"a reward {kind}", trainer)
    trainer = _without_engine(model, folder, distinct_characters)
    if second:
        call, (trajectories,) = trainer.rollout_func.func, trainer.rollout_func.args
        trainer.rollout_func = functools.partial(call, _raising(trajectories, 1, KeyError("no such tool")))
    run("a rollout_func raises", trainer)
    trainer = _without_engine(model, folder, distinct_characters)
    if second:
        trainer.model.model.norm.weight.register_hook(lambda g: g * math.nan)
    run("a gradient is NaN", trainer)
    trainer = make_trainer(model, Path(folder))
    llm = trainer.vllm_generation.llm
    trainer.vllm_generation.sync_weights()
    generate = functools.partial(trainer.vllm_generation.generate, images=None, num_generations=1)
    generate([[2, 3]])
    with patch.object(GRPOTrainer, "_tool_call_loop", lambda self, prompts: generate(prompts)):
        if second:  # a tool call in one process alone
            trainer._tool_call_loop([[2, 3]])
    ranks = torch.tensor([trainer.accelerator.process_index])
    found["after a tool call"] = trainer.accelerator.gather(ranks).tolist()
    if second:
        llm.llm_engine.step = _raising(llm.llm_engine.step, 3, ValueError("no memory"))
    run("a generation raises", trainer)
    # Of this nobody tells the others: they see that the process has ended, so it comes last.
    trainer = _without_engine(model, folder, distinct_characters)
    if second:
        out_of_memory = _raising(lambda g: g, 3, torch.OutOfMemoryError("out of memory"))
        trainer.model.model.norm.weight.register_hook(out_of_memory)
    run("a backward raises", trainer)
    return found


def test_what_fails_in_one_process_stops_both_at_once(tmp_path):
    model = save_model(tmp_path / "model", layers=1)
    first, second = isolated_group(_one_of_two, 2, model, str(tmp_path / "run"), timeout=280)
    print(first, second)
    assert first.pop("after a tool call") == second.pop("after a tool call") == [0, 1]
    expected = {
        "a reward raises": ("The rewards failed in process 1, which says why", "KeyError: 'no such answer'"),
        "a reward infinite": ("'reward' gave an infinite reward",) * 2,
        "a rollout_func raises": ("The rollout_func failed in process 1, which says why", "KeyError: 'no such tool'"),
        "a gradient is NaN": ("The gradient norm is nan",) * 2,
        "a generation raises": ("The generation failed in process ", "ValueError: no memory"),
        # gloo: the connection was closed or reset
        "a backward raises": ("by peer", "OutOfMemoryError: out of memory"),
    }
    for name, words in expected.items():
        for rank, (message, seconds) in enumerate((first[name], second[name])):
            assert words[rank] in message, name
            assert seconds < 120, name  # torch.distributed would wait for half an hour
