"""Arms that begin with a distilled start: what is distilled, and which arms it is for."""

from __future__ import annotations

import copy
import json
from statistics import fmean

import arms
import arms_cell
import arms_distill
import torch
from arms_task import add_outliers
from sums import make_model

from qarl_trl.quant.store import find_store


def test_a_distillation_brings_the_rounded_toy_nearer_to_its_unquantized_form():
    regime = arms.REGIMES["long_distilled"] | {"numbers": 3, "max_completion_length": 40}
    model = make_model(0, **arms.TOY).float()
    add_outliers(model, channels=4, factor=8)
    before = copy.deepcopy(model.state_dict())

    distilled, losses = arms_distill.distill(model, regime, updates=20, rate=1e-3)

    # The first updates warm up.
    assert fmean(losses[-5:]) < 0.9 * fmean(losses[:3])
    # The teacher is as it was, and what is returned are master weights alone.
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name])
    assert not torch.equal(distilled.lm_head.weight, model.lm_head.weight)
    assert find_store(distilled) is None


def test_all_cells_began_with_the_distilled_start_that_is_beside_them():
    weights = arms.sha_of(arms.distilled_file_of(arms.REGIMES["long_distilled"]))
    scores = json.loads((arms.FOLDER / "long_distilled_before.json").read_text())
    assert scores["start_sha256"] == weights

    for file in (arms.FOLDER / "long_distilled").glob("*.json"):
        cell = json.loads(file.read_text())
        is_distilled = not cell["arm"].startswith("bf16")
        assert cell["distilled_sha256"] == (weights if is_distilled else None), file.name


def test_arms_in_low_bits_alone_begin_with_the_distilled_start():
    regime = arms.REGIMES["long_distilled"]

    distilled = set()
    for arm in arms.arms_of("long_distilled"):
        if arms_cell.starts_distilled(arms.ARMS[arm], regime):
            distilled.add(arm)

    assert distilled == {"rollout-only GRPO", "QaRL GRPO"}
    assert not arms_cell.starts_distilled(arms.ARMS["QaRL GRPO"], arms.REGIMES["long"])
