"""Packed passes in two processes that would need different numbers of them, through `QaRLTrainer`: padded rows' training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from learner.test_features import SMALL, assert_equal_runs, make, plain_losses, train

from slow.isolated import isolated_group
from slow.test_processes import FSDP2, _shard_on_cpu
from slow.toys import save_model


pytestmark = pytest.mark.slow


def _trained(model: str, folder: str, fsdp: bool, scheme: str | None) -> list[dict[str, Any]]:
    """Gradients and sizes of the passes, padded and packed."""
    torch.set_num_threads(1)
    if fsdp:
        os.environ.update(FSDP2 | {"ACCELERATE_MIXED_PRECISION": "no"})
        _shard_on_cpu()
    runs = []
    for budget in (None, SMALL):
        changes = plain_losses(scheme) | {"max_tokens_per_pass": budget}
        trainer = make(model, Path(folder) / str(budget), **changes)
        kind = "FSDP" if fsdp else "MULTI_CPU"
        assert (trainer.accelerator.distributed_type, trainer.accelerator.num_processes) == (kind, 2)
        runs.append(train(trainer))
    assert_equal_runs(runs[1], runs[0])
    return [
        {
            "gradients": {name: gradient.numpy() for name, gradient in run["gradients"][0].items()},
            "tokens": [size.numel() for size in run["passes"]],
        }
        for run in runs
    ]


@pytest.mark.parametrize("scheme", [None, "W4A16"])
@pytest.mark.parametrize("fsdp", [False, True], ids=["DDP", "FSDP2"])
def test_processes_of_unequal_lengths_train_as_padded_rows_do(tmp_path, fsdp, scheme):
    """A process that made fewer passes would leave the other waiting under FSDP2, until the limit below."""
    model = save_model(tmp_path / "model", layers=1)
    first, second = isolated_group(_trained, 2, model, str(tmp_path), fsdp, scheme, timeout=100)
    assert len(first[1]["tokens"]) == len(second[1]["tokens"]) > len(first[0]["tokens"])
    # The second alone would need one pass for a micro-batch.
    assert sum(second[1]["tokens"]) <= SMALL * len(second[0]["tokens"])
    for name, gradient in first[1]["gradients"].items():
        assert (gradient == second[1]["gradients"][name]).all(), name
