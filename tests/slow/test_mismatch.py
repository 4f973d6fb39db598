"""How far engine and learner disagree, on real samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slow.isolated import isolated
from slow.toys import logged, make_trainer, random_adapter, randomize_adapter, save_model


pytestmark = pytest.mark.slow
# So many sampled tokens are enough to compare means.
TOKENS = 4_000
# 128 rows a step and two steps a batch; the prompts have six tokens.
PROMPT_TOKENS = 256 * 6
ARMS: dict[str, dict[str, Any]] = {
    # First: a CPU without a kernel for W4A16 skips the tests here, before it has run an arm.
    "w4a16": {"quant_scheme": "W4A16"},
    "bf16": {"quant_scheme": "none"},
    "w4a16_stock": {"quant_scheme": "W4A16", "learner_ops": "stock"},
    "frozen_stock": {"quant_scheme": "W4A16", "learner_ops": "stock", "lora_base": "frozen"},
    # Its mismatch is measured though nothing corrects it.
    "w4a16_rollout_only": {
        "quant_scheme": "W4A16",
        "quantize_learner": False,
        "vllm_importance_sampling_correction": False,
    },
}


def logp_diff(model: str, folder: str, changes: dict[str, Any]) -> dict[str, float]:
    """What a run logs that samples one batch and learns nothing."""
    import numpy as np
    import torch

    torch.manual_seed(0)
    trainer = make_trainer(
        model,
        Path(folder),
        random_adapter() if "lora_base" in changes else None,
        max_completion_length=48,
        learning_rate=0.0,  # the learner of all updates is the one that sampled
        per_device_train_batch_size=128,
        steps_per_generation=2,
        max_steps=2,
        num_generations=8,
        **changes,
    )
    if "lora_base" in changes:
        # A new adapter adds nothing, so its arithmetic would not show.
        randomize_adapter(trainer.model)
    trainer.train()

    tokens = 0.0
    first_ratios = []
    for row in trainer.state.log_history:
        # Of a rollout, whose first update has the learner that sampled.
        if "mismatch/logp_diff_mean" in row:
            tokens += row["num_tokens"] - PROMPT_TOKENS
            first_ratios.append(row["ratio/max"])
    return {
        "logp_diff": float(np.mean(logged(trainer, "mismatch/logp_diff_mean"))),
        "tokens": tokens,
        "first_ratio": float(np.abs(np.array(first_ratios) - 1).max()),
    }


@pytest.fixture(scope="module")
def logp_diffs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logp_diff")
    model = save_model(folder / "model", layers=4)

    runs = {}
    for name, changes in ARMS.items():
        runs[name] = isolated(logp_diff, model, str(folder / name), changes)
    return runs


def test_the_logged_logp_diff_is_the_last_bit_of_float32(logp_diffs):
    """Of two formulas for a log-softmax; test_invariants.py compares by one, and has every scheme."""
    assert min(arm["tokens"] for arm in logp_diffs.values()) >= TOKENS
    assert 0 < logp_diffs["w4a16"]["logp_diff"] < 1e-6  # measured 1e-7


def test_on_transformers_operations_the_aligned_logp_diff_is_the_bf16_floor(logp_diffs):
    # One rounding elsewhere in the quantizer costs a multiple of the floor, not a tenth of it.
    assert logp_diffs["w4a16_stock"]["logp_diff"] <= 1.1 * logp_diffs["bf16"]["logp_diff"]


def test_so_it_is_of_an_adapter_beside_a_frozen_base(logp_diffs):
    """Its control, another adapter or a merged base in the engine, is in test_frozen.py."""
    assert 0 < logp_diffs["frozen_stock"]["logp_diff"] <= 1.05 * logp_diffs["bf16"]["logp_diff"]


def test_without_the_quantized_learner_the_logp_diff_is_at_least_five_times_larger(logp_diffs):
    """The control: were the learner's quantization bypassed, the tests above could not pass."""
    assert logp_diffs["w4a16_rollout_only"]["logp_diff"] >= 5 * logp_diffs["w4a16_stock"]["logp_diff"]


def test_the_ratio_is_exactly_one_on_the_first_update_of_a_rollout_batch(logp_diffs):
    assert logp_diffs["w4a16"]["first_ratio"] == 0.0
