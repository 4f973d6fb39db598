"""TBPO in `QaRLTrainer`: what a run differentiates is the formula, and its first ratios are 1."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import references
import torch
from toy_runs import make

from qarl_trl import QaRLTrainer
from qarl_trl.loss import TrustBand, loss_mask
from qarl_trl.metrics import ratios


class LossComparison:
    """
    Computes each loss of a trainer also by the formula in Python floats, once more with wrong bounds.

    Attributes:
        rows: Of each micro-batch the trainer's loss, the formula's, and the formula's with `wrong_bounds`.
    """

    def __init__(self, trainer: QaRLTrainer) -> None:
        self.rows: list[tuple[float, float, float]] = []
        self._trainer = trainer
        self._compute_loss = trainer._compute_loss
        trainer._compute_loss = self._compute_and_compare

    def _compute_and_compare(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        trainer = self._trainer
        forward = trainer._get_per_token_logps_and_entropies
        logps = []

        def spy(*args: Any, **kwargs: Any) -> Any:
            result = forward(*args, **kwargs)
            logps.append(result[0].detach())
            return result

        trainer._get_per_token_logps_and_entropies = spy
        loss = self._compute_loss(model, inputs)
        trainer._get_per_token_logps_and_entropies = forward

        band = trainer.args.trust_band
        undivided = loss.item() * trainer.current_gradient_accumulation_steps
        by_formula = tbpo_by_formula(logps[0], inputs, bounds_of(band))
        by_wrong_formula = tbpo_by_formula(logps[0], inputs, wrong_bounds(band))
        self.rows.append((undivided, by_formula, by_wrong_formula))
        return loss


def bounds_of(band: TrustBand) -> dict[str, float]:
    return {"epsilon_high": band.epsilon_high, "delta_low": band.delta_low, "delta_high": band.delta_high}


def wrong_bounds(band: TrustBand) -> dict[str, float]:
    """The lower bound in place of the upper one and the other way round, and all of them three times as wide."""
    return {
        "epsilon_high": 3 * band.delta_low,
        "delta_low": 3 * band.epsilon_high,
        "delta_high": 3 * band.delta_high,
    }


def tbpo_by_formula(logps: torch.Tensor, inputs: dict[str, Any], bounds: dict[str, float]) -> float:
    """The loss of a micro-batch without an engine, in Python floats."""
    mask = loss_mask(inputs)
    old = inputs.get("old_per_token_logps", logps)
    # A completion without a token that counts is a constant in the formula and nothing in TRL's sum of tokens.
    advantages = inputs["advantages"] * mask.bool().any(-1)
    loss, *_ = references.tbpo(
        logps.tolist(), old.tolist(), None, advantages.tolist(), mask.tolist(), cap=2.0, **bounds
    )
    return loss


@pytest.mark.parametrize(
    ("changes", "bounds_matter"),
    [
        ({}, True),
        ({"num_iterations": 2}, True),
        # A rollout batch ends inside an update.
        ({"steps_per_generation": 3, "gradient_accumulation_steps": 2}, True),
        ({"quant_scheme": "FP8_DYNAMIC"}, True),
        # Without the control: hardly an answer leaves the bounds here.
        ({"mask_truncated_completions": True, "learning_rate": 1e-2}, False),
        ({"quantize_learner": False}, False),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_what_trains_is_tbpo(dense_model, tmp_path, changes, bounds_matter):
    """Every micro-batch of a real run, against the formula."""
    trainer = make(dense_model, tmp_path, **changes)
    comparison = LossComparison(trainer)

    trainer.train()

    assert len(comparison.rows) >= 4
    # Measured 2e-7: the same float32 numbers, added up in another order.
    losses, expected, wrong = np.transpose(comparison.rows)
    assert abs(losses - expected).max() < 1e-6
    # Control: other bounds are another loss.
    if bounds_matter:
        assert abs(expected - wrong).max() > 1e-5


# The first ratios ------------------------------------------------------------------------------------------------


# With 3 micro-batches to a rollout batch and an update every 2, a rollout batch begins in the middle of an update:
# only its first micro-batch comes before an update.
BEGINS_IN_AN_UPDATE = {"steps_per_generation": 3, "gradient_accumulation_steps": 2, "max_steps": 6}


def test_first_ratios_of_one_are_not_warned_about(dense_model, tmp_path, caplog):
    ratios.logger.warning_once.cache_clear()  # of other tests

    with caplog.at_level("WARNING"):
        make(dense_model, tmp_path, **BEGINS_IN_AN_UPDATE).train()

    assert "before any update" not in caplog.text


def test_a_first_ratio_that_is_not_one_is_named_once(dense_model, tmp_path, caplog):
    ratios.logger.warning_once.cache_clear()  # of other tests
    trainer = make(dense_model, tmp_path, **BEGINS_IN_AN_UPDATE)
    forward = trainer._get_per_token_logps_and_entropies

    def shifted(*args, **kwargs):
        result = forward(*args, **kwargs)
        # The loss, not `old`.
        if torch.is_grad_enabled():
            logps, entropies, _ = result
            return logps + 1e-3, entropies, None
        return result

    trainer._get_per_token_logps_and_entropies = shifted
    with caplog.at_level("WARNING"):
        trainer.train()

    assert caplog.text.count("before any update") == 1
