"""Greedy answers through vLLM: from the training engine, from a fresh process, and the bfloat16 floor of the gap.

Invariant: accuracy is always that of the low-bit engine, never of the learner.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def greedy_in_fresh_process(checkpoint: Path, problems: Sequence[dict[str, Any]], max_num_seqs: int) -> Result:
    """Answers of a vLLM that knows nothing but the folder."""
    request = {"checkpoint": str(checkpoint), "problems": list(problems), "max_num_seqs": max_num_seqs}
    done = subprocess.run(
        [sys.executable, "-m", __name__], input=json.dumps(request), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"A fresh vLLM could not load {checkpoint}:\n{done.stderr[-3000:]}")
    return Result(**json.loads(done.stdout.splitlines()[-1]))


def _serve_request() -> None:
    from vllm import LLM

    request = json.loads(sys.stdin.read())
    llm = LLM(request["checkpoint"], **engine_arguments(request["max_num_seqs"]))
    result = greedy(llm, request["problems"])
    print(json.dumps({"answers": result.answers, "accuracy": result.accuracy}), flush=True)


if __name__ == "__main__":
    _serve_request()
