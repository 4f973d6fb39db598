"""Greedy answers through vLLM, from the training engine and from a fresh one, never from the learner."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..tools.evaluate.sample import start_engine
from .task import correct


def answers_of_engine(llm: Any, problems: Sequence[dict[str, Any]]) -> list[str]:
    """Greedy answers of a `vllm.LLM`."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=16)
    outputs = llm.generate([problem["prompt"] for problem in problems], params, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def answers_in_training(trainer: Any, problems: Sequence[dict[str, Any]]) -> list[str]:
    """Weight sync the learner's current low-bit weights, then answer."""
    trainer.vllm_generation.sync_weights()
    return answers_of_engine(trainer.vllm_generation.llm, problems)


def answers_of_checkpoint(checkpoint: Path, problems: Sequence[dict[str, Any]], max_num_seqs: int) -> list[str]:
    """Answers of an engine that knows nothing but the folder; run it in a process of its own."""
    llm = start_engine(
        str(checkpoint),
        # What it must share with the training engine for bit-equal arithmetic.
        max_model_len=64,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=4096,
        logprobs_mode="processed_logprobs",
        use_tqdm_on_load=False,
    )
    return answers_of_engine(llm, problems)


def accuracy(answers: list[str], problems: Sequence[dict[str, Any]]) -> float:
    """Share of right answers."""
    return sum(correct(answers, [problem["answer"] for problem in problems])) / len(answers)
