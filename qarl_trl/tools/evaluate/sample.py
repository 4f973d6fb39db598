"""Completions from a vLLM engine that knows nothing but the checkpoint's folder."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from ...rollout._vllm_cpu import is_cpu_engine, let_kernel_scan_pass
from ...rollout.cpu import choose_arithmetic
from .store import Completion
from .suites import Problem


def start_engine(model: str, **settings: Any) -> Any:
    """A `vllm.LLM` in bfloat16 beside the low-bit layers, as in training; `settings` come on top."""
    defaults: dict[str, Any] = {"dtype": "bfloat16"}
    if is_cpu_engine():
        choose_arithmetic()
        defaults["enforce_eager"] = True  # compiled code rounds elsewhere
        # vLLM 0.31 turns a seeded generator back when a prompt is split over two steps, which one on a CPU cannot.
        defaults["enable_chunked_prefill"] = False
    let_kernel_scan_pass()
    from vllm import LLM

    return LLM(model, **defaults | settings)


def sample(
    engine: Any, problems: Sequence[Problem], seed: int, **settings: Any
) -> Iterator[tuple[Problem, list[Completion]]]:
    """
    Sample all problems, of different prompts, together and yield each as soon as its completions are finished.

    Each prompt draws from a seed made of `seed` and itself, whatever is sampled beside it. `settings` are those of
    `vllm.SamplingParams`. `RuntimeError` if the engine ends a completion otherwise than at its end or at the length limit.
    """
    from vllm import SamplingParams

    by_prompt = {problem.prompt_ids: problem for problem in problems}
    params = [SamplingParams(seed=prompt_seed(ids, seed), **settings) for ids in by_prompt]
    engine.enqueue([{"prompt_token_ids": list(ids)} for ids in by_prompt], params, use_tqdm=False)
    while engine.llm_engine.has_unfinished_requests():
        for output in engine.llm_engine.step():
            if output.finished:
                problem = by_prompt.pop(tuple(output.prompt_token_ids))
                yield problem, [_completion(answer) for answer in output.outputs]
    if by_prompt:
        raise RuntimeError(f"The engine finished without an answer to {len(by_prompt)} of {len(params)} prompts.")


def prompt_seed(prompt_ids: Sequence[int], seed: int) -> int:
    """A seed of 31 bits for a prompt."""
    return int.from_bytes(hashlib.sha256(f"{seed} {list(prompt_ids)}".encode()).digest()[:4]) >> 1


def _completion(answer: Any) -> Completion:
    if answer.finish_reason not in ("stop", "length"):
        raise RuntimeError(
            f"vLLM ended a completion with finish_reason={answer.finish_reason!r}; it cannot be scored."
        )
    return Completion(answer.text, len(answer.token_ids), answer.finish_reason == "length")
