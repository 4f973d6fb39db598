"""
Sleep of level 2 under vLLM's model runner V2, which GPUs use, with and without an adapter.

On a GPU everything that the runner's `load_model` allocated is thrown away but buffers and host memory: weights, the
sampler's states, adapters. Here that memory is overwritten; then a sync must bring back every answer. The file is
also the script of the processes, since Triton reads its settings when it is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from .test_model_runner import pretend_triton


pytestmark = [pytest.mark.slow, pytest.mark.avx512]  # W4A16
TESTS = Path(__file__).parents[1]
# Each uses another state of the sampler.
SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.3},
    {"min_tokens": 4, "stop_token_ids": [5]},
    {"logit_bias": {7: 2.0}},
)


# In a process of its own ---------------------------------------------------------------------------------------------


class Allocations(TorchDispatchMode):
    """Keeps every tensor that operations return inside this context."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                self.tensors.append(leaf)
        return result


def run(folder: str, adapter: bool) -> None:
    """Sync, sleep, sync; what the engine answers goes into `result.pt`."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from qarl_trl.rollout.vllm import reloading

    allocations = Allocations()
    load_model = GPUModelRunner.load_model

    def load_and_record(self: Any, *args: Any, **kwargs: Any) -> None:
        with allocations:
            load_model(self, *args, **kwargs)

    GPUModelRunner.load_model = load_and_record
    llm, send = _adapter_engine(folder) if adapter else _engine(folder)
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner

    send(llm)
    reloading.reset_prefix_cache(llm)
    before = _answers(llm)

    overwritten = _sleep(runner, allocations.tensors)
    asleep = _log_probs(llm)
    send(llm)
    reloading.reset_prefix_cache(llm)

    result = {
        "runner": type(runner).__mro__[1].__module__,
        "weights": sum(parameter.nbytes for parameter in runner.model.parameters()),
        "overwritten": overwritten,
        "before": before,
        "asleep": asleep,
        "after": _answers(llm),
    }
    torch.save(result, f"{folder}/result.pt")


def _engine(folder: str) -> tuple[Any, Callable[[Any], None]]:
    """An engine, and what syncs all weights of its learner."""
    from qarl_trl.quant import iter_low_bit_weights
    from qarl_trl.rollout.vllm import reloading

    model = _low_bit_model(folder)
    return _start(model, folder), lambda llm: reloading.reload_engine(llm, iter_low_bit_weights(model))


def _adapter_engine(folder: str) -> tuple[Any, Callable[[Any], None]]:
    """An engine that also takes an adapter, and what syncs frozen base and adapter."""
    from qarl_trl.quant import iter_low_bit_weights
    from qarl_trl.rollout.vllm import adapters
    from slow.toys import copies

    model = _low_bit_model(folder)
    base = copies(iter_low_bit_weights(model))

    generator = torch.Generator().manual_seed(0)
    factors = {}
    shapes = {}
    for name, layer in model.named_modules():
        if name.endswith("_proj"):
            first = torch.randn(8, layer.in_features, generator=generator)
            second = torch.randn(layer.out_features, 8, generator=generator)
            for factor, numbers in (("lora_A", first), ("lora_B", second)):
                place = f"base_model.model.{name}.{factor}.weight"
                # B is not zero as in a new adapter, which would add nothing and could be lost unseen.
                factors[place] = 0.2 * numbers.bfloat16()
                shapes[place] = numbers.shape

    settings = adapters.lora_settings(shapes)
    tensors = [*base.items(), *factors.items()]
    llm = _start(model, folder, **settings)
    adapters.sample_with(llm, Path(folder))
    return llm, lambda llm: adapters.send(llm, tensors, Path(folder))


def _low_bit_model(folder: str) -> Any:
    """A learner; its high-precision weights and a tokenizer are saved in `folder`."""
    from conftest import make_model, make_tokenizer

    from qarl_trl.quant import apply_quantization

    model = make_model(initializer_range=0.1)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return apply_quantization(model, "W4A16")


def _start(model: Any, folder: str, **settings: Any) -> Any:
    from vllm import LLM

    from qarl_trl.export import quantization_config

    return LLM(
        folder,
        load_format="dummy",
        hf_overrides={"quantization_config": quantization_config(model)},
        logprobs_mode="processed_logprobs",
        seed=0,
        max_model_len=128,
        max_num_seqs=4,
        enforce_eager=True,
        dtype="bfloat16",
        gpu_memory_utilization=0.1,  # of the machine, where other engines run
        **settings,
    )


def _sleep(runner: Any, allocated: list[torch.Tensor]) -> int:
    """Overwrite what was allocated, but for buffers and host memory; the number of bytes."""
    buffers = {buffer.untyped_storage().data_ptr() for buffer in runner.model.buffers()}
    host = {tensor.untyped_storage().data_ptr() for tensor in _host_memory(runner, seen=set())}

    done = set(buffers | host)
    number = 0
    for tensor in allocated:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in done:
            done.add(storage.data_ptr())
            number += storage.nbytes()
            # Of all bytes: near the largest number of a float32, and no plausible weight, scale or index.
            storage.fill_(0x7F)
    return number


def _host_memory(owner: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """The tensors of vLLM's buffers that are in pinned host memory on a GPU."""
    from vllm.v1.worker.gpu import buffer_utils

    if id(owner) in seen or not hasattr(owner, "__dict__"):
        return
    seen.add(id(owner))

    pinned = []
    for name in ("UvaBackedTensor", "UvaBufferPool", "UvaBuffer", "NonUvaBuffer"):
        if hasattr(buffer_utils, name):
            pinned.append(getattr(buffer_utils, name))
    in_host_memory = isinstance(owner, tuple(pinned))

    for name, value in list(vars(owner).items()):
        parts = list(value.values()) if isinstance(value, dict) else value
        for part in parts if isinstance(parts, list | tuple) else [parts]:
            if isinstance(part, torch.Tensor):
                if in_host_memory or "cpu" in name:
                    yield part
            elif type(part).__module__.startswith("vllm"):
                yield from _host_memory(part, seen)


def _prompt() -> list[int]:
    return torch.randint(2, 40, (24,), generator=torch.Generator().manual_seed(1)).tolist()


def _log_probs(llm: Any) -> torch.Tensor | None:
    """Of the prompt; `None` if the engine fails."""
    from qarl_trl.rollout.sync_check.engine_logps import engine_logps
    from qarl_trl.rollout.vllm import reloading

    reloading.reset_prefix_cache(llm)
    try:
        return engine_logps(llm, _prompt())
    except Exception:
        return None


def _answers(llm: Any) -> list[Any]:
    """Log-probs of the prompt, then tokens and log-probs of three answers for each kind of sampling."""
    from vllm import SamplingParams

    from slow.toys import as_sample

    answers: list[Any] = [_log_probs(llm).tolist()]
    for settings in SAMPLING:
        # With a seed for each request: the draws before the sleep must come again.
        params = SamplingParams(temperature=0.7, max_tokens=8, logprobs=0, ignore_eos=True, seed=3, **settings)
        for output in llm.generate([{"prompt_token_ids": _prompt()}] * 3, params, use_tqdm=False):
            _, tokens, logps = as_sample(output)
            answers.append((tokens, logps))
    return answers


# Tests ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", [False, True], ids=["all weights", "adapter"])
def test_a_sync_brings_back_all_that_a_sleep_threw_away(adapter, tmp_path):
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]),
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "CUDA_VISIBLE_DEVICES": "x",
    }
    command = [sys.executable, "-m", "slow.test_model_runner_sleep", str(tmp_path), "adapter" if adapter else "all"]
    subprocess.run(command, env=os.environ | settings, check=True, timeout=800)
    result = torch.load(tmp_path / "result.pt")

    assert result["runner"].startswith("vllm.v1.worker.gpu.")
    assert result["overwritten"] > result["weights"]
    assert result["after"] == result["before"]

    # Control: a sleep without a sync.
    asleep = result["asleep"]
    assert asleep is None or asleep.tolist() != result["before"][0]


if __name__ == "__main__":
    pretend_triton()
    run(sys.argv[1], sys.argv[2] == "adapter")
