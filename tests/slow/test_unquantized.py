"""With the scheme off the trainer still serves the CPU engine, which stock TRL cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from slow.isolated import isolated
from slow.toys import ENGINE, distinct_characters, prompts, save_model, settings


pytestmark = pytest.mark.slow


def _run(model: str, folder: str) -> list[float]:
    from slow.toys import make_trainer

    trainer = make_trainer(model, Path(folder), quant_scheme=None, loss_type="grpo")
    trainer.train()
    return [row["mismatch/logp_diff_mean"] for row in trainer.state.log_history if "mismatch/logp_diff_mean" in row]


def _stock(model: str, folder: str) -> str:
    from trl import GRPOConfig, GRPOTrainer

    from qarl_trl.rollout import _vllm

    own = ("vllm_engine_kwargs", "tbpo_epsilon_high", "tbpo_delta_low", "tbpo_delta_high")
    args = GRPOConfig(**{k: v for k, v in settings(Path(folder)).items() if k not in own})
    with _vllm.llm_arguments(**ENGINE):
        trainer = GRPOTrainer(model, distinct_characters, args, train_dataset=prompts())
    try:
        trainer.train()
    except AttributeError as error:
        return str(error)
    return "no error"


def test_a_stock_loss_without_quantization_trains_on_the_cpu_engine(tmp_path):
    logp_diffs = isolated(_run, save_model(tmp_path / "model"), str(tmp_path / "run"))
    assert len(logp_diffs) == 2
    # A stale engine would show after the first two updates: at this learning rate they move the policy by far more.
    assert logp_diffs[1] < 2 * logp_diffs[0]


def test_stock_trl_still_fails_at_its_first_sync_there(tmp_path):
    """When this fails TRL has been repaired, and `LowBitVLLMGeneration` can lean on it."""
    assert "weight_loader" in isolated(_stock, save_model(tmp_path / "model"), str(tmp_path / "run"))
