"""`qarl-trl doctor` with real engines: the mismatch, and that a learner which computes something else is found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slow.isolated import isolated
from slow.toys import prompts, save_model, settings


pytestmark = pytest.mark.slow


def _measure(model: str, folder: str, changes: dict[str, Any]) -> dict[str, Any]:
    """What doctor measures and judges, of the learner of a run and of one that computes something else."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from qarl_trl import QaRLConfig
    from qarl_trl.tools.doctor import measure
    from qarl_trl.tools.doctor.judge import judge_mismatch
    from qarl_trl.trainers.policy import prepare_policy

    args = QaRLConfig(**settings(Path(folder), **changes))
    prompt_ids = AutoTokenizer.from_pretrained(model)(prompts(16)["prompt"][:])["input_ids"]

    # This process is a fresh one.
    measure.in_fresh_process = lambda step, function, *arguments, **limits: function(*arguments)
    logp_diff = measure.logp_diff
    # All samples that the learners score, the low-bit engine's last.
    scored = []

    def recording_logp_diff(learner: Any, samples: Any, *arguments: Any, **precision: Any) -> float:
        scored.append(samples)
        return logp_diff(learner, samples, *arguments, **precision)

    measure.logp_diff = recording_logp_diff
    mismatch = measure.measure(model, args, prompt_ids)

    # The same samples by a learner of another group size.
    other_learner = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    other = QaRLConfig(**settings(Path(folder), quant_group_size=32))
    # In groups of 32 instead of 128: a scheme of the same name that rounds otherwise.
    prepare_policy(other_learner, other, other.quant_plan())
    other_logp_diff = logp_diff(other_learner, scored[-1], args.temperature, bf16=args.bf16)
    other_mismatch = replace(mismatch, learner=other_logp_diff)

    return {
        "mismatch": mismatch,
        "verdict": judge_mismatch(mismatch, args).status,
        "other mismatch": other_mismatch,
        "other verdict": judge_mismatch(other_mismatch, args).status,
    }


@pytest.mark.parametrize("changes", [{}, {"lora_base": "frozen"}], ids=["master weights", "frozen base"])
def test_the_low_bit_learner_removes_the_logp_diff_and_one_that_computes_something_else_fails(tmp_path, changes):
    model = save_model(tmp_path / "model", layers=4)

    measured = isolated(_measure, model, str(tmp_path / "run"), changes)

    mismatch = measured["mismatch"]
    assert mismatch.rollout_only > 5 * mismatch.floor > 0
    # Exactly, because the learner has the engine's operations, and both samples are scored by the engine's formula.
    assert mismatch.learner == 0.0
    assert measured["verdict"] == "ok"
    # The control.
    assert measured["other mismatch"].learner > 0.5 * mismatch.rollout_only
    assert measured["other verdict"] == "FAIL"
