"""`qarl-trl doctor` with real engines: the mismatch, and that a learner which computes something else is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from slow.isolated import isolated
from slow.toys import prompts, save_model, settings


pytestmark = pytest.mark.slow


def _measure(model: str, folder: str, scheme: str, broken: bool):
    from transformers import AutoTokenizer

    from qarl_trl import QaRLConfig
    from qarl_trl.tools.doctor import mismatch

    args = QaRLConfig(**settings(Path(folder), quant_scheme=scheme))
    real = mismatch._aligned
    if broken:
        other = QaRLConfig(**settings(Path(folder), quant_scheme=scheme, quant_group_size=32))
        mismatch._aligned = lambda model, samples, _: real(model, samples, other)
    tokenizer = AutoTokenizer.from_pretrained(model)
    found = mismatch.measure(model, args, [tokenizer(row["prompt"])["input_ids"] for row in prompts(16)], 32)
    return found, mismatch.verdict(found, args)


def test_the_low_bit_learner_removes_the_logp_diff(tmp_path):
    model = save_model(tmp_path / "model", layers=4)
    w4a16, verdict = isolated(_measure, model, str(tmp_path / "run"), "W4A16", False)
    assert w4a16.tokens > 100
    # As in test_logp_diff.py, where it is 27 times the floor; the learner has the engine's operations and formula here.
    assert w4a16.rollout_only > 5 * w4a16.floor > 0
    assert w4a16.aligned == 0.0
    assert verdict.status == "ok"


def test_a_learner_that_computes_something_else_fails(tmp_path):
    model = save_model(tmp_path / "model", layers=4)
    found, verdict = isolated(_measure, model, str(tmp_path / "run"), "W4A16", True)
    assert found.aligned > 0.5 * found.rollout_only
    assert verdict.status == "FAIL"
