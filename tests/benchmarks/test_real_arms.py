"""The comparison of arms on a real model: its settings are those of the recipe in examples/."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import real_arms
import yaml


ROOT = Path(__file__).parents[2]


def test_the_recipe_of_the_example_is_the_arm_qarl_tbpo():
    recipe = yaml.safe_load((ROOT / "examples" / "smollm2" / "qarl.yaml").read_text())
    # In groups of 64: SmolLM2's 576 inputs are no multiple of 128.
    arm = real_arms.G64
    rows = arm["prompts"] * arm["answers"]

    assert recipe["max_steps"] == arm["batches"] * arm["updates"]
    assert recipe["per_device_train_batch_size"] * recipe["steps_per_generation"] == rows
    assert recipe["per_device_train_batch_size"] * recipe["gradient_accumulation_steps"] == rows // arm["updates"]
    for name in ("learning_rate", "max_completion_length"):
        assert recipe[name] == arm[name]
    # The paper's bounds 4e-4, 3e-4 and 7e-4, times one factor.
    assert recipe["tbpo_epsilon_high"] == pytest.approx(4 * arm["band"])
    assert recipe["tbpo_delta_low"] == pytest.approx(3 * arm["band"])
    assert recipe["tbpo_delta_high"] == pytest.approx(7 * arm["band"])
    assert recipe.items() >= arm["quantization"].items()


def test_a_cell_that_was_stopped_after_its_training_is_only_scored(tmp_path, monkeypatch):
    start = tmp_path / "start"
    (start / "start").mkdir(parents=True)
    (start / "start" / "model.safetensors").write_bytes(b"start")
    trained = tmp_path / "trained" / "g64" / "qarl_grpo.7"
    (trained / "masters").mkdir(parents=True)
    of_start = real_arms.sha_of(start / "start" / "model.safetensors")
    facts = {"log": {"reward": [0.5]}, "machine": {"cpu": "another"}, "start_sha256": of_start}
    (trained / "trained.json").write_text(json.dumps(facts))
    monkeypatch.setattr(real_arms, "FOLDER", tmp_path / "results")
    # Scoring takes vLLM and minutes.
    monkeypatch.setattr(real_arms, "make_models", lambda folder, *_: [folder / "masters"])
    monkeypatch.setattr(real_arms, "score", lambda model, *_, **__: [int(model.is_dir())])

    real_arms.run_cell(start, "g64", "QaRL GRPO", 7, trained=tmp_path / "trained")

    result = json.loads(real_arms.file_of("g64", "QaRL GRPO", 7).read_text())
    assert result["log"] == {"reward": [0.5]}
    assert result["scores"] == {"masters": [1]}
    assert result["machine_of_training"] == {"cpu": "another"}
    # It waits no more.
    assert not trained.exists()
