"""`first_run.py`: `--dry` writes its page, and each learner multiplies by the gemm that it is named after."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import make_model

from qarl_trl.quant import apply_quantization, quantized_modules
from qarl_trl.quant.gemms.gemm import Gemm, plain_gemm
from qarl_trl.rollout.engine_gemm import GEMMS

from . import first_run, stages
from .run import Run


SCRIPT = Path(__file__).with_name("first_run.py")


def test_a_dry_stage_finishes_and_is_on_the_page(tmp_path):
    page = tmp_path / "page.md"

    # The quantizer's stage needs no model, so it is the quickest.
    command = [sys.executable, str(SCRIPT), "--dry", "--only", "quantizer", "--out", str(page)]
    result = subprocess.run(command, capture_output=True, text=True)

    assert result.returncode == 0, result.stdout + result.stderr + page.with_suffix(".log").read_text()
    text = page.read_text()
    assert "## quantizer: ok" in text
    assert "- commit: " in text
    assert "dequantize in plain operations ms" in text
    # Three checks for each of eight schemes.
    assert '"24 of 24 hold"' in text


def test_without_a_gpu_it_ends_before_the_first_stage(tmp_path):
    page = tmp_path / "page.md"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(SCRIPT), "--only", "quantizer", "--out", str(page)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)

    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].endswith(
        "error: No CUDA device. With --dry the stages run on a CPU in toy sizes."
    )
    assert not page.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_stopped_has_its_page_and_leaves_no_process(tmp_path, number):
    """With a stage that never ends, in place of the one that it starts."""
    figures = tmp_path / "figures"
    stage = f"""
import json, os, sys, time
place = sys.argv[sys.argv.index("--figures") + 1]
open(place, "w").write(json.dumps({{"found": 7}}))
open({str(figures)!r}, "w").write(str(os.getpid()))
print("stage begins", flush=True)
time.sleep(600)
"""
    endless = tmp_path / "endless.py"
    endless.write_text(stage)
    page = tmp_path / "page.md"
    code = f"""
import sys
sys.path.insert(0, {str(SCRIPT.parents[1])!r})
from gpu import first_run
first_run.__file__ = {str(endless)!r}
sys.argv = ["first_run.py", "--dry", "--only", "quantizer;gemms", "--out", {str(page)!r}]
sys.exit(first_run.main())
"""
    # Under nohup, which CI may use, a child would inherit that SIGHUP is ignored.
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    log = page.with_suffix(".log")
    while not (log.exists() and "stage begins" in log.read_text()):
        assert process.poll() is None
        time.sleep(0.1)

    process.send_signal(number)
    process.communicate(timeout=120)

    assert process.returncode == 1
    text = page.read_text()
    assert "## quantizer: stopped after" in text
    assert "- found: 7" in text
    assert "gemms" not in text
    with pytest.raises(ProcessLookupError):
        os.kill(int(figures.read_text()), 0)


def test_a_second_run_keeps_the_first_page(tmp_path):
    page = tmp_path / "page.md"
    assert first_run.free_name(page) == page

    page.write_text("an hour of a GPU")
    assert first_run.free_name(page) == tmp_path / "page_2.md"
    (tmp_path / "page_2.md").write_text("another")
    assert first_run.free_name(page) == tmp_path / "page_3.md"


@pytest.mark.parametrize(
    ("figures", "code", "status"),
    [
        ({"skipped": "FP8 needs one of ..."}, 0, "skipped"),
        ({"checks": "6 of 6 hold"}, 0, "ok"),
        ({"checks": "5 of 6 hold"}, 1, "failed"),
        ({"checks": "1 of 1 hold"}, None, "timeout"),
    ],
)
def test_a_stage_that_this_gpu_cannot_run_is_not_ok(tmp_path, monkeypatch, figures, code, status):
    def run(index, dry, place, folder, stream):
        place.write_text(json.dumps(figures))
        return code

    monkeypatch.setattr(first_run, "_run_process", run)
    assert first_run.run_stage(0, True, tmp_path / "log").status == status


def test_a_stage_sees_one_gpu_and_leaves_its_files_in_its_folder(monkeypatch):
    """The trainer refuses a process with several GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert first_run._environment("folder")["CUDA_VISIBLE_DEVICES"] == "0"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert first_run._environment("folder")["CUDA_VISIBLE_DEVICES"] == "3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert first_run._environment("folder")["CUDA_VISIBLE_DEVICES"] == ""
    assert first_run._environment("folder")["TMPDIR"] == "folder"


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
