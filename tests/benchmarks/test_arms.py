"""The comparison of arms: its task, its outlier channels, its settings, and the tables of docs/results.md."""

from __future__ import annotations

import copy
import json
import random
import sys
from argparse import Namespace
from itertools import islice
from pathlib import Path

import pytest
import torch
from sums import make_model, make_tokenizer

from qarl_trl import QaRLConfig
from qarl_trl.quant import apply_quantization


ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import arms  # noqa: E402
import arms_table  # noqa: E402
import arms_task  # noqa: E402


def test_the_working_adds_one_number_a_line_and_ends_in_the_sum():
    rng = random.Random(0)
    for _ in range(200):
        numbers = [rng.randint(10, 99), *(rng.randint(1, 9) for _ in range(arms_task.NUMBERS - 1))]
        lines = arms_task.work(numbers).split("=")
        assert [int(line.split("+")[0]) for line in lines] == [sum(numbers[: i + 2]) % 100 for i in range(len(lines))]
        assert lines[0].split("+")[1:] == [*map(str, numbers[2:]), "0"]
        assert {len(line) for line in lines} == {2 + 2 * (arms_task.NUMBERS - 1)}
    assert arms_task.work([17, 5, 8]) == "22+8+0=30+0+0"
    assert arms_task.work([17, 5, 8], iter([True, False])) == "12+8+0=20+0+0"


def test_answers_have_118_tokens_and_the_splits_share_no_problem():
    splits = [list(islice(arms_task.problems(0, 0.5, held_out), 500)) for held_out in (False, True)]
    tokenizer = make_tokenizer()
    assert {len(tokenizer.encode(row["demonstration"])) for row in splits[0]} == {118}
    assert not {row["prompt"] for row in splits[0]} & {row["prompt"] for row in splits[1]}
    slips = [row["demonstration"] for row in splits[0] if not row["demonstration"].endswith(row["answer"])]
    assert len(slips) > 100  # control: half of the carries are forgotten


def test_outlier_channels_leave_the_model_as_it_is_and_hurt_its_quantization():
    plain = make_model(0, **arms.TOY).to(torch.bfloat16).eval()
    with_outliers = copy.deepcopy(plain)
    arms_task.add_outliers(with_outliers, channels=4, factor=8)
    ids = torch.randint(2, 32, (4, 60), generator=torch.Generator().manual_seed(0))

    def logits(model):
        with torch.no_grad():
            return model(input_ids=ids).logits.float()

    expected = logits(plain)
    assert torch.equal(logits(with_outliers), expected)
    errors = []
    for model in (plain, with_outliers):
        apply_quantization(model, "W4A16", group_size=-1)
        errors.append((logits(model) - expected).abs().mean().item())
    assert errors[1] > 2 * errors[0] > 0  # three seeds: 2.8 to 3.4 times


@pytest.mark.parametrize("arm", arms.ARMS)
@pytest.mark.parametrize("regime", arms.REGIMES)
def test_the_settings_of_every_cell_are_accepted(tmp_path, regime, arm):
    settings, chosen = arms.settings_of(regime, arm)
    quantization = {} if chosen.get("quant_scheme") == "none" else settings["quantization"]
    chosen.pop("kpop", None)
    args = QaRLConfig(output_dir=str(tmp_path), use_cpu=True, use_vllm=True, report_to=[], **quantization | chosen)
    assert args.quantized == (not arm.startswith("bf16"))
    assert args.quantize_learner == (not arm.startswith("rollout-only"))
    if "GSPO" in arm:
        assert (args.epsilon, args.epsilon_high) == (3 * settings["band"], 4 * settings["band"])


def test_kpop_keeps_tokens_whose_binary_divergence_is_small_both_ways():
    p, q = torch.tensor([[0.5, 0.9, 0.01, 0.5, 0.999]]), torch.tensor([[0.5, 0.7, 0.04, 0.2, 0.8]])
    coins = [torch.stack((x, 1 - x), -1) for x in (p, q)]
    there, back = ((a * (a / b).log()).sum(-1) for a, b in (coins, coins[::-1]))
    kept = arms_task.kept_by_kpop(p.log(), q.log(), 0.1)
    assert torch.equal(kept, torch.maximum(there, back) <= 0.1)
    assert kept.tolist() == [
        [True, False, True, False, False]
    ]  # 0.9 for 0.7 goes, the rare token whose ratio is 4 stays


def test_arms_share_everything_but_the_method():
    """One rate and one budget for all."""
    method = {
        "loss_type",
        "importance_sampling_level",
        "epsilon",
        "epsilon_high",
        "delta",
        "quant_scheme",
        "quantize_learner",
    }
    method |= {"quant_kernel", "learner_ops"}
    method |= {f"vllm_importance_sampling_{name}" for name in ("mode", "clip_min", "clip_max", "correction")} | {
        "kpop"
    }
    assert all(set(arms.settings_of("hard", arm)[1]) <= method for arm in arms.ARMS)


def test_all_cells_have_the_start_that_is_kept():
    cells = [json.loads(file.read_text()) for file in arms.FOLDER.glob("*/*.json")]
    kept = {file.stem: arms.sha_of(file) for file in arms.FOLDER.glob("*.safetensors")}
    assert {arms.start_of(cell["settings"]): cell["base_sha256"] for cell in cells} == kept
    assert all(cell["base_sha256"] == kept[arms.start_of(cell["settings"])] for cell in cells)


def test_a_kept_start_is_the_start_and_another_one_is_refused(tmp_path, monkeypatch):
    regime = arms.HARD | {"warm_steps": 1}
    kept = tmp_path / "kept.safetensors"
    arms_task.warm_start(tmp_path / "trained", regime, kept)
    (tmp_path / "trained" / arms.WEIGHTS).rename(kept)
    arms_task.warm_start(tmp_path / "copied", regime | {"forgotten": 0.5}, kept)
    assert (tmp_path / "copied" / arms.WEIGHTS).read_bytes() == kept.read_bytes()
    arms_task.warm_start(tmp_path / "other", regime | {"forgotten": 0.5}, tmp_path / "missing")  # control
    monkeypatch.setattr(arms, "FOLDER", tmp_path / "results")
    (tmp_path / "results/hard").mkdir(parents=True)
    cell = {"base_sha256": arms.sha_of(kept), "settings": regime}
    (tmp_path / "results/hard/cell.json").write_text(json.dumps(cell))
    arms.check_start(tmp_path / "copied" / arms.WEIGHTS, arms.start_of(regime))
    with pytest.raises(SystemExit, match="must have one start"):
        arms.check_start(tmp_path / "other" / arms.WEIGHTS, arms.start_of(regime))
    arms.check_start(tmp_path / "other" / arms.WEIGHTS, arms.start_of(regime | {"start": 1}))  # another start's cells


def test_cells_come_seed_by_seed_and_each_has_a_file_of_its_own():
    wanted = arms.cells(Namespace(regime=["hard", "w4a8"], arms=None, seeds=None))
    assert wanted[: len(arms.ARMS)] == [("hard", arm, 0) for arm in arms.ARMS]
    assert len({arms.file_of(*cell) for cell in wanted}) == len(wanted) == 5 * 5 + (len(arms.ARMS) - 5) * 3 + 3 * 3
    stale = [arm for _, arm, _ in arms.cells(Namespace(regime=["stale"], arms=None, seeds=[0]))]
    assert stale == [*arms.MAIN, *arms.UNWEIGHTED]


@pytest.mark.parametrize(
    ("reward", "expected"),
    [([0.2, 0.4, 0.6, 0.6, 0.6], False), ([0.6, 0.6, 0.6, 0.5, 0.3, 0.0], True), ([0.3, 0.3, 0.3], False)],
)
def test_a_run_collapses_when_it_ends_below_half_of_its_best(reward, expected):
    assert arms_table.collapsed({"log": {"reward": reward}}) is expected


def test_the_tables_of_the_doc_are_what_the_script_prints():
    text = (ROOT / "docs/results.md").read_text()
    tables = arms_table.tables().split("<!-- table: ")[1:]
    assert len(tables) == 6
    assert [table.split(" -->")[0] for table in tables if "<!-- table: " + table.strip() not in text] == []
    assert "<!-- table: " + tables[0].strip().replace("| bf16 GRPO | ", "| bf16 GRPO | 1") not in text  # control
