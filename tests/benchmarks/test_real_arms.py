"""The comparison of arms on a real model: its settings, its errors, and its table in docs/results.md."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml


ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import real_arms  # noqa: E402


def test_the_tables_of_the_doc_are_what_the_script_prints():
    text = (ROOT / "docs/results.md").read_text()
    for regime in real_arms.REGIMES:
        if not (real_arms.FOLDER / regime).exists():
            continue
        for mark, table in real_arms.tables(regime).items():
            shown = text.split(mark)[1].split("\n<!-- end -->")[0]
            assert shown == table
    table = real_arms.table("g64")
    assert "Not run: " in table or all(real_arms.cells_of("g64", arm) for arm in real_arms.ARMS)


def test_the_recipe_of_the_example_is_the_arm_qarl_tbpo():
    recipe, arm = yaml.safe_load((ROOT / "examples/smollm2/qarl.yaml").read_text()), real_arms.G64
    rows = arm["prompts"] * arm["answers"]
    assert recipe["max_steps"] == arm["batches"] * arm["updates"]
    assert recipe["per_device_train_batch_size"] * recipe["steps_per_generation"] == rows
    assert recipe["per_device_train_batch_size"] * recipe["gradient_accumulation_steps"] == rows // arm["updates"]
    same = ("learning_rate", "max_completion_length")
    assert {name: recipe[name] for name in same} == {name: arm[name] for name in same}
    bounds = [recipe[f"tbpo_{name}"] for name in ("epsilon_high", "delta_low", "delta_high")]
    assert bounds == pytest.approx([4 * arm["band"], 3 * arm["band"], 7 * arm["band"]])
    assert {name: recipe[name] for name in arm["quantization"]} == arm["quantization"]


def test_an_error_holds_the_choice_of_problems_and_of_seeds():
    cells = [{"samples": 4, "scores": {"low_bit": right}} for right in ([4, 0, 2], [2, 0, 0])]
    first, second = cells
    assert real_arms.difference([(first, second)], ["a", "b"], "low_bit") == "-33.3 ± 16.7"  # -50, 0, -50
    assert real_arms.difference([(first, first)], ["a", "b"], "low_bit") == "+0.0 ± 0.0"
    mean, error = real_arms.accuracy(cells, "low_bit")
    assert mean == pytest.approx((50 + 50 / 3) / 2)
    problems, seeds = [75.0, 0.0, 25.0], [50.0, 50 / 3]  # percent, by problem and by seed
    by_problem = sum((p - 100 / 3) ** 2 for p in problems) / 2 / 3
    by_seed = sum((s - mean) ** 2 for s in seeds) / 1 / 2
    assert error == pytest.approx((by_problem + by_seed) ** 0.5)
    assert real_arms.accuracy(cells[:1], "low_bit")[1] == pytest.approx((2500 / 3) ** 0.5)  # of 100, 0 and 50


def test_each_seed_of_a_difference_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(real_arms, "FOLDER", tmp_path)
    right = {("rollout-only GRPO", 0): 1, ("rollout-only GRPO", 1): 2, ("QaRL GRPO", 0): 1, ("QaRL GRPO", 1): 4}
    for (arm, seed), of_four in right.items():
        path = real_arms.file_of("g64", arm, seed)
        path.parent.mkdir(exist_ok=True)
        scores = {name: [of_four] * 3 for name in ("low_bit", "masters")}
        path.write_text(json.dumps({"seed": seed, "samples": 4, "scores": scores, "start_sha256": "a"}))
    row = "| the learner's weights | rollout-only GRPO | QaRL GRPO | 2 | +25.0 ± 25.0 | +25.0 ± 25.0 |"  # 0 and 50
    assert row in real_arms.differences("g64").splitlines()
    path.write_text(path.read_text().replace('"a"', '"b"'))
    with pytest.raises(ValueError, match="must have one start"):
        real_arms.differences("g64")


def test_gptq_is_compared_with_the_cells_that_have_it(tmp_path, monkeypatch):
    monkeypatch.setattr(real_arms, "FOLDER", tmp_path)
    scores = {"low_bit": [1] * 3, "masters": [4] * 3, "gptq": [2] * 3}
    for arm, models in (("rollout-only TBPO", scores), ("QaRL TBPO", {"low_bit": [4] * 3, "masters": [4] * 3})):
        path = real_arms.file_of("g64", arm, 0)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"seed": 0, "samples": 4, "scores": models, "start_sha256": "a"}))
    rows = real_arms.differences("g64").splitlines()[2:]
    assert [row.split(" | ")[1:] for row in rows] == [
        ["rollout-only TBPO", "QaRL TBPO", "1", "+75.0 ± 0.0", "+0.0 ± 0.0 |"],
        ["rollout-only TBPO", "rollout-only TBPO, GPTQ", "1", "+25.0 ± 0.0", "- |"],
        ["QaRL TBPO", "rollout-only TBPO, GPTQ", "1", "-50.0 ± 0.0", "- |"],
    ]
