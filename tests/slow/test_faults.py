"""Faults of a real engine, and of one process of two: all processes stop, and nothing is sampled from what failed."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from trl import GRPOTrainer

from slow.isolated import isolated, isolated_group
from slow.toys import distinct_characters, engine_logprobs, logged, make_trainer, prompts, save_model, settings


pytestmark = [pytest.mark.slow, pytest.mark.alone]


def _error(function: Callable[[], Any]) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "passed"


def _last_mismatch(trainer: Any) -> float:
    return logged(trainer, "mismatch/logp_diff_mean")[-1]


def _raising(call: Callable | None, number: int, error: BaseException) -> Callable:
    """`call`, which raises the `number`-th time."""
    calls = itertools.count(1)

    def raising(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            raise error
        return call(*args, **kwargs)

    return raising


def _generate(trainer: Any, *prompt_ids: list[int]) -> Any:
    return trainer.vllm_generation.generate(prompts=list(prompt_ids), images=None, num_generations=1)


# One engine ----------------------------------------------------------------------------------------------------------


def _engine_faults(model: str, folder: str) -> dict[str, Any]:
    """What a trainer says of each fault of its engine. The faults come one after the other, in the same engine."""
    # One update, so that a run is one sync, one rollout and one loss.
    trainer = make_trainer(model, Path(folder), steps_per_generation=1, max_steps=1)
    results: dict[str, Any] = {}
    results |= _second_train(trainer)
    results |= _nan_in_the_engine(trainer)
    results |= _failed_generations(trainer)
    results |= _lost_completions(trainer)
    results |= _failed_syncs(trainer)
    return results


def _accept_again(trainer: Any) -> None:
    """Forget what failed, so that the next fault is seen by itself."""
    trainer.vllm_generation._failed = None


def _second_train(trainer: Any) -> dict[str, float]:
    # TRL counts syncs by the step, which begins at 0 again: a second train of its own samples from the last weights.
    trainer.train()
    trainer.train()
    mismatch = _last_mismatch(trainer)

    GRPOTrainer.train(trainer)
    return {"mismatch in a second train": mismatch, "the same by TRL": _last_mismatch(trainer)}


def _nan_in_the_engine(trainer: Any) -> dict[str, Any]:
    from qarl_trl.rollout.vllm import reloading
    from qarl_trl.trainers import measured

    engine = trainer.vllm_generation
    sync = engine.sync_weights

    def sync_nan() -> None:
        sync()
        reloading.engine_model(engine.llm).model.norm.weight.data.fill_(math.nan)

    with patch.object(engine, "sync_weights", sync_nan):
        message = _error(trainer.train)
        # What would have been logged, had nobody looked for NaN.
        with patch.object(measured, "check_mismatch", lambda *_: None):
            trainer.train()
    return {"NaN in the engine": message, "mismatch that was logged": _last_mismatch(trainer)}


def _failed_generations(trainer: Any) -> dict[str, str]:
    """A prompt that is too long, then an engine that raises in the middle of a generation."""
    results = {"long prompt": _error(lambda: _generate(trainer, [2] * 100))}
    _accept_again(trainer)

    llm_engine = trainer.vllm_generation.llm.llm_engine
    with patch.object(llm_engine, "step", _raising(llm_engine.step, 3, ValueError("no memory"))):
        results["generation"] = _error(trainer.train)
    results["after it"] = _error(trainer.train)

    _accept_again(trainer)
    results["completions of one prompt"] = _error(lambda: _generate(trainer, [2, 3]))
    _accept_again(trainer)
    return results


def _lost_completions(trainer: Any) -> dict[str, str]:
    """An engine that returns nothing, and one that returns a completion without a token."""
    results = {}
    for name, lose in (("none", _without_outputs), ("empty", _without_tokens)):
        with patch.object(trainer.vllm_generation.llm, "generate", _losing(trainer, lose)):
            results[f"{name} returned"] = _error(trainer.train)
        _accept_again(trainer)
    return results


def _losing(trainer: Any, lose: Callable) -> Callable:
    generate = trainer.vllm_generation.llm.generate
    return lambda *args, **kwargs: lose(generate(*args, **kwargs))


def _without_outputs(outputs: list[Any]) -> list[Any]:
    return []


def _without_tokens(outputs: list[Any]) -> list[Any]:
    completion = outputs[0].outputs[0]
    completion.token_ids = []
    completion.logprobs = []
    return outputs


def _failed_syncs(trainer: Any) -> dict[str, Any]:
    """A weight sync that ends in the middle of a layer, and one that Ctrl-C ends."""
    from qarl_trl.rollout.vllm import reloading

    engine = trainer.vllm_generation
    engine.sync_weights()
    answers = engine_logprobs(engine.llm)
    # Read before the patch, for the patched stream calls it.
    stream = engine._iter_named_params

    def half() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in stream():
            if name.endswith("1.mlp.gate_proj.weight_scale"):
                raise ValueError("no such layer")
            yield name, tensor

    results: dict[str, Any] = {}
    with patch.object(engine, "_iter_named_params", half):
        results["sync"] = _error(engine.sync_weights)
    results["after that"] = [
        _error(trainer.train),
        _error(engine.sync_weights),
        _error(lambda: _generate(trainer, [2, 3])),
    ]

    _accept_again(trainer)
    # vLLM continues with what it had buffered of the layer, so a whole sync does not repair a half one.
    passed = _error(engine.sync_weights) == "passed"
    results["a weight sync heals"] = passed and engine_logprobs(engine.llm) == answers

    _accept_again(trainer)
    with patch.object(reloading, "reset_prefix_cache", _raising(None, 1, KeyboardInterrupt())):
        with pytest.raises(KeyboardInterrupt):
            engine.sync_weights()
        results["after Ctrl-C"] = _error(engine.sync_weights)
    return results


def test_nothing_is_sampled_from_an_engine_in_which_something_failed(tmp_path):
    results = isolated(_engine_faults, save_model(tmp_path / "model"), str(tmp_path / "run"))
    print(results)

    assert results["mismatch in a second train"] < 1e-6
    # Control: TRL's own train samples from the weights of the train before.
    assert results["the same by TRL"] > 1e-3

    assert "the engine gave NaN to 100% of the tokens" in results["NaN in the engine"]
    # Control: NaN looks like an engine without any mismatch.
    assert results["mismatch that was logged"] == 0

    assert "maximum context length is 64 tokens" in results["long prompt"]
    assert results["generation"] == "ValueError: no memory"
    assert "A generation of this engine failed earlier" in results["after it"]
    # Control: without the refusal those of the failed batch come back.
    assert "The engine returned 9 completions for 1 prompts" in results["completions of one prompt"]
    assert "The engine returned 0 completions for 8 prompts" in results["none returned"]
    assert "The engine returned 8 completions for 8 prompts, 1 of them empty" in results["empty returned"]

    assert results["sync"] == "ValueError: no such layer"
    # A run, another sync, a generation.
    for message in results["after that"]:
        assert "A sync of this engine failed earlier" in message
    # Control: the refusal is needed.
    assert not results["a weight sync heals"]
    assert "A sync of this engine failed earlier" in results["after Ctrl-C"]


# One process of two --------------------------------------------------------------------------------------------------


def _one_of_two(model: str, folder: str) -> dict[str, Any]:
    """The second process has a fault; what each says, and after how many seconds."""
    # Two processes on two cores.
    torch.set_num_threads(1)
    second = os.environ["RANK"] == "1"
    without_engine = partial(_without_engine, model, folder)

    results = {
        "a reward raises": _timed_error(without_engine(_reward_that_raises(second))),
        "a reward infinite": _timed_error(without_engine(_reward_that_is_infinite(second))),
        "a rollout_func raises": _timed_error(_with_raising_rollout(without_engine(), second)),
        "a gradient is NaN": _timed_error(_with_nan_gradient(without_engine(), second)),
    }
    results |= _tool_call_and_generation(make_trainer(model, Path(folder)), second)
    # Of this nobody tells the others: they see that the process has ended, so it comes last.
    results["a backward raises"] = _timed_error(_with_raising_backward(without_engine(), second))
    return results


def _timed_error(trainer: Any) -> tuple[str, float]:
    start = time.monotonic()
    message = _error(trainer.train)
    return message, time.monotonic() - start


def _without_engine(model: str, folder: str, reward: Callable = distinct_characters) -> Any:
    from learner.test_features import rollout

    from qarl_trl import QaRLConfig, QaRLTrainer

    sizes = {"max_completion_length": 20, "per_device_train_batch_size": 4}
    config = QaRLConfig(**settings(Path(folder), use_vllm=False, bf16=False, **sizes))
    trajectories = partial(rollout, tools=False, ends=True)
    return QaRLTrainer(model, reward, config, train_dataset=prompts(), rollout_func=trajectories)


def _reward_that_raises(second: bool) -> Callable:
    def reward(completions: list[str], **_: Any) -> list[float]:
        if second:
            raise KeyError("no such answer")
        return distinct_characters(completions)

    return reward


def _reward_that_is_infinite(second: bool) -> Callable:
    def reward(completions: list[str], **_: Any) -> list[float]:
        rewards = distinct_characters(completions)
        if second:
            rewards[0] = math.inf
        return rewards

    return reward


def _reward_that_gives_none(completions: list[str], **_: Any) -> list[None]:
    return [None] * len(completions)


def _with_raising_rollout(trainer: Any, second: bool) -> Any:
    if second:
        # The trainer wraps the function that it was given.
        (trajectories,) = trainer.rollout_func.args
        raising = _raising(trajectories, 1, KeyError("no such tool"))
        trainer.rollout_func = partial(trainer.rollout_func.func, raising)
    return trainer


def _with_nan_gradient(trainer: Any, second: bool) -> Any:
    if second:
        trainer.model.model.norm.weight.register_hook(lambda gradient: gradient * math.nan)
    return trainer


def _with_raising_backward(trainer: Any, second: bool) -> Any:
    if second:
        out_of_memory = torch.OutOfMemoryError("out of memory")
        trainer.model.model.norm.weight.register_hook(_raising(lambda gradient: gradient, 3, out_of_memory))
    return trainer


def _tool_call_and_generation(trainer: Any, second: bool) -> dict[str, Any]:
    """A tool call in one process alone, after which both agree again; then a generation that raises."""
    trainer.vllm_generation.sync_weights()
    _generate(trainer, [2, 3])
    with patch.object(GRPOTrainer, "_tool_call_loop", lambda self, prompt_ids: _generate(self, *prompt_ids)):
        if second:
            trainer._tool_call_loop([[2, 3]])

    # A collective too many or too few in one process would pair with this one.
    rank = torch.tensor([trainer.accelerator.process_index])
    results: dict[str, Any] = {"after a tool call": trainer.accelerator.gather(rank).tolist()}

    if second:
        llm_engine = trainer.vllm_generation.llm.llm_engine
        llm_engine.step = _raising(llm_engine.step, 3, ValueError("no memory"))
    results["a generation raises"] = _timed_error(trainer)
    return results


# What the first and the second process say.
EXPECTED = {
    "a reward raises": ("The rewards failed in process 1, which says why", "KeyError: 'no such answer'"),
    "a reward infinite": ("'reward' gave an infinite reward",) * 2,
    "a rollout_func raises": ("The rollout_func failed in process 1, which says why", "KeyError: 'no such tool'"),
    "a gradient is NaN": ("The gradient norm is nan",) * 2,
    "a generation raises": ("The generation failed in process ", "ValueError: no memory"),
    # gloo: the connection was closed or reset
    "a backward raises": ("by peer", "OutOfMemoryError: out of memory"),
}


def test_what_fails_in_one_process_stops_both_at_once(tmp_path):
    model = save_model(tmp_path / "model", layers=1)

    first, second = isolated_group(_one_of_two, 2, model, str(tmp_path / "run"), timeout=280)
    print(first, second)

    assert first["after a tool call"] == second["after a tool call"] == [0, 1]
    for name, (words_of_first, words_of_second) in EXPECTED.items():
        first_message, first_seconds = first[name]
        second_message, second_seconds = second[name]
        assert words_of_first in first_message, name
        assert words_of_second in second_message, name
        # torch.distributed would wait for half an hour.
        assert max(first_seconds, second_seconds) < 120, name


def _rloo_of_two(model: str, folder: str) -> dict[str, Any]:
    """What each process of RLOO says whose second process has a fault in its rewards, and after how many seconds."""
    from qarl_trl import LowBitRLOOConfig, LowBitRLOOTrainer

    torch.set_num_threads(1)
    second = os.environ["RANK"] == "1"
    rewards = {
        "raises": _reward_that_raises(second),
        "is infinite": _reward_that_is_infinite(second),
        "gives none": _reward_that_gives_none,
        "is fine": distinct_characters,
    }

    results = {}
    for name, reward in rewards.items():
        values = settings(Path(folder) / name, use_vllm=False, bf16=False, max_completion_length=8, max_steps=1)
        # RLOO has a loss of its own.
        for field in ("tbpo_epsilon_high", "tbpo_delta_low", "tbpo_delta_high"):
            del values[field]
        args = LowBitRLOOConfig(**values, beta=0.0)
        trainer = LowBitRLOOTrainer(model, reward, args, train_dataset=prompts())
        assert trainer.accelerator.num_processes == 2
        results[name] = _timed_error(trainer)
    return results


# What the first and the second process of RLOO say.
EXPECTED_OF_RLOO = {
    "raises": ("The rewards failed in process 1, which says why", "KeyError: 'no such answer'"),
    "is infinite": ("'reward' gave an infinite reward",) * 2,
    "gives none": ("No completion of a rollout batch got a reward",) * 2,
    # Control: after the faults the two processes still agree.
    "is fine": ("passed",) * 2,
}


def test_a_reward_of_rloo_that_fails_in_one_process_stops_both_at_once(tmp_path):
    """TRL gathers the rewards of all, in which the others would wait for the one that raised."""
    model = save_model(tmp_path / "model", layers=1)

    first, second = isolated_group(_rloo_of_two, 2, model, str(tmp_path / "run"), timeout=200)
    print(first, second)

    for name, (words_of_first, words_of_second) in EXPECTED_OF_RLOO.items():
        first_message, first_seconds = first[name]
        second_message, second_seconds = second[name]
        assert words_of_first in first_message, name
        assert words_of_second in second_message, name
        # torch.distributed would wait for half an hour.
        assert max(first_seconds, second_seconds) < 60, name
