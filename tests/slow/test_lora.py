"""LoRA on a real engine: how far engine and learner disagree (test_invariants.py has what is equal bit for bit)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slow.isolated import isolated
from slow.toys import make_trainer, random_adapter, randomize_adapter, save_model


pytestmark = pytest.mark.slow
TOKENS = 4_000
# On the engine's operations the mismatch is 0 (test_invariants.py); on transformers' it has a size to compare with.
ON_STOCK = {"quant_scheme": "W4A16", "learner_ops": "stock"}


def _beside(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Control: `x Q(W)^T + s x A^T B^T`, what quantizing `base_layer` alone computes."""
    from qarl_trl.quant import quantize_weight

    kernel = layer._get_gemm(x.device)
    x, adapter = x.to(layer._compute_dtype(x)), layer._slot
    if "_base_quantized" not in layer.__dict__:
        layer.__dict__["_base_quantized"] = quantize_weight(layer.base_layer.weight, layer.scheme)
    y, _ = kernel.forward(x, layer.__dict__["_base_quantized"])
    return y + layer.lora_B[adapter](layer.lora_A[adapter](x)) * layer.scaling[adapter]


def _logp_diff(model: str, folder: str, changes: dict[str, Any], control: str | None) -> dict[str, float]:
    import numpy as np

    from qarl_trl.quant.lora import LoraQuantLinear

    torch.manual_seed(0)
    size = {"per_device_train_batch_size": 128, "steps_per_generation": 2, "max_steps": 2, "num_generations": 8}
    trainer = make_trainer(
        model, Path(folder), random_adapter(), max_completion_length=48, learning_rate=0.0, **size, **changes
    )
    randomize_adapter(trainer.model)
    if control == "base_layer_only":
        LoraQuantLinear.forward = _beside
    if control == "base_synced":
        # Another adapter in the engine: B = 0, so the engine answers from the quantized base.
        sync = trainer.vllm_generation.sync_weights

        def without_adapter() -> None:
            randomize_adapter(trainer.model, scale=0.0)
            sync()
            randomize_adapter(trainer.model)

        trainer.vllm_generation.sync_weights = without_adapter
    trainer.train()
    rows = [row for row in trainer.state.log_history if "mismatch/logp_diff_mean" in row]
    return {
        "logp_diff": float(np.mean([row["mismatch/logp_diff_mean"] for row in rows])),
        "max": float(max(row["mismatch/logp_diff_max"] for row in rows)),
        "tokens": float(sum(row["num_tokens"] for row in rows)) - 256 * 6 * len(rows),
        "first_ratio": max(abs(row["ratio/max"] - 1) for row in rows),
    }


@pytest.fixture(scope="module")
def logp_diffs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logp_diff")
    model = save_model(folder / "model", layers=4)
    arms = {
        "w4a16": (model, ON_STOCK, None),
        # The sync check would stop these two before they can be measured.
        "base_layer_only": (model, ON_STOCK | {"verify_sync": "off"}, "base_layer_only"),
        "base_synced": (model, ON_STOCK | {"verify_sync": "off"}, "base_synced"),
    }
    found = {}
    for name, (path, changes, control) in arms.items():
        found[name] = isolated(_logp_diff, path, str(folder / name), changes, control)
    print({name: {key: round(value, 4) for key, value in arm.items()} for name, arm in found.items()})
    return found


@pytest.mark.parametrize("control", ["base_layer_only", "base_synced"])
def test_any_other_weight_in_engine_or_learner_gives_a_much_larger_logp_diff(logp_diffs, control):
    assert min(arm["tokens"] for arm in logp_diffs.values()) >= TOKENS
    assert logp_diffs[control]["logp_diff"] >= 5 * logp_diffs["w4a16"]["logp_diff"]


def test_the_ratio_is_exactly_one_on_the_first_update_of_a_rollout_batch(logp_diffs):
    assert logp_diffs["w4a16"]["first_ratio"] == 0.0
