"""Start from a GPTQ checkpoint with free scales.

They follow the weights, and engine and learner agree on the model that this gives.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slow.isolated import isolated
from slow.toys import logged, make_trainer, save_gptq, save_model, stored_tensors, sync


pytestmark = pytest.mark.slow


def _start(model: str, folder: str) -> dict[str, Any]:
    """Names of the first sync and of the checkpoint, scales that differ there, and mismatches of a run."""
    trainer = make_trainer(model, Path(folder), quant_scheme="checkpoint")
    synced = sync(trainer.vllm_generation)
    stored = stored_tensors(model)
    # The learner computes scales from the dequantized weights; GPTQ's need not be those.
    other_scales = []
    for name, tensor in synced.items():
        if name.endswith("weight_scale") and not torch.equal(tensor, stored[name]):
            other_scales.append(name)

    trainer.train()
    return {
        "synced": set(synced),
        "stored": set(stored),
        "other scales": other_scales,
        "logp_diffs": logged(trainer, "mismatch/logp_diff_mean"),
    }


def test_free_scales_start_as_another_model_of_the_same_tensors(tmp_path):
    """What keeps the checkpoint byte for byte is a frozen base: test_frozen.py."""
    pytest.importorskip("llmcompressor")
    checkpoint = isolated(save_gptq, save_model(tmp_path / "model"), tmp_path / "gptq")

    run = isolated(_start, checkpoint, str(tmp_path / "run"))

    assert run["synced"] == run["stored"]
    # Of all 7 layers of 2 blocks, or this start would be no other model.
    assert len(run["other scales"]) == 14
    assert max(run["logp_diffs"]) < 1e-6  # measured 1e-7; a learner on other scales is five orders of magnitude off
