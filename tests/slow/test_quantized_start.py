"""Start from a GPTQ checkpoint with frozen scales: before training the engine is that checkpoint, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slow.isolated import isolated
from slow.toys import (
    engine_logprobs,
    fresh_engine_logprobs,
    make_trainer,
    save_gptq,
    save_model,
    stored_tensors,
    sync,
)


pytestmark = pytest.mark.slow


def _start(model: str, folder: str, freeze: bool) -> dict[str, Any]:
    import torch

    trainer = make_trainer(model, Path(folder), quant_scheme="checkpoint", quant_freeze_scales=freeze)
    engine = trainer.vllm_generation
    synced = sync(engine)
    first = engine_logprobs(engine.llm)
    start = stored_tensors(model)
    same = {n for n, t in synced.items() if n in start and t.dtype == start[n].dtype and torch.equal(t, start[n])}
    trainer.train()
    engine.sync_weights()
    return {
        "names": set(synced) == set(start),
        "other": sorted(set(synced) - same),
        "before": first,
        "after": engine_logprobs(engine.llm),
        "logp_diffs": [
            r["mismatch/logp_diff_mean"] for r in trainer.state.log_history if "mismatch/logp_diff_mean" in r
        ],
        "scales_kept": all(
            torch.equal(m.low_bit().scale, start[f"{n}.weight_scale"]) for n, m in _quantized(trainer.model)
        ),
    }


def _quantized(model: Any) -> Any:
    from qarl_trl.quant import quantized_modules

    return quantized_modules(model)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    pytest.importorskip("llmcompressor")
    folder = tmp_path_factory.mktemp("gptq")
    return isolated(save_gptq, save_model(folder / "model"), folder / "gptq")


@pytest.fixture(scope="module")
def fresh(checkpoint):
    return isolated(fresh_engine_logprobs, checkpoint)


def test_with_frozen_scales_the_engine_starts_as_the_checkpoint_bit_for_bit(checkpoint, fresh, tmp_path):
    found = isolated(_start, checkpoint, str(tmp_path / "run"), True)
    assert found["names"]
    assert found["other"] == []
    assert found["before"] == fresh
    # Control: training moves the answers, and the scales stay all the same.
    assert found["after"] != found["before"]
    assert found["scales_kept"]
    assert max(found["logp_diffs"]) < 1e-6  # measured 1e-7; a learner on other scales is five orders of magnitude off


def test_free_scales_start_as_another_model(checkpoint, fresh, tmp_path):
    """Control of the test above: what `quant_freeze_scales=False` syncs is not the checkpoint."""
    found = isolated(_start, checkpoint, str(tmp_path / "run"), False)
    assert found["names"]
    assert len([n for n in found["other"] if n.endswith("weight_scale")]) == 14
    assert found["before"] != fresh
    assert max(found["logp_diffs"]) < 1e-6  # engine and learner agree on the new model, too
