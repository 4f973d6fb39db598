"""`first_run.py`: `--dry` writes its page, and each learner multiplies by the gemm that it is named after."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from conftest import make_model

from qarl_trl.quant import apply_quantization, quantized_modules
from qarl_trl.quant.gemms.gemm import Gemm, plain_gemm
from qarl_trl.rollout.engine_gemm import GEMMS

from . import stages
from .run import Run


def test_a_dry_stage_finishes_and_is_on_the_page(tmp_path):
    page = tmp_path / "page.md"
    script = Path(__file__).with_name("first_run.py")

    # The quantizer's stage needs no model, so it is the quickest.
    command = [sys.executable, str(script), "--dry", "--only", "quantizer", "--out", str(page)]
    result = subprocess.run(command, capture_output=True, text=True)

    assert result.returncode == 0, result.stdout + result.stderr + page.with_suffix(".log").read_text()
    text = page.read_text()
    assert "## quantizer: ok" in text
    assert "- commit: " in text
    assert "dequantize in plain operations ms" in text
    # Three checks for each of eight schemes.
    assert '"24 of 24 hold"' in text


def test_each_learner_is_measured_with_its_own_gemm(tmp_path, monkeypatch):
    """The stage runs after a training, in which the layers have chosen a gemm already."""
    engines_gemms: list[Gemm] = []

    def engine_gemm(scheme, device):
        """Stands for the engine's, which not every machine has: the plain one's numbers, by other objects."""
        gemm = plain_gemm(scheme, device)
        engines_gemms.append(gemm)
        return gemm

    monkeypatch.setitem(GEMMS, "engine", engine_gemm)
    model = apply_quantization(make_model(), "W4A16")
    model(torch.tensor([[3, 4, 5]]))
    samples = [([3, 4, 5], [6, 7], [-1.0, -2.0])]
    used_by_learner = []
    learner_logprobs = stages.learner_logprobs

    def spy(model, samples):
        logps = learner_logprobs(model, samples)
        used_by_learner.append([layer.gemm for _, layer in quantized_modules(model)])
        return logps

    monkeypatch.setattr(stages, "learner_logprobs", spy)
    monkeypatch.setattr(stages, "sample", lambda *_: samples)
    run = Run(str(tmp_path / "figures.jsonl"), dry=True, folder=str(tmp_path))
    stages.compare_learners(run, SimpleNamespace(model=model, vllm_generation=SimpleNamespace(llm=None)))

    # Two learners with low bits, and the bf16 one. Seven layers in each of two blocks.
    auto, engine, _ = used_by_learner
    assert len(engine) == 14
    assert engine == engines_gemms  # the same objects: a gemm has no equality of its own
    # Control: none of them stayed from the stage before, or was there before it was asked for.
    assert not set(map(id, auto)) & set(map(id, engines_gemms))
