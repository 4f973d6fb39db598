"""How the engine of `qarl-trl eval` is started, without one."""

import os
from unittest.mock import patch

import vllm

from qarl_trl.tools.evaluate import sample


def switch_at_start(**environment):
    """vLLM's own reading of its switch of FlashInfer's sampler, at the start of an engine with these variables."""
    with patch.dict(os.environ):
        os.environ.pop("VLLM_USE_FLASHINFER_SAMPLER", None)
        os.environ.update(environment)
        return sample.start_engine("folder")


def test_an_engine_on_a_gpu_compiles_no_sampler_that_its_requests_do_not_reach(monkeypatch):
    """Without nvcc it died at its start: "Could not find nvcc"."""
    # Where `from vllm import LLM` looks first.
    monkeypatch.setitem(vllm.__dict__, "LLM", lambda *_, **__: vllm.envs.VLLM_USE_FLASHINFER_SAMPLER)
    monkeypatch.setattr(sample, "is_cpu_engine", lambda: False)

    assert switch_at_start() is False
    # What the user says counts.
    assert switch_at_start(VLLM_USE_FLASHINFER_SAMPLER="1") is True

    # Control: vLLM's default, which stays on a CPU.
    monkeypatch.setattr(sample, "is_cpu_engine", lambda: True)
    assert switch_at_start() is True
