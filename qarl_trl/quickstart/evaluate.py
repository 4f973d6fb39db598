"""Greedy answers through vLLM: from the training engine, from a fresh process, and the bfloat16 floor of the gap.

Invariant: accuracy is always that of the low-bit engine, never of the learner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from ..rollout.cpu import choose_arithmetic
from .task import correct


@dataclass(frozen=True)
class Result:
    """Answers to the problems given, and the share that is right."""

    answers: list[str]
    accuracy: float


def engine_arguments(max_num_seqs: int) -> dict[str, Any]:
    """What a fresh engine must share with the training engine for bit-equal arithmetic."""
    return {
        "max_model_len": 64,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": 4096,
        "enforce_eager": True,
        "dtype": "bfloat16",
        "logprobs_mode": "processed_logprobs",
    }


def greedy(llm: Any, problems: Sequence[dict[str, Any]]) -> Result:
    """Greedy answers of an engine."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=16)
    outputs = llm.generate([p["prompt"] for p in problems], params, use_tqdm=False)
    answers = [output.outputs[0].text for output in outputs]
    rewards = correct(answers, [p["answer"] for p in problems])
    return Result(answers, sum(rewards) / len(rewards))


def greedy_in_training_engine(trainer: Any, problems: Sequence[dict[str, Any]]) -> Result:
    """Publish the learner's current low-bit weights, then answer."""
    trainer.vllm_generation.sync_weights()
    return greedy(trainer.vllm_generation.llm, problems)


def greedy_of_checkpoint(checkpoint: Path, problems: Sequence[dict[str, Any]], max_num_seqs: int) -> Result:
    """Answers of an engine that knows nothing but the folder; run it in a process of its own."""
    from vllm import LLM

    choose_arithmetic()
    return greedy(LLM(str(checkpoint), **engine_arguments(max_num_seqs)), problems)


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` in a new process, because a vLLM engine keeps global state in its own."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)
