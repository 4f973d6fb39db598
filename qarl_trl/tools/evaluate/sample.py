"""Sample completions from a vLLM engine that gets only the checkpoint's folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...cpu_exact.arithmetic import choose_arithmetic
from ...export.files import tensor_shapes
from ...rollout._vllm_cpu import is_cpu_engine
from ...rollout._vllm_lora import lora_settings, sample_with


def start_engine(model: str | Path, adapter: Path | None = None, **settings: Any) -> Any:
    """A `vllm.LLM` with all but the low-bit layers in bfloat16, as in training, and with the `adapter`. `settings` override defaults."""
    defaults: dict[str, Any] = {"dtype": "bfloat16"}
    if is_cpu_engine():
        choose_arithmetic()
        defaults["enforce_eager"] = True  # compiled code rounds at other points
        # vLLM 0.31 rewinds a seeded generator if a prompt is split over two steps; a CPU generator cannot do that.
        defaults["enable_chunked_prefill"] = False
    from vllm import LLM

    if adapter is None:
        return LLM(str(model), **defaults | settings)
    engine = LLM(str(model), **defaults | lora_settings(tensor_shapes(adapter)) | settings)
    sample_with(engine, adapter)
    return engine


def generate(engine: Any, prompts: Sequence[Sequence[int]], params: Any, seed: int) -> list[Any]:
    """vLLM's outputs for `prompts` (token ids). Each prompt has its own seed, from `seed` and its ids: other prompts do not change it."""
    seeded = [params.clone() for _ in prompts]
    for one, ids in zip(seeded, prompts, strict=True):
        one.seed = prompt_seed(ids, seed)
    # vLLM 0.31 divides by the time of a progress bar, which is 0 if the user has turned bars off.
    bar = "TQDM_DISABLE" not in os.environ
    return engine.generate([{"prompt_token_ids": list(ids)} for ids in prompts], seeded, use_tqdm=bar)


def prompt_seed(prompt_ids: Sequence[int], seed: int) -> int:
    """A seed of 31 bits for a prompt."""
    return int.from_bytes(hashlib.sha256(f"{seed} {list(prompt_ids)}".encode()).digest()[:4]) >> 1


def sample(engine: Any, problems: Sequence[dict[str, Any]], params: Any, seed: int) -> list[list[dict[str, Any]]]:
    """
    The completions of each problem, in order, with the `vllm.SamplingParams` `params`: `text` without special tokens, the number
    of `tokens`, and whether the length limit `cut_off` the completion.

    `RuntimeError` if a completion ends for a reason other than a stop or the length limit.
    """
    outputs = generate(engine, [problem["prompt_ids"] for problem in problems], params, seed)
    return [[_completion(answer) for answer in output.outputs] for output in outputs]


def _completion(answer: Any) -> dict[str, Any]:
    if answer.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM's finish_reason must be 'stop' or 'length', got {answer.finish_reason!r}.")
    return {"text": answer.text, "tokens": len(answer.token_ids), "cut_off": answer.finish_reason == "length"}
