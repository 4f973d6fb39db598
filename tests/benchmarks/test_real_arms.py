"""The comparison of arms on a real model: its errors, its tables in docs/results.md, and its recipe in examples/."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import real_arms
import yaml


ROOT = Path(__file__).parents[2]


def test_the_tables_of_the_doc_are_what_the_script_prints():
    text = (ROOT / "docs" / "results.md").read_text()
    regimes_that_ran = [regime for regime in real_arms.REGIMES if (real_arms.FOLDER / regime).exists()]
    assert regimes_that_ran

    for regime in regimes_that_ran:
        for mark, table in real_arms.tables(regime).items():
            _, _, after = text.partition(mark)
            shown, _, _ = after.partition("\n<!-- end -->")
            assert shown == table


def test_the_table_says_that_an_arm_did_not_run():
    every_arm_ran = all(real_arms.cells_of("g64", arm) for arm in real_arms.ARMS)

    assert ("Not run: " in real_arms.table("g64")) == (not every_arm_ran)


def test_the_recipe_of_the_example_is_the_arm_qarl_tbpo():
    recipe = yaml.safe_load((ROOT / "examples" / "smollm2" / "qarl.yaml").read_text())
    arm = real_arms.G64
    rows = arm["prompts"] * arm["answers"]

    assert recipe["max_steps"] == arm["batches"] * arm["updates"]
    assert recipe["per_device_train_batch_size"] * recipe["steps_per_generation"] == rows
    assert recipe["per_device_train_batch_size"] * recipe["gradient_accumulation_steps"] == rows // arm["updates"]
    for name in ("learning_rate", "max_completion_length"):
        assert recipe[name] == arm[name]
    assert recipe["tbpo_epsilon_high"] == pytest.approx(4 * arm["band"])
    assert recipe["tbpo_delta_low"] == pytest.approx(3 * arm["band"])
    assert recipe["tbpo_delta_high"] == pytest.approx(7 * arm["band"])
    assert {name: recipe[name] for name in arm["quantization"]} == arm["quantization"]


def cell(right: list[int]) -> dict:
    """A cell whose low-bit model answered each problem four times, so many of them right."""
    return {"samples": 4, "scores": {"low_bit": right}}


def test_the_error_of_an_accuracy_holds_the_choice_of_problems_and_of_seeds():
    cells = [cell([4, 0, 2]), cell([2, 0, 0])]

    mean, error = real_arms.accuracy(cells, "low_bit")

    # In percent, by problem and by seed.
    problems = [75.0, 0.0, 25.0]
    seeds = [50.0, 50 / 3]
    assert mean == pytest.approx(sum(seeds) / 2)
    by_problem = sum((problem - mean) ** 2 for problem in problems) / 2 / 3
    by_seed = sum((seed - mean) ** 2 for seed in seeds) / 1 / 2
    assert error == pytest.approx((by_problem + by_seed) ** 0.5)


def test_the_error_of_a_single_seed_holds_the_choice_of_problems():
    _, error = real_arms.accuracy([cell([4, 0, 2])], "low_bit")

    assert error == pytest.approx((2500 / 3) ** 0.5)  # of 100, 0 and 50 percent


def test_a_difference_is_that_of_the_same_problems():
    first = cell([4, 0, 2])
    second = cell([2, 0, 0])

    assert real_arms.difference([(first, second)], ["a", "b"], "low_bit") == "-33.3 ± 16.7"  # of -50, 0 and -50
    assert real_arms.difference([(first, first)], ["a", "b"], "low_bit") == "+0.0 ± 0.0"


def write_cell(arm: str, seed: int, right_of_four: int, start: str = "a") -> None:
    """The file of a cell that answered three problems four times each, so many right of each."""
    path = real_arms.file_of("g64", arm, seed)
    path.parent.mkdir(exist_ok=True)
    scores = {name: [right_of_four] * 3 for name in ("low_bit", "masters")}
    path.write_text(json.dumps({"seed": seed, "samples": 4, "scores": scores, "start_sha256": start}))


def test_each_seed_of_a_difference_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(real_arms, "FOLDER", tmp_path)
    write_cell("rollout-only GRPO", 0, right_of_four=1)
    write_cell("QaRL GRPO", 0, right_of_four=1)
    write_cell("rollout-only GRPO", 1, right_of_four=2)
    write_cell("QaRL GRPO", 1, right_of_four=4)

    # Of 0 and 50 percent.
    row = "| the learner's weights | rollout-only GRPO | QaRL GRPO | 2 | +25.0 ± 25.0 | +25.0 ± 25.0 |"
    assert row in real_arms.differences("g64").splitlines()

    write_cell("QaRL GRPO", 1, right_of_four=4, start="b")
    with pytest.raises(ValueError, match="must have one start"):
        real_arms.differences("g64")
