"""What a plan says of the engine, against the tensors of a real one and the bytes that a publish moved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qarl_trl.memory import model as meta
from slow.isolated import isolated
from slow.toys import make_trainer, save_model


pytestmark = pytest.mark.slow


def _engine(model: str, folder: str, scheme: str) -> tuple[int, dict[str, int]]:
    """Bytes of a publish, and of the parameters of the engine that took it."""
    trainer = make_trainer(model, Path(folder), quant_scheme=scheme, publish_verify="off")
    engine = trainer.vllm_generation
    engine.sync_weights()
    held = engine.llm.llm_engine.model_executor.driver_worker.model_runner.model
    return engine.last_publish.num_bytes, {name: p.nbytes for name, p in held.named_parameters()}


@pytest.mark.parametrize("scheme", ["W4A16", "FP8_DYNAMIC", "none"])
def test_bytes_of_a_publish_and_of_the_engine_that_took_it(tmp_path, scheme):
    model = save_model(tmp_path / "model")
    moved, held = isolated(_engine, model, str(tmp_path), scheme)
    plan = None if scheme == "none" else scheme
    skeleton = meta.skeleton(meta.read_config(model), torch.float32, plan=plan)
    assert moved == meta.published(skeleton)
    if scheme != "none":  # of plain layers the CPU engine's kernels keep the weights in a form that is no parameter
        assert sum(held.values()) == pytest.approx(moved, rel=0.02)
