"""`qarl_trl.batch`: masks, and dropping by rescaled advantages."""

import pytest
import torch

from qarl_trl.batch import drop_out_of_band, loss_mask
from qarl_trl.loss import TrustBand, tbpo_loss


BAND = TrustBand(4e-4, 3e-4, 7e-4, 2.0)
DROP = TrustBand(4e-4, 3e-4, 7e-4, 2.0, out_of_band="drop")


def make_inputs(log_ratios, advantages, tokens=3):
    """A batch whose completions have the given log ratios; returns (inputs, logps)."""
    old = torch.full((len(log_ratios), tokens), -1.0)
    inputs = {
        "completion_mask": torch.ones_like(old).long(),
        "old_per_token_logps": old,
        "advantages": torch.tensor(advantages),
    }
    return inputs, old + torch.tensor(log_ratios)[:, None]


def test_mask_is_completion_times_tool_mask():
    completion, tool = torch.tensor([[1, 1, 1, 0]]), torch.tensor([[1, 0, 1, 1]])
    assert loss_mask({"completion_mask": completion}) is completion
    assert loss_mask({"completion_mask": completion, "tool_mask": tool}).tolist() == [[1, 0, 1, 0]]


@pytest.mark.parametrize(
    ("log_ratios", "advantages", "expected"),
    [
        ([0.0, 0.0], [1.0, -1.0], [1.0, -1.0]),
        ([0.0, 1e-3], [1.0, 2.0], [2.0, 0.0]),  # one of two kept: it counts twice
        ([-1e-3, 0.0, 1e-3, 0.0], [-1.0, -1.0, -1.0, 1.0], [0.0, -2.0, 0.0, 2.0]),
        ([1e-3, 1e-3], [1.0, -1.0], [0.0, 0.0]),  # nothing kept: zero, not a division by zero
        ([1e-3, 1e-3, 0.0], [0.0, 1.0, 1.0], [0.0, 0.0, 1.5]),  # a zero advantage stays in the mean
    ],
)
def test_dropping_rescales_the_advantages_of_the_kept(log_ratios, advantages, expected):
    inputs, logps = make_inputs(log_ratios, advantages)
    drop_out_of_band(inputs, logps, DROP)
    assert inputs["advantages"].tolist() == pytest.approx(expected)
    # What that is for: TRL's mean over the batch becomes the mean over the kept.
    clipped, _ = tbpo_loss(
        logps, inputs["old_per_token_logps"], None, inputs["advantages"], torch.ones(logps.shape), BAND
    )
    dropped, _ = tbpo_loss(
        logps, inputs["old_per_token_logps"], None, torch.tensor(advantages), torch.ones(logps.shape), DROP
    )
    assert clipped.item() == pytest.approx(dropped.item(), abs=1e-6)


def test_the_tool_mask_decides_what_is_out_of_band():
    inputs, logps = make_inputs([0.0, 0.0], [1.0, 1.0])
    logps[0, 2] += 0.01
    inputs["tool_mask"] = torch.tensor([[1, 1, 0], [1, 1, 1]])
    drop_out_of_band(inputs, logps, DROP)
    assert inputs["advantages"].tolist() == [1.0, 1.0]
    del inputs["tool_mask"]
    drop_out_of_band(inputs, logps, DROP)
    assert inputs["advantages"].tolist() == [0.0, 2.0]  # control


def test_without_old_log_probs_every_ratio_is_one():
    inputs, logps = make_inputs([1e-3, -1e-3], [1.0, -1.0])
    del inputs["old_per_token_logps"]
    drop_out_of_band(inputs, logps, DROP)
    assert inputs["advantages"].tolist() == [1.0, -1.0]
