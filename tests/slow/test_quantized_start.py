"""Start from a GPTQ checkpoint: scales follow the weights, and engine and learner agree on the model that this gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slow.isolated import isolated
from slow.toys import make_trainer, save_gptq, save_model, stored_tensors, sync


pytestmark = pytest.mark.slow


def _start(model: str, folder: str) -> dict[str, Any]:
    import torch

    trainer = make_trainer(model, Path(folder), quant_scheme="checkpoint")
    synced, start = sync(trainer.vllm_generation), stored_tensors(model)
    trainer.train()
    return {
        "names": set(synced) == set(start),
        "other": [n for n, t in synced.items() if n.endswith("weight_scale") and not torch.equal(t, start[n])],
        "logp_diffs": [
            r["mismatch/logp_diff_mean"] for r in trainer.state.log_history if "mismatch/logp_diff_mean" in r
        ],
    }


def test_free_scales_start_as_another_model_of_the_same_tensors(tmp_path):
    """What keeps the checkpoint byte for byte is a frozen base: test_frozen.py."""
    pytest.importorskip("llmcompressor")
    checkpoint = isolated(save_gptq, save_model(tmp_path / "model"), tmp_path / "gptq")
    found = isolated(_start, checkpoint, str(tmp_path / "run"))
    assert found["names"] and len(found["other"]) == 14
    assert max(found["logp_diffs"]) < 1e-6  # measured 1e-7; a learner on other scales is five orders of magnitude off
