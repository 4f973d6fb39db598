"""`qarl-trl doctor` with real engines: the mismatch, and that a learner which computes something else is found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slow.isolated import isolated
from slow.toys import prompts, save_model, settings


pytestmark = pytest.mark.slow


def _measure(model: str, folder: str):
    """What doctor finds, and what it would of a learner that computes something else."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from qarl_trl import QaRLConfig
    from qarl_trl.tools.doctor import measure
    from qarl_trl.tools.doctor.judge import judge_mismatch
    from qarl_trl.trainers.low_bit import quantize_policy

    args = QaRLConfig(**settings(Path(folder)))
    other = QaRLConfig(**settings(Path(folder), quant_group_size=32))
    measure.in_fresh_process = lambda _, function, *args, **__: function(*args)  # this process is a fresh one
    logp_diff, seen = measure.logp_diff, []
    measure.logp_diff = lambda model, samples, *args, **how: (
        seen.append(samples) or logp_diff(model, samples, *args, **how)
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    found = measure.measure(model, args, [tokenizer(row["prompt"])["input_ids"] for row in prompts(16)])
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    quantize_policy(plain, other)
    wrong = replace(found, learner=logp_diff(plain, seen[-1], args.temperature, bf16=args.bf16))
    return found, judge_mismatch(found, args).status, wrong, judge_mismatch(wrong, args).status


def test_the_low_bit_learner_removes_the_logp_diff_and_one_that_computes_something_else_fails(tmp_path):
    model = save_model(tmp_path / "model", layers=4)
    found, verdict, wrong, of_wrong = isolated(_measure, model, str(tmp_path / "run"))
    # As in test_measure.py, where it is 27 times the floor; the learner has the engine's operations and formula here.
    assert found.rollout_only > 5 * found.floor > 0
    assert found.learner == 0.0
    assert verdict == "ok"
    assert wrong.learner > 0.5 * found.rollout_only  # control
    assert of_wrong == "FAIL"
