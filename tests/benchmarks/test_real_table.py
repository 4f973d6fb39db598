"""Tables of the real model: errors, pairs, and the pages that hold them; and the commits that all cells name."""

from __future__ import annotations

import json
import math
import re
import statistics
import subprocess
from pathlib import Path

import pytest
import real_arms
import real_table

from .pages import ROOT, assert_tables_are_made


MODELS = ("low_bit", "masters")


def cell(right: list[int]) -> dict:
    """A cell whose low-bit model answered each problem four times, so many of them right."""
    return {"arm": "a", "samples": 4, "scores": {"low_bit": right}, "start_sha256": "a"}


def write_cell(arm: str, seed: int, right_of_four: int, start: str = "a", regime: str = "g64") -> None:
    """The file of a cell that answered three problems four times each, so many right of each."""
    path = real_arms.file_of(regime, arm, seed)
    path.parent.mkdir(exist_ok=True)
    result = {
        "regime": regime,
        "arm": arm,
        "seed": seed,
        "samples": 4,
        "scores": dict.fromkeys(MODELS, [right_of_four] * 3),
        "greedy": dict.fromkeys(MODELS, [right_of_four // 4] * 3),
        "start_sha256": start,
    }
    path.write_text(json.dumps(result))


# Pages --------------------------------------------------------------------------------------------------------------


def test_every_table_of_the_pages_is_what_the_script_makes(tmp_path):
    assert_tables_are_made(real_table, tmp_path)


def test_a_table_that_is_not_of_the_cells_is_replaced(tmp_path):
    page = tmp_path / "page.md"
    mark = "<!-- real: noise -->\n"
    page.write_text(f"before\n{mark}| another figure |\n<!-- end -->\nafter\n")

    real_table.put_tables(page, {mark: "| a |"})

    assert page.read_text() == f"before\n{mark}| a |\n<!-- end -->\nafter\n"


def score_of(arm: str, seed: int, model: str, greedy: bool = False) -> float:
    """Percent right of a cell in groups of 64."""
    return statistics.fmean(real_table.shares(real_table.read_cell("g64", arm, seed), model, greedy))


def points_by_row(table: str, column: int) -> dict[str, str]:
    """A column of a table by the first one, without the sign of its figures."""
    by_row = {}
    for line in table.splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        by_row[cells[0]] = cells[column].lstrip("+-")
    return by_row


def test_the_advice_has_the_figures_of_its_pairs():
    """What the pages for users say, of the rows that hold it."""
    points = points_by_row(real_table.choices_table(), 1)
    gptq = points["GPTQ minus rounding, bf16 rollouts"]
    of_rollout_only = points["rollout-only minus bf16 rollouts, both by GPTQ"]
    as_trained = points["QaRL rounded minus rollout-only by GPTQ"]
    rounded = points["QaRL minus rollout-only, rounded"]
    from_distilled = points["QaRL from a distilled start minus rollout-only by GPTQ"]
    in_high_precision = points["rollout-only minus bf16 rollouts, in bfloat16"]
    qarl_in_high_precision = points["QaRL minus rollout-only, both in bfloat16"]
    below_bf16 = points["QaRL from a distilled start minus bf16 rollouts by GPTQ"]
    of_a_start = points_by_row(real_table.differences_table("undistilled"), 5)["the engine's weights, both by GPTQ"]

    pairs = real_table.pairs_of_choice(("bf16", "gptq"), ("rollout-only", "gptq"))
    of_the_other = real_table.mean_gain([pair.points for pair in pairs if pair.regime != "undistilled"])
    of_the_other = of_the_other.removeprefix("+")
    of_both = []
    for seed in (3, 4, 5):
        by_gptq = real_table.shares(real_table.read_cell("undistilled", "bf16 GRPO", seed), "gptq")
        rounded_one = real_table.shares(real_table.read_cell("distilled", "rollout-only GRPO", seed), "low_bit")
        of_both.append(real_table.points_between(by_gptq, rounded_one))
    rollout_only_below = real_table.mean_gain(of_both).removeprefix("-")

    by_start = {"the next": [], "others": []}
    start = real_table.read_cell("undistilled", "QaRL GRPO", 3)["start_sha256"]
    for pair in real_table.pairs_of_choice(("rollout-only", "low_bit"), ("QaRL", "low_bit")):
        cell_of_pair = real_table.read_cell(pair.regime, f"QaRL {pair.loss}", pair.seed)
        by_start["the next" if cell_of_pair["start_sha256"] == start else "others"].append(pair.points)
    by_start = {name: real_table.mean_gain(points).removeprefix("+") for name, points in by_start.items()}

    of_distilled = points["QaRL from a distilled start minus rollout-only from it"]
    (line,) = [line for line in real_table.instead_table().splitlines() if "from the rounded start |" in line]
    to_undistilled = line.split("|")[4].strip().removeprefix("+")
    in_any = gain_in_any_of_four().removeprefix("-")
    table = real_table.differences_table("distilled")
    by_gptq = row_of_table(table, "the learner's weights, both by GPTQ")[4].removeprefix("-")
    in_bfloat16 = row_of_table(table, "the learner's weights")[6].removeprefix("-")
    cost_of_gptq = row_of_table(table, "GPTQ, QaRL")[4].removeprefix("-")
    moved_by_gptq = row_of_table(table, "GPTQ, rollouts in low bits")[4]

    sentences = {
        "docs/results.md": [
            f"GPTQ gained {gptq} points over rounding",
            f"ended {of_rollout_only} points below (six pairs); by start {of_a_start} below (that of the next table) "
            f"and {of_the_other} above",
            f"It ended {as_trained} points above QaRL as trained (14 pairs)",
            f"QaRL is {rounded} above rollout-only (18 pairs; {by_start['the next']} from the next table's start, "
            f"{by_start['others']} from others)",
            f"From there QaRL ended {below_bf16} points below bf16 rollouts with GPTQ, and {from_distilled} above "
            "rollout-only with GPTQ, both from the undistilled start, where rollout-only with GPTQ is weak; and "
            f"{to_undistilled} above QaRL from that start",
            f"ended {of_distilled} below QaRL, but solved more problems in *any* of four samples ({in_any}), and was "
            f"above by GPTQ ({by_gptq}) and in bfloat16 ({in_bfloat16})",
        ],
        "docs/which_learner.md": [
            f"{of_rollout_only} points below bf16 rollouts, both with GPTQ",
            f"[QaRL](results.md) from a distilled start ended {of_distilled} above rollout-only from the same, but "
            f"{in_any} below in problems solved by *any* of four samples, and {by_gptq} by GPTQ",
            f"over 14 pairs, as trained, it is {as_trained} points below rollout-only with GPTQ",
            f"there rollout-only ended {in_high_precision} below bfloat16 rollouts (eight pairs), QaRL "
            f"{qarl_in_high_precision} below rollout-only (18)",
        ],
        "docs/recover.md": [
            f"solved more problems in *any* of four samples than QaRL from it ({in_any}), and was above it by GPTQ "
            f"({by_gptq}) and in bfloat16 ({in_bfloat16}). GPTQ instead of rounding cost QaRL {cost_of_gptq} points, "
            f"and moved rollout-only by {moved_by_gptq}.",
        ],
        "README.md": [
            f"QaRL was {rounded} points above rollout-only, both rounded (18 pairs; {by_start['the next']} from one "
            f"start, {by_start['others']} from others), and lost to GPTQ",
            f"rollout-only, then GPTQ, was {as_trained} points better ([14 pairs]",
            f"QaRL ended {below_bf16} below bf16 rollouts from the start as it was, with GPTQ, and rollout-only "
            f"{rollout_only_below} (three pairs of one start)",
        ],
    }
    for page, said in sentences.items():
        text = (ROOT / page).read_text()
        for sentence in said:
            assert sentence in text, sentence


def gain_in_any_of_four() -> str:
    """Problems that QaRL from the distilled start solves in any of its samples, less rollout-only from it, rounded."""
    rows = []
    for seed in (3, 4, 5):
        solved = []
        for arm in ("rollout-only GRPO", "QaRL GRPO"):
            right = real_table.read_cell("distilled", arm, seed)["scores"]["low_bit"]
            solved.append([100.0 * (of_problem > 0) for of_problem in right])
        rows.append(real_table.points_between(*solved))
    return real_table.mean_gain(rows)


def test_the_models_that_gain_greedily_are_those_of_the_sentence():
    start = real_table.shares(real_table.read_cell("undistilled", real_table.BEFORE, 3), "gptq", greedy=True)
    gains = {}
    for words, regime, arm in real_table.DEPLOYED_ARMS:
        cells = [real_table.read_cell(regime, arm, seed) for seed in (3, 4, 5)]
        for model in ("low_bit", "gptq", "again"):
            if all(real_table.is_scored(cell, model, greedy=True) for cell in cells):
                rows = [
                    real_table.points_between(start, real_table.shares(cell, model, greedy=True)) for cell in cells
                ]
                gains[words, real_table.DEPLOYED[model]] = real_table.mean_and_error(rows)

    # The others gain less than 2 points.
    gaining = {name: gain for name, gain in gains.items() if gain[0] > 2}
    assert set(gaining) == {
        ("bf16 GRPO", "GPTQ"),
        ("bf16 GRPO", "distilled"),
        ("rollout-only GRPO from a distilled start", "rounded"),
        ("rollout-only GRPO from a distilled start", "GPTQ"),
        ("QaRL GRPO from a distilled start", "rounded"),
    }
    points, errors = zip(*gaining.values(), strict=True)
    said = f"are {min(points):.1f} to {max(points):.1f} points (± {min(errors):.1f} to {max(errors):.1f}) above"
    assert f"{said} the start with GPTQ" in (ROOT / "docs" / "results.md").read_text()


def test_three_pairs_of_the_advice_differ_in_the_seed_alone():
    pairs = real_table.pairs_of_choice(("rollout-only", "gptq"), ("QaRL", "gptq"))
    of_one_start = [pair for pair in pairs if pair.regime == "undistilled"]
    first, second, third = [f"{pair.mean:+.1f}" for pair in of_one_start]

    text = (ROOT / "docs" / "results.md").read_text()
    assert f"Three pairs that differ in the seed alone gave {first}, {second} and {third} points" in text

    cells = [real_table.read_cell("undistilled", "QaRL GRPO", pair.seed) for pair in of_one_start]
    assert len({cell["start_sha256"] for cell in cells}) == 1
    assert len({(cell["machine"]["cpu"], cell["machine"]["isa"]) for cell in cells}) == 1


def test_rollout_only_from_a_distilled_start_is_beside_the_same_seeds_without():
    points = []
    for seed in (3, 4, 5):
        before = real_table.read_cell("undistilled", "rollout-only GRPO", seed)
        after = real_table.read_cell("distilled", "rollout-only GRPO", seed)
        shares = (real_table.shares(before, "gptq"), real_table.shares(after, "low_bit"))
        points.append(real_table.points_between(*shares))
    gain = real_table.mean_gain(points).removeprefix("+")

    for page in ("results.md", "which_learner.md"):
        text = (ROOT / "docs" / page).read_text()
        of_gptq = "rollout-only with GPTQ from the start as it was, which is weak there (three pairs of one start)"
        assert f"ended {gain} points above {of_gptq}" in text


def test_rollout_only_by_gptq_is_as_good_with_either_loss():
    between = []
    for seed in (2, 3):
        means = [score_of(f"rollout-only {loss}", seed, "gptq") for loss in ("GRPO", "TBPO")]
        between.append(means[1] - means[0])

    # Each model's error is 2.4.
    assert min(between) < 0 < max(between)
    assert max(map(abs, between)) < 1
    assert "level with GRPO on SmolLM2 (two seeds)" in (ROOT / "docs" / "which_learner.md").read_text()


def test_the_pairs_of_the_advice_by_regime():
    """The mean over all hides how much they differ."""
    by_regime = {}
    for pair in real_table.pairs_of_choice(("rollout-only", "gptq"), ("QaRL", "low_bit")):
        by_regime.setdefault(pair.regime, []).append(pair.points)
    of_undistilled = real_table.mean_gain(by_regime.pop("undistilled"))
    others = [statistics.fmean(map(statistics.fmean, points)) for points in by_regime.values()]

    text = (ROOT / "docs" / "results.md").read_text()
    assert f"is {of_undistilled} in the first table's setting (three pairs)" in text
    assert f"and {max(others):.1f} to {min(others):.1f} in the means of the other regimes" in text
    assert "One pair is in FP8." in text
    rounded = real_table.pairs_of_choice(("rollout-only", "low_bit"), ("QaRL", "low_bit"))
    assert [pair.regime for pair in rounded].count("fp8") == 1


def test_what_the_higher_rate_costs_is_that_of_the_table():
    by_seed = {}
    for line in real_table.differences_table("undistilled").splitlines()[2:]:
        what, before, after, _, points, *_ = [cell.strip() for cell in line.strip("|").split("|")]
        by_seed[what, before, after] = points.replace("-", "").replace("+", "").replace(", ", " and ")
    rollout_only = by_seed["the rate, both by GPTQ", "rollout-only GRPO, GPTQ", "rollout-only GRPO, rate 6e-5, GPTQ"]
    qarl = by_seed["the rate", "QaRL GRPO", "QaRL GRPO, rate 6e-5"]
    between = by_seed[
        "GPTQ after rollout-only, not QaRL, each at its rate",
        "QaRL GRPO, rate 6e-5",
        "rollout-only GRPO, rate 6e-5, GPTQ",
    ]

    text = (ROOT / "docs" / "results.md").read_text()
    lower = f"rollout-only GRPO with GPTQ by {rollout_only} points, QaRL GRPO as trained by {qarl}."
    assert f"{lower} There QaRL as trained was {between} above rollout-only with GPTQ, and" in text


def mean_over_deployments(before: dict, cell: dict, greedy: bool) -> list[float]:
    """Points that a model gained, by problem: in bfloat16, rounded and by GPTQ, which are one training."""
    by_deployment = []
    for model in ("masters", "low_bit", "gptq"):
        scores = [real_table.shares(one, model, greedy) for one in (before, cell)]
        by_deployment.append(real_table.points_between(*scores))
    return list(map(statistics.fmean, zip(*by_deployment, strict=True)))


def test_figures_in_sentences_are_those_of_the_cells():
    """Those of docs/ that stand in no table."""
    results = (ROOT / "docs" / "results.md").read_text()
    learners = (ROOT / "docs" / "which_learner.md").read_text()

    # By whether answers are greedy.
    before = real_table.read_cell("undistilled", "before training", 3)
    gains = {}
    for greedy in (False, True):
        rows = []
        for arm in ("bf16 GRPO", "rollout-only GRPO", "QaRL GRPO"):
            for seed in (3, 4, 5):
                cell = real_table.read_cell("undistilled", arm, seed)
                rows.append(mean_over_deployments(before, cell, greedy))
        gains[greedy] = real_table.mean_gain(rows).removeprefix("+")
    # Greedily, in the order of the arms above.
    bf16, rollout_only, qarl = [real_table.mean_gain(rows[first : first + 3]).removeprefix("+") for first in (0, 3, 6)]
    by_arm = f"(bf16 rollouts {bf16}, QaRL {qarl}, rollout-only {rollout_only})"
    assert f"gained {gains[False]} points on sampled answers, and {gains[True]} on greedy ones {by_arm}" in results

    # The choice of the first table, and the other pairs in groups of 64.
    pairs = real_table.pairs_of_choice(("rollout-only", "gptq"), ("QaRL", "low_bit"))
    of_group = {"undistilled": [], "others in groups": [], "channel": []}
    for pair in pairs:
        name = "channel" if pair.regime.startswith("channel") else "others in groups"
        of_group["undistilled" if pair.regime == "undistilled" else name].append(pair.points)
    below = {name: real_table.mean_gain(points).removeprefix("-") for name, points in of_group.items()}
    assert [len(points) for points in of_group.values()] == [3, 5, 6]
    assert f"it is {below['undistilled']} points below rollout-only with GPTQ here" in results
    assert f"{below['others in groups']} in the other five pairs in groups of 64" in results
    assert f"and {below['channel']} in the six with a scale per channel" in results

    of_g64 = []
    for seed in (2, 3):
        cells = [real_table.read_cell("g64", f"{learner} GRPO", seed) for learner in ("QaRL", "rollout-only")]
        of_g64.append(real_table.gain(real_table.difference(*cells, ("low_bit", "gptq"))).removeprefix("+"))
    assert f"was {' and '.join(of_g64)} points above QaRL GRPO as trained" in results

    frozen = score_of("QaRL TBPO, LoRA beside a frozen base", 0, "low_bit")
    whole = score_of("QaRL TBPO", 0, "low_bit")
    assert f"{frozen:.1f} (TBPO, one seed, another start: QaRL with all weights {whole:.1f})" in learners


@pytest.mark.parametrize(
    ("learner", "arm"),
    [("bfloat16 rollouts", "bf16 GRPO"), ("rollout-only", "rollout-only GRPO"), ("QaRL", "QaRL GRPO")],
)
def test_scores_of_the_learners_are_means_of_three_seeds(learner, arm):
    learners = (ROOT / "docs" / "which_learner.md").read_text().splitlines()
    (row,) = [line.strip("|").split("|") for line in learners if re.match(rf"\| {learner} \| [\d.]+ \|", line)]

    _, _, rounded, gptq, *_ = [cell.strip() for cell in row]

    for shown, model in ((rounded, "low_bit"), (gptq, "gptq")):
        cells = [real_table.read_cell("undistilled", arm, seed) for seed in (3, 4, 5)]
        mean = statistics.fmean(statistics.fmean(real_table.shares(cell, model)) for cell in cells)
        assert f"{mean:.1f}" == shown


def cells_without_a_commit(files: list[Path], commits: set[str]) -> list[str]:
    """Those that name a commit which is not there, or uncommitted changes."""
    wrong = []
    for file in files:
        named = json.loads(file.read_text())["machine"]["commit"]
        # A cell names the first digits.
        if not any(commit.startswith(named) for commit in commits):
            wrong.append(file.name)
    return wrong


def test_every_cell_names_a_commit_of_this_repository(tmp_path):
    shallow = subprocess.check_output(["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, text=True).strip()
    if shallow == "true":
        pytest.skip("a shallow clone has no history to look commits up in")
    commits = set(subprocess.check_output(["git", "rev-list", "HEAD"], cwd=ROOT, text=True).split())
    files = sorted((ROOT / "benchmarks" / "results").rglob("*.json"))

    assert len(files) > 100
    assert cells_without_a_commit(files, commits) == []

    # Controls: changes that were not committed, and a commit that is not there.
    known = json.loads(files[0].read_text())["machine"]["commit"]
    (tmp_path / "changes.json").write_text(json.dumps({"machine": {"commit": f"{known}+changes"}}))
    (tmp_path / "lost.json").write_text(json.dumps({"machine": {"commit": "000000000000"}}))
    assert cells_without_a_commit(sorted(tmp_path.iterdir()), commits) == ["changes.json", "lost.json"]


# Errors -------------------------------------------------------------------------------------------------------------


def test_the_error_of_an_accuracy_holds_the_choice_of_problems_and_of_seeds():
    first = real_table.shares(cell([4, 0, 2]), "low_bit")
    second = real_table.shares(cell([2, 0, 0]), "low_bit")

    mean, error = real_table.mean_and_error([first, second])

    # In percent, by problem and by seed.
    problems = [75.0, 0.0, 25.0]
    seeds = [50.0, 50 / 3]
    assert mean == pytest.approx(statistics.fmean(seeds))
    # The variances of a mean of three problems and of one of two seeds add up.
    by_problem = statistics.variance(problems) / 3
    by_seed = statistics.variance(seeds) / 2
    assert error == pytest.approx((by_problem + by_seed) ** 0.5)


def test_the_error_of_a_single_seed_holds_the_choice_of_problems():
    _, error = real_table.mean_and_error([real_table.shares(cell([4, 0, 2]), "low_bit")])

    # Of 100, 0 and 50 percent, whose variance is 2500.
    assert error == pytest.approx((2500 / 3) ** 0.5)
    assert error == pytest.approx(real_table.error_of_problems([100.0, 0.0, 50.0]))


def test_a_difference_is_that_of_the_same_problems():
    first = cell([4, 0, 2])
    second = cell([2, 0, 0])

    points = real_table.difference(first, second, ("low_bit", "low_bit"))
    assert points == [-50.0, 0.0, -50.0]
    assert real_table.error_of_problems(points) == pytest.approx(50 / 3)

    # Control: the error of two models that know nothing of each other is larger.
    of_first = real_table.error_of_problems(real_table.shares(first, "low_bit"))
    of_second = real_table.error_of_problems(real_table.shares(second, "low_bit"))
    assert math.hypot(of_first, of_second) > 50 / 3


def test_cells_of_two_starts_are_not_compared():
    with pytest.raises(ValueError, match="must have one start"):
        real_table.difference(cell([1]), cell([1]) | {"start_sha256": "b"}, ("low_bit", "low_bit"))


def test_two_seeds_are_printed_and_three_have_a_mean(tmp_path, monkeypatch):
    monkeypatch.setattr(real_arms, "FOLDER", tmp_path)
    for seed, right in enumerate((1, 4)):
        write_cell("rollout-only GRPO", seed, right_of_four=1)
        write_cell("QaRL GRPO", seed, right_of_four=right)

    def row(seeds: str, points: str) -> str:
        return f"| the learner's weights | rollout-only GRPO | QaRL GRPO | {seeds} | {points} | {points} |"

    # Two numbers have a mean, but hardly an error of it.
    two = "+0.0 ± 0.0, +75.0 ± 0.0 | -"
    assert row("0, 1", two) in real_table.differences_table("g64").splitlines()

    write_cell("rollout-only GRPO", 2, right_of_four=1)
    write_cell("QaRL GRPO", 2, right_of_four=1)
    three = "+0.0 ± 0.0, +75.0 ± 0.0, +0.0 ± 0.0 | +25.0 ± 25.0"
    assert row("0, 1, 2", three) in real_table.differences_table("g64").splitlines()


@pytest.mark.parametrize(
    ("name", "arm", "model"),
    [
        ("QaRL GRPO", "QaRL GRPO", "low_bit"),
        ("QaRL GRPO, rate 6e-5, GPTQ", "QaRL GRPO, rate 6e-5", "gptq"),
        ("QaRL GRPO, distilled again", "QaRL GRPO", "again"),
    ],
)
def test_a_name_of_what_is_compared_means_an_arm_and_a_model_of_it(name, arm, model):
    assert real_table.arm_of(name) == arm
    assert real_table.model_of(name, "low_bit") == model


def test_a_pair_needs_both_models_of_equal_loss_and_seed(tmp_path, monkeypatch):
    monkeypatch.setattr(real_arms, "FOLDER", tmp_path)
    write_cell("rollout-only GRPO", 0, right_of_four=1)
    write_cell("QaRL GRPO", 0, right_of_four=2)
    write_cell("QaRL GRPO", 1, right_of_four=4)
    write_cell("rollout-only TBPO", 1, right_of_four=1)

    # Of the four cells only the first two have one loss and one seed.
    (pair,) = real_table.pairs_of_choice(("rollout-only", "low_bit"), ("QaRL", "low_bit"))
    assert (pair.regime, pair.loss, pair.seed, pair.mean) == ("g64", "GRPO", 0, 25.0)
    assert real_table.pairs_of_choice(("rollout-only", "gptq"), ("QaRL", "gptq")) == []

    # Of a distilled start GPTQ and bfloat16 mean another thing.
    for arm in ("rollout-only GRPO", "QaRL GRPO"):
        write_cell(arm, 2, right_of_four=4, regime="distilled")
    assert len(real_table.pairs_of_choice(("rollout-only", "low_bit"), ("QaRL", "low_bit"))) == 1
    # Control: as cells of another regime they are a pair.
    for arm in ("rollout-only GRPO", "QaRL GRPO"):
        write_cell(arm, 2, right_of_four=4, regime="undistilled")
    assert len(real_table.pairs_of_choice(("rollout-only", "low_bit"), ("QaRL", "low_bit"))) == 2


def write_choice(arm: str, rewards: list[float]) -> None:
    """The file of a run that an arm chooses its rate by."""
    path = real_arms.file_of("rate_choice", arm, 4)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"log": {"reward": rewards}}))


def test_an_arm_takes_the_rate_with_the_higher_reward_in_the_second_half(tmp_path, monkeypatch):
    monkeypatch.setattr(real_arms, "FOLDER", tmp_path)
    assert real_table.rated_pairs() == []

    for arm in ("rollout-only GRPO", "QaRL GRPO"):
        write_choice(f"{arm}, rate 6e-5", [0.9, 0.9, 0.2, 0.3])
        write_choice(f"{arm}, rate 1.2e-4", [0.1, 0.1, 0.3, 0.3])
    assert real_table.chosen_rate("QaRL GRPO") == "QaRL GRPO, rate 1.2e-4"
    assert "| QaRL GRPO, rate 1.2e-4 | 0.100 | 0.300 |" in real_table.rates_table().splitlines()

    # Control: the choice goes by the rewards.
    write_choice("QaRL GRPO, rate 1.2e-4", [0.9, 0.9, 0.2, 0.2])
    assert real_table.chosen_rate("QaRL GRPO") == "QaRL GRPO, rate 6e-5"

    for arm, right in (("rollout-only GRPO, rate 1.2e-4", 1), ("QaRL GRPO, rate 6e-5", 2), ("QaRL GRPO", 1)):
        write_cell(arm, 2, right_of_four=right)
    rows = real_table.differences_table("g64")
    arms = "rollout-only GRPO, rate 1.2e-4 | QaRL GRPO, rate 6e-5"
    assert f"| the learner's weights, each at its rate | {arms} | 2 | +25.0 ± 0.0 | - |" in rows
    assert "| the rate | QaRL GRPO | QaRL GRPO, rate 6e-5 | 2 | +25.0 ± 0.0 | - |" in rows


def test_what_is_done_instead_of_qarl_from_the_distilled_start(tmp_path, monkeypatch):
    monkeypatch.setattr(real_arms, "FOLDER", tmp_path)
    for regime, start in (("undistilled", "a"), ("distilled", "b")):
        write_cell("before training", 3, right_of_four=0, start=start, regime=regime)
    write_cell("QaRL GRPO", 3, right_of_four=4, start="b", regime="distilled")
    write_cell("QaRL GRPO", 3, right_of_four=3, start="a", regime="undistilled")
    # Another seed has no cell beside it.
    write_cell("rollout-only GRPO", 4, right_of_four=1, start="b", regime="distilled")

    rows = real_table.instead_table().splitlines()

    # The greedy answers are one right of one, and none.
    points = "+25.0 ± 0.0 | - | +100.0 ± 0.0 | -"
    assert f"| QaRL GRPO from the rounded start | 3 | {points} |" in rows
    assert "| rollout-only GRPO from the distilled start | - | not run | - | not run | - |" in rows

    # A cell of another start is no neighbour.
    write_cell("QaRL GRPO", 3, right_of_four=3, start="c", regime="undistilled")
    with pytest.raises(ValueError, match="must begin at a start of 'undistilled' that was scored"):
        real_table.instead_table()


def test_the_table_says_which_arms_did_not_run():
    # Of the other rates an arm takes one.
    arms = real_arms.ARMS.keys() - real_arms.RATED.keys()
    without_cells = [arm for arm in arms if not real_table.cells_of("g64", arm)]

    assert ("Not run: " in real_table.cells_table("g64")) == bool(without_cells)
    # Control: of that regime not all arms were run.
    assert "Not run: " in real_table.cells_table("fp8")


def test_recover_gives_the_differences_of_the_table():
    """In its sentences, without the signs."""
    page = (ROOT / "docs" / "recover.md").read_text()
    (verdict,) = [line for line in page.splitlines() if line.startswith("QaRL from the distilled start, over three")]

    differences = set(re.findall(r"\d+\.\d ± \d+\.\d", verdict))
    in_table = re.findall(r"\d+\.\d ± \d+\.\d", real_table.instead_table())
    assert differences
    assert differences <= set(in_table)


def test_recover_gives_what_thirty_updates_of_distillation_changed():
    results = json.loads((real_arms.FOLDER / "distill.json").read_text())["results"]
    after, before = ([right / 4 * 100 for right in results[name]["scores"]] for name in ("answers", "rounded"))

    moved = real_table.gain(real_table.points_between(before, after))
    of_greedy = [[right * 100 for right in results[name]["greedy"]] for name in ("rounded", "answers")]
    greedily = real_table.gain(real_table.points_between(*of_greedy))
    said = f"the answers had moved by {moved} points alone (greedily by {greedily}; on 150 training problems)"
    assert said in (ROOT / "docs" / "recover.md").read_text()


def test_recover_gives_what_distilling_again_costs():
    table = real_table.differences_table("distilled")
    points = []
    for arm in ("QaRL", "rollouts in low bits"):
        by_seed = row_of_table(table, f"distilled again, not rounded, {arm}")[3]
        points += [float(gain.split(" ± ")[0]) for gain in by_seed.split(", ")]

    greedily = []
    for arm in ("QaRL GRPO", "rollout-only GRPO"):
        for seed in (3, 4, 5):
            cell_of_arm = real_table.read_cell("distilled", arm, seed)
            trained, again = (real_table.shares(cell_of_arm, model, greedy=True) for model in ("low_bit", "again"))
            greedily.append(statistics.fmean(trained) - statistics.fmean(again))

    assert len(points) == 6
    lost = f"three pairs of SmolLM2 lost {-max(points):.1f} to {-min(points):.1f} points"
    lost_greedily = f"(greedily {min(greedily):.1f} to {max(greedily):.1f})"
    assert f"after RL from a distilled start, {lost} {lost_greedily}" in (ROOT / "docs" / "recover.md").read_text()


def test_recover_gives_the_scores_of_awq():
    cell = real_table.read_cell("g64_portable", real_table.BEFORE, 3)

    def scores(model):
        sampled = real_table.percent(real_table.shares(cell, model))
        greedy = real_table.percent(real_table.shares(cell, model, greedy=True))
        return f"{sampled} and {greedy}"

    sentence = f"{scores('awq')} (GPTQ {scores('gptq')}, rounded {scores('low_bit')})"
    assert sentence in (ROOT / "docs" / "recover.md").read_text()


def row_of_table(table: str, first: str) -> list[str]:
    """The cells beside the first one of a line."""
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_three_trainings_have_a_mean_and_fewer_are_printed(tmp_path, monkeypatch):
    monkeypatch.setattr(real_arms, "FOLDER", tmp_path)
    write_cell("before training", 3, right_of_four=2, regime="undistilled")
    for seed in (3, 4):
        write_cell("before training", seed, right_of_four=2, regime="distilled")
    for seed, right in ((3, 1), (4, 2), (5, 3)):
        write_cell("QaRL GRPO", seed, right_of_four=right, regime="undistilled")
    write_cell("QaRL GRPO", 3, right_of_four=4, regime="distilled")

    table = real_table.deployed_table(greedy=False)

    # In bfloat16, rounded, by GPTQ and distilled; of two distilled starts both are printed.
    assert row_of_table(table, "before training") == ["50.0 ± 0.0 (1)", "50.0 ± 0.0 (1)", "-", "50.0, 50.0 ± 0.0 (2)"]
    # The standard error of 25, 50 and 75 is 25 over the root of 3.
    assert row_of_table(table, "QaRL GRPO") == ["50.0 ± 14.4 (3)", "50.0 ± 14.4 (3)", "-", "-"]
    # Control: the arm from the distilled start is another row.
    assert row_of_table(table, "QaRL GRPO from a distilled start")[1] == "100.0 ± 0.0 (1)"
    assert row_of_table(table, "bf16 GRPO") == ["-"] * 4

    # Greedily one of one is right with four of four, and none with fewer.
    assert row_of_table(real_table.deployed_table(greedy=True), "QaRL GRPO")[1] == "0.0 ± 0.0 (3)"
