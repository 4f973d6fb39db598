"""Sample completions from a vLLM engine that gets only the checkpoint's folder."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...cpu_exact.arithmetic import choose_arithmetic
from ...export.files import tensor_shapes
from ...rollout.vllm.adapters import lora_settings, sample_with
from ...rollout.vllm.platform import is_cpu_engine


# The cache of keys and values of an engine on a CPU, if nothing says how large it is: 16,384 tokens of a model of 8B
# parameters need 2.3 GiB.
CPU_CACHE_GIB = 4
# The arguments of `vllm.LLM` by which the user decides it.
MEMORY_SETTINGS = {"gpu_memory_utilization", "kv_cache_memory_bytes"}
# vLLM's switch of the sampler that FlashInfer compiles; on by default.
FLASHINFER_SAMPLER = "VLLM_USE_FLASHINFER_SAMPLER"


def start_engine(model: str | Path, adapter: Path | None = None, **settings: Any) -> Any:
    """
    A `vllm.LLM` with all but the low-bit layers in bfloat16, as in training.

    Args:
        model: The model's folder.
        adapter: The folder of a LoRA adapter that all requests use.
        settings: Arguments of `vllm.LLM`, which override ours.
    """
    defaults: dict[str, Any] = {"dtype": "bfloat16"}
    if is_cpu_engine():
        choose_arithmetic()
        defaults |= cpu_cache(settings)
        # Compiled code rounds at other points.
        defaults["enforce_eager"] = True
        # vLLM 0.31 rewinds a seeded generator if a prompt is split over two steps; a CPU generator cannot do that.
        defaults["enable_chunked_prefill"] = False
    else:
        # An engine compiles FlashInfer's sampler when it starts, which needs nvcc. Requests with a seed, as all of
        # `generate` are, never reach it.
        os.environ.setdefault(FLASHINFER_SAMPLER, "0")

    # Late, because vLLM reads the environment variables of both branches.
    from vllm import LLM

    if adapter is None:
        return LLM(str(model), **defaults | settings)

    defaults |= lora_settings(tensor_shapes(adapter))
    # Its answers end where those of its training did: the base's tokenizer may have another end token.
    if any(adapter.glob("tokenizer*")):
        defaults["tokenizer"] = str(adapter)
    engine = LLM(str(model), **defaults | settings)
    sample_with(engine, adapter)
    return engine


def cpu_cache(settings: Mapping[str, Any]) -> dict[str, Any]:
    """
    The size of a CPU engine's cache of keys and values, as an argument of `vllm.LLM`.

    By default vLLM takes 92 % of the machine's memory for model and cache, and refuses to start if others use more
    than the rest.

    Args:
        settings: The user's arguments of `vllm.LLM`.

    Returns:
        A size in bytes; nothing if the user gives one, or a share of the memory.
    """
    # `VLLM_CPU_KVCACHE_SPACE` becomes this argument inside of vLLM.
    if "VLLM_CPU_KVCACHE_SPACE" in os.environ or MEMORY_SETTINGS & settings.keys():
        return {}
    return {"kv_cache_memory_bytes": CPU_CACHE_GIB * 2**30}


def generate(engine: Any, prompts: Sequence[Sequence[int]], params: Any, seed: int) -> list[Any]:
    """
    Sample completions of prompts, each from its own seed: other prompts do not change them. A prompt that comes again
    has another seed.

    Args:
        engine: A `vllm.LLM`.
        prompts: Token ids of each prompt.
        params: `vllm.SamplingParams`, which are copied.
        seed: The seed of a prompt comes from this, its token ids, and how often the prompt came before.

    Returns:
        vLLM's output for each prompt.
    """
    seeded = []
    times: Counter[tuple[int, ...]] = Counter()
    for ids in prompts:
        of_prompt = params.clone()
        of_prompt.seed = prompt_seed(ids, seed, times[tuple(ids)])
        times[tuple(ids)] += 1
        seeded.append(of_prompt)

    # vLLM 0.31 divides by the time of a progress bar, which is 0 if the user has turned bars off.
    bar = "TQDM_DISABLE" not in os.environ
    return engine.generate([{"prompt_token_ids": list(ids)} for ids in prompts], seeded, use_tqdm=bar)


def prompt_seed(prompt_ids: Sequence[int], seed: int, before: int = 0) -> int:
    """
    A seed of 31 bits for a prompt.

    Args:
        prompt_ids: Its token ids.
        seed: The seed of the whole evaluation.
        before: How often the same prompt came before.
    """
    # A hash of Python's own would differ from process to process.
    text = f"{seed} {list(prompt_ids)}"
    if before:
        text += f" {before}"
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:4]) >> 1


def sample(engine: Any, problems: Sequence[dict[str, Any]], params: Any, seed: int) -> list[list[dict[str, Any]]]:
    """
    Sample the completions of problems.

    Args:
        engine: A `vllm.LLM`.
        problems: Each with its `prompt_ids`.
        params: `vllm.SamplingParams` without a seed.
        seed: The seed of the evaluation.

    Returns:
        For each problem its completions: `text` without special tokens, its `token_ids`, the number of `tokens`, and
        whether the length limit `cut_off` the completion.

    Raises:
        RuntimeError: if a completion ends for a reason other than a stop or the length limit.
    """
    prompts = [problem["prompt_ids"] for problem in problems]
    outputs = generate(engine, prompts, params, seed)

    completions = []
    for output in outputs:
        completions.append([_completion(answer) for answer in output.outputs])
    return completions


def _completion(answer: Any) -> dict[str, Any]:
    """What we keep of one of vLLM's completions."""
    # An aborted completion is neither right nor wrong: scored, it would lower the result in silence.
    if answer.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM's finish_reason must be 'stop' or 'length', got {answer.finish_reason!r}.")
    return {
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "tokens": len(answer.token_ids),
        "cut_off": answer.finish_reason == "length",
    }
