"""
Families that vLLM runs by transformers' own class, which it prepares for its compiler in place: the class is also the
learner's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from slow.isolated import isolated
from slow.processes import FLOOR
from slow.toys import engine_logprobs, fresh_engine_logprobs, logged, make_trainer, save_model


pytestmark = pytest.mark.slow


def _train(model: str, folder: str, mended: bool) -> dict[str, Any]:
    """The mismatches of a run, and what its engine answers at the end."""
    from qarl_trl.rollout.vllm import start

    if mended:
        trainer = make_trainer(model, Path(folder), max_steps=4)
        trainer.train()
    else:
        with patch.object(start, "keep_learner_eager", lambda: None):
            trainer = make_trainer(model, Path(folder))
            trainer.train()

    trainer.save_model()
    # The last sync of the run was before its last updates.
    trainer.vllm_generation.sync_weights()
    return {
        "class": type(trainer.vllm_generation.llm.llm_engine.model_executor.driver_worker.get_model()).__name__,
        "mismatches": logged(trainer, "mismatch/logp_diff_mean"),
        "answers": engine_logprobs(trainer.vllm_generation.llm),
    }


@pytest.mark.parametrize("family", ["Olmo2", "Starcoder2", "SmolLM3"])
def test_learner_and_engine_run_the_same_class_of_transformers(tmp_path, family):
    model = save_model(tmp_path / "model", family=family)

    run = isolated(_train, model, str(tmp_path / "run"), True)

    assert run["class"] == "TransformersForCausalLM"
    assert len(run["mismatches"]) == 2
    assert 0 < max(run["mismatches"]) < FLOOR
    # The file has what was synced.
    assert isolated(fresh_engine_logprobs, str(tmp_path / "run")) == run["answers"]


@pytest.mark.avx512
def test_without_an_answer_of_the_learner_vllm_s_class_fails(tmp_path):
    """Control: if this fails, vLLM or transformers has changed, and `keep_learner_eager` can go."""
    model = save_model(tmp_path / "model", family="Olmo2")

    with pytest.raises(AssertionError, match="no attribute 'do_not_compile'"):
        isolated(_train, model, str(tmp_path / "run"), False)
