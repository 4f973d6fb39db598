"""The comparison of arms: a fair one, of settings that run, from one start; and its tables."""

from __future__ import annotations

import copy
import json
import math
import statistics
from argparse import Namespace
from itertools import islice

import arms
import arms_table
import arms_task
import pytest
import torch
from sums import make_model

from qarl_trl import QaRLConfig
from qarl_trl.quant import apply_quantization

from .pages import ROOT, assert_tables_are_made


# The task -----------------------------------------------------------------------------------------------------------


def test_training_and_held_out_problems_are_not_the_same():
    training = list(islice(arms_task.problems(0, 0.5, held_out=False), 500))
    held_out = list(islice(arms_task.problems(0, 0.5, held_out=True), 500))

    assert not prompts_of(training) & prompts_of(held_out)

    # Control of the task: demonstrations that forget half of their carries are often wrong, so there is much to learn.
    wrong = 0
    for row in training:
        wrong += not row["demonstration"].endswith(row["answer"])
    assert wrong > 100


def prompts_of(rows):
    return {row["prompt"] for row in rows}


def test_outlier_channels_leave_the_model_as_it_is_and_hurt_its_quantization():
    plain = make_model(0, **arms.TOY).to(torch.bfloat16).eval()
    with_outliers = copy.deepcopy(plain)
    arms_task.add_outliers(with_outliers, channels=4, factor=8)
    ids = torch.randint(2, 32, (4, 60), generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def logits(model):
        return model(input_ids=ids).logits.float()

    # Bit for bit, because the factor is a power of two.
    expected = logits(plain)
    assert torch.equal(logits(with_outliers), expected)

    def error_in_low_bits(model):
        apply_quantization(model, "W4A16", group_size=-1)
        return (logits(model) - expected).abs().mean().item()

    plain_error = error_in_low_bits(plain)
    assert plain_error > 0
    # Three seeds: 2.8 to 3.4 times.
    assert error_in_low_bits(with_outliers) > 2 * plain_error


def test_kpop_keeps_tokens_whose_binary_divergence_is_small_both_ways():
    learner = torch.tensor([[0.5, 0.9, 0.01, 0.5, 0.999]])
    engine = torch.tensor([[0.5, 0.7, 0.04, 0.2, 0.8]])

    kept = arms_task.kept_by_kpop(learner.log(), engine.log(), 0.1)

    def divergence(p, q):
        """Of a coin with probability `p` from one with `q`, in nats."""
        return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()

    larger = torch.maximum(divergence(learner, engine), divergence(engine, learner))
    assert torch.equal(kept, larger <= 0.1)
    # 0.9 in place of 0.7 goes; the rare token whose ratio is 4 stays.
    assert kept.tolist() == [[True, False, True, False, False]]


# Arms and cells -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", arms.ARMS)
@pytest.mark.parametrize("regime", arms.REGIMES)
def test_the_settings_of_every_cell_are_accepted(tmp_path, regime, arm):
    settings, chosen = arms.settings_of(regime, arm)
    # Not a field: the script's own trainer reads it.
    chosen.pop("kpop", None)
    if chosen.get("quant_scheme") != "none":
        chosen = settings["quantization"] | chosen

    args = QaRLConfig(output_dir=str(tmp_path), use_cpu=True, use_vllm=True, report_to=[], **chosen)

    assert args.quantized == (not arm.startswith("bf16"))
    assert args.quantize_learner == (not arm.startswith("rollout-only"))
    if "GSPO" in arm:
        # The paper's Table 2: GSPO's bounds are `delta_low` and `epsilon_high` of TBPO.
        assert args.epsilon == 3 * settings["band"]
        assert args.epsilon_high == 4 * settings["band"]


def test_arms_share_everything_but_the_method():
    """One learning rate and one budget for all."""
    method = {
        "loss_type",
        "importance_sampling_level",
        "epsilon",
        "epsilon_high",
        "delta",
        "quant_scheme",
        "quantize_learner",
        "quant_kernel",
        "learner_ops",
        "vllm_importance_sampling_mode",
        "vllm_importance_sampling_clip_min",
        "vllm_importance_sampling_clip_max",
        "vllm_importance_sampling_correction",
        "kpop",
    }

    for arm in arms.ARMS:
        _, chosen = arms.settings_of("hard", arm)
        assert set(chosen) <= method, arm


def test_each_cell_has_a_file_of_its_own():
    cells = arms.cells(Namespace(regime=list(arms.REGIMES), arms=None, seeds=None))

    # Two cells of one file would overwrite each other, and a seed would be missing from the means.
    files = {arms.file_of(*cell) for cell in cells}
    assert len(files) == len(cells) > 100


def test_a_kept_start_is_copied(tmp_path):
    regime = arms.HARD | {"warm_steps": 1}
    kept = tmp_path / "kept.safetensors"
    arms_task.warm_start(tmp_path / "trained", regime, kept)
    (tmp_path / "trained" / arms.WEIGHTS).rename(kept)

    # These settings would give other weights: they are copied, not trained.
    arms_task.warm_start(tmp_path / "copied", regime | {"forgotten": 0.5}, kept)

    assert (tmp_path / "copied" / arms.WEIGHTS).read_bytes() == kept.read_bytes()


def test_a_cell_with_another_start_is_refused(tmp_path, monkeypatch):
    first = tmp_path / "first.safetensors"
    first.write_bytes(b"first")
    other = tmp_path / "other.safetensors"
    other.write_bytes(b"other")
    monkeypatch.setattr(arms, "FOLDER", tmp_path / "results")
    (tmp_path / "results" / "hard").mkdir(parents=True)
    cell = {"base_sha256": arms.sha_of(first), "settings": arms.HARD}
    (tmp_path / "results" / "hard" / "cell.json").write_text(json.dumps(cell))

    arms.check_start(first, arms.start_of(arms.HARD))
    with pytest.raises(SystemExit, match="must have one start"):
        arms.check_start(other, arms.start_of(arms.HARD))
    # Control: cells of another start may have other weights.
    arms.check_start(other, arms.start_of(arms.HARD | {"start": 1}))


# Tables -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reward", "expected"),
    [([0.2, 0.4, 0.6, 0.6, 0.6], False), ([0.6, 0.6, 0.6, 0.5, 0.3, 0.0], True), ([0.3, 0.3, 0.3], False)],
)
def test_a_run_collapses_when_it_ends_below_half_of_its_best(reward, expected):
    assert arms_table.collapsed({"log": {"reward": reward}}) is expected


def test_every_table_of_the_pages_is_what_the_script_makes(tmp_path):
    assert_tables_are_made(arms_table, tmp_path)


def test_a_table_names_the_arms_that_were_not_run(monkeypatch, tmp_path):
    assert "Not run: bf16 TBPO; " in arms_table.regime_table("hard")

    # Control: without any cell all arms of the regime are named, and the table has no row.
    monkeypatch.setattr(arms, "FOLDER", tmp_path)
    table = arms_table.regime_table("again")
    assert "Not run: bf16 GRPO; rollout-only GRPO; " in table
    assert len(table.split("\n\n")[0].splitlines()) == 2


def test_few_pairs_are_printed_and_more_have_a_mean_with_its_error():
    assert arms_table.summary([1.0, -2.0]) == ["+1.0, -2.0", "1 of 2", "-2.0 to +1.0"]
    # The standard deviation is 1, over the root of three pairs.
    assert arms_table.summary([1.0, 2.0, 3.0]) == ["+2.0 ± 0.6", "3 of 3", "+1.0 to +3.0"]
    assert arms_table.summary([]) == [arms_table.NOT_RUN] * 3


def points_of(table):
    """The points of each line of a table of pairs, without a plus."""
    points = {}
    for line in table.splitlines():
        _, what, _, difference, *_ = [cell.strip() for cell in line.split("|")]
        points[what] = difference.removeprefix("+")
    return points


def above_by_name(regime, name):
    """How many pairs of a contrast are above 0."""
    (line,) = [line for line in arms_table.portable_differences(regime).splitlines() if f"| {name} |" in line]
    return line.split("|")[4].strip()


def test_figures_of_the_long_toy_in_sentences_are_those_of_its_pairs():
    points = points_of(arms_table.portable_differences("long"))
    slow = points_of(arms_table.portable_differences("long_stale_slow"))
    deployed = "QaRL GRPO rounded minus rollout-only GRPO by GPTQ"
    # By the paper's loss, against the best of the other side.
    best_sides = "QaRL TBPO rounded minus rollout-only GRPO by GPTQ"

    # README.md and which_learner.md say: better at one rate, and not at a lower one.
    for name in (deployed, best_sides):
        assert not points[name].startswith("-")
        assert slow[name].startswith("-")
    below = slow[deployed].removeprefix("-")
    tbpo_below = slow[best_sides].removeprefix("-")
    tbpo_of_both = slow["QaRL TBPO rounded minus rollout-only TBPO by GPTQ"]

    results = (ROOT / "docs" / "results.md").read_text()
    # The contrast was added when two seeds were run.
    of_later = {}
    for arm in ("QaRL GRPO", "QaRL TBPO", "QaRL GSPO"):
        later = [points for seed, points in sorted(deployed_by_seed("long", arm).items()) if seed not in (0, 1)]
        of_later[arm] = arms_table.summary(later)[0].lstrip("+-")
    first_compared = f"(eight pairs; this was first compared after two: the other six give {of_later['QaRL GRPO']})"
    assert f"as trained, ended {points[deployed]} points above rollout-only GRPO with GPTQ {first_compared}" in results
    assert f"with four times the updates of a quarter of the answers, it ended {below} below (eight pairs)" in results
    updates = [arms.REGIMES[regime]["updates"] for regime in ("long", "long_stale_slow")]
    assert updates[1] == 4 * updates[0]
    of_tbpo = f"rollout-only GRPO with GPTQ (the other six {of_later['QaRL TBPO']})"
    assert f"as GSPO) ended {points[best_sides]} above {of_tbpo}" in results
    assert f"and at the lower rate {tbpo_below} below, QaRL GSPO" in results
    assert f"QaRL TBPO is {tbpo_of_both} above rollout-only TBPO with GPTQ" in results
    assert f"without TIS is {slow['the same, without TIS']} below QaRL GRPO" in results
    # "Five and six of eight, at the second one of eight": README.md, too.
    assert above_by_name("long", deployed) == "5 of 8"
    assert above_by_name("long", best_sides) == "6 of 8"
    assert above_by_name("long_stale_slow", deployed) == above_by_name("long_stale_slow", best_sides) == "1 of 8"
    by_gspo = "QaRL GSPO rounded minus rollout-only GRPO by GPTQ"
    assert [above_by_name(regime, by_gspo) for regime in ("long", "long_stale_slow")] == ["3 of 8", "1 of 8"]
    assert "five, six (TBPO) and three (GSPO) of eight are above, at the lower rate one each" in results
    gspo_below = [of_rate[by_gspo].removeprefix("-") for of_rate in (points, slow)]
    assert f"QaRL GSPO {gspo_below[0]} (the other six {of_later['QaRL GSPO']}) and {gspo_below[1]} below." in results
    untrained = json.loads((arms.FOLDER / "long_before.json").read_text())["scores"]["gptq"]
    for arm in ("QaRL GRPO", "QaRL TBPO", "QaRL GSPO"):
        assert statistics.fmean(shares_by_deployment("long", arm)["rounded"]) < untrained
    by_gptq = shares_by_deployment("long", "rollout-only GRPO")["gptq"]
    assert statistics.fmean(by_gptq) < untrained
    assert "At the first rate all three, and rollout-only GRPO, end below the start with GPTQ." in results
    by_rate = [
        f"{100 * statistics.fmean(shares_by_deployment(regime, 'rollout-only GRPO')['gptq']):.0f} %"
        for regime in ("long_stale_slow", "long")
    ]
    learners = (ROOT / "docs" / "which_learner.md").read_text()
    assert f"rollout-only GRPO with GPTQ had {by_rate[0]} there, not {by_rate[1]}" in learners
    losses = {}
    for arm in ("rollout-only TBPO", "rollout-only GRPO"):
        regimes = ("long", "long_stale_slow")
        means = [100 * statistics.fmean(shares_by_deployment(regime, arm)["gptq"]) for regime in regimes]
        losses[arm] = [f"{mean:.0f}" for mean in means]
    of_tbpo = f"had {' and '.join(losses['rollout-only TBPO'])} % on the long toy"
    assert f"{of_tbpo}, not {' and '.join(losses['rollout-only GRPO'])}." in learners
    readme = (ROOT / "README.md").read_text()
    each = "at a third of the rate, with four times the updates, in 1 each"
    assert f"in 5 (GRPO), 6 (TBPO) and 3 (GSPO) of 8 pairs, {each}" in readme
    assert f"it is the other way round ({slow[deployed]}, eight pairs" in (ROOT / "dev" / "log.md").read_text()

    by_seed = [arms_table.scores_by_seed("long", arm, "rounded") for arm in ("QaRL GSPO", "rollout-only TBPO")]
    of_gspo, _, _ = arms_table.summary([100 * (by_seed[0][seed] - by_seed[1][seed]) for seed in sorted(by_seed[0])])
    assert f"GSPO is {of_gspo.removeprefix('+')} above rollout-only TBPO." in results

    # "No arm is above that, except bf16 GRPO, by 0.8": the untrained start with GPTQ.
    start = json.loads((arms.FOLDER / "long_before.json").read_text())["scores"]["gptq"]
    best = {arm: max(map(statistics.fmean, shares_by_deployment("long", arm).values())) for arm in arms.PORTABLE_ARMS}
    assert [arm for arm, share in best.items() if share > start] == ["bf16 GRPO"]
    assert f"{100 * (best['bf16 GRPO'] - start):.1f}" == "0.8"


def deployed_by_seed(regime, arm):
    """Points of an arm, rounded, above rollout-only GRPO by GPTQ."""
    rounded = arms_table.scores_by_seed(regime, arm, "rounded")
    by_gptq = arms_table.scores_by_seed(regime, "rollout-only GRPO", "gptq")
    return {seed: 100 * (rounded[seed] - by_gptq[seed]) for seed in rounded}


def shares_by_deployment(regime, arm):
    """Right answers of each seed, as it is, rounded and by GPTQ."""
    ways = ("as it is", "rounded", "gptq")
    return {way: list(arms_table.scores_by_seed(regime, arm, way).values()) for way in ways}


def test_the_arms_that_gain_at_the_lower_rate_are_those_of_the_sentence():
    start = json.loads((arms.FOLDER / "long_before.json").read_text())["scores"]["gptq"]
    gains = {}
    for arm in arms.PORTABLE_ARMS:
        by_way = shares_by_deployment("long_stale_slow", arm)
        # What is deployed in 4 bits.
        shares = max(by_way["rounded"], by_way["gptq"], key=statistics.fmean)
        points, above, _ = arms_table.summary([100 * (share - start) for share in shares])
        assert above.endswith("of 8")
        if points.startswith("+"):
            gains[arm] = points.removeprefix("+")

    results = (ROOT / "docs" / "results.md").read_text()
    assert len(arms.PORTABLE_ARMS) == 8
    assert list(gains) == ["bf16 GRPO", "rollout-only GRPO", "QaRL GSPO", "QaRL TBPO"]
    assert "four of eight means gain:" in results
    of_gptq = f"bf16 and rollout-only GRPO with GPTQ ({gains['bf16 GRPO']}, {gains['rollout-only GRPO']})"
    rounded = f"QaRL GSPO and TBPO, rounded ({gains['QaRL GSPO']}, {gains['QaRL TBPO']})"
    # Of one deployment on 256 problems; the ± of the gains are over pairs.
    own_error = 100 * math.sqrt(start * (1 - start) / 256)
    of_the_start = f"Above the start with GPTQ (± leaves out its own error, {own_error:.1f})"
    assert f"{of_the_start} are {of_gptq}, and {rounded}." in results


def in_short():
    """The part of the toy's page that says what its tables show."""
    page = (ROOT / "benchmarks" / "results" / "arms" / "README.md").read_text()
    _, _, after = page.partition("## In short\n")
    return after.partition("\n## ")[0]


def mean_accuracy(regime, arm):
    """Percent right of the served model, over all seeds."""
    return 100 * statistics.fmean(cell["accuracy_after"] for cell in arms_table.read(regime, arm))


def test_another_start_and_the_engines_operations_show_less_in_the_short_toy():
    again = [f"{mean_accuracy('again', f'{learner} TBPO'):.0f}" for learner in ("rollout-only", "QaRL")]
    assert f"rollout-only TBPO has {again[0]}, QaRL TBPO {again[1]}." in in_short()

    hot = [f"{mean_accuracy('hot', arm):.0f}" for arm in ("bf16 GRPO", "QaRL TBPO")]
    assert f"With the engine's operations (three seeds) bf16 GRPO has {hot[0]}, QaRL TBPO {hot[1]}, and" in in_short()
    rollout_only = arms_table.read("hot", "rollout-only GRPO") + arms_table.read("hot", "rollout-only TBPO")
    assert (sum(map(arms_table.collapsed, rollout_only)), len(rollout_only)) == (1, 6)
    assert "one of six rollout-only runs collapsed" in in_short()


def test_rollout_only_in_the_hot_toy_by_gptq_is_that_of_the_page():
    by_gptq = shares_by_deployment("hot_portable", "rollout-only GRPO")["gptq"]
    assert len(by_gptq) == 8
    assert f"by GPTQ rollout-only GRPO has {100 * statistics.fmean(by_gptq):.0f}." in in_short()


def test_rollout_only_in_the_hard_toy_is_good_unquantized_and_was_not_scored_by_gptq():
    cells = arms_table.read("hard", "rollout-only GRPO")
    of_learner = [100 * cell["accuracy_learner"] for cell in cells]
    mean = f"{statistics.fmean(of_learner):.0f} ± {statistics.stdev(of_learner):.0f}"

    assert f"In bfloat16, rollout-only GRPO has {mean}; by GPTQ it was not scored." in in_short()
    assert all("scores" not in cell for cell in cells)

    # "Without them (*easy*) every arm that ran has 97 to 98."
    means = []
    for arm in arms.ARMS:
        easy = [100 * cell["accuracy_after"] for cell in arms_table.read("easy", arm)]
        means += [statistics.fmean(easy)] if easy else []
    assert {f"{mean:.0f}" for mean in means} == {"97", "98"}


def test_figures_of_the_hot_toy_in_sentences_are_those_of_its_cells():
    cells = {arm: arms_table.read("hot_portable", arm) for arm in arms.PORTABLE_ARMS}
    collapsed = {arm: sum(map(arms_table.collapsed, of_arm)) for arm, of_arm in cells.items()}
    rollout_only = [arm for arm in cells if arm.startswith("rollout-only")]
    runs = sum(len(cells[arm]) for arm in rollout_only)

    assert (
        f"of {sum(collapsed.values())} of {runs} rollout-only runs (four arms) collapsed, and of no other run"
        in in_short()
    )
    assert [arm for arm in cells if collapsed[arm] and arm not in rollout_only] == []
    of_long = [cell for arm in rollout_only for cell in arms_table.read("long", arm)]
    learners = (ROOT / "docs" / "which_learner.md").read_text()
    of_collapsed = [100 * cell["scores"]["gptq"] for cell in of_long if arms_table.collapsed(cell)]
    assert sorted(f"{share:.0f}" for share in of_collapsed)[1:] == ["88", "88"]
    did = (
        f"With 376 tokens {len(of_collapsed)} of {len(of_long)} did, two of them with 88 % by GPTQ, as before training"
    )
    assert did in learners

    # "Every arm, bf16 GRPO too, ends below the start in bfloat16 (87)", whichever way it is deployed.
    start = arms_table.starts_of("hot_portable")["bf16"]
    assert f"{100 * start:.0f}" == "87"
    for arm in cells:
        for way in ("as it is", "rounded", "gptq"):
            shares = arms_table.scores_by_seed("hot_portable", arm, way).values()
            assert sum(shares) / len(shares) < start


def test_figures_of_the_stale_toy_in_sentences_are_those_of_its_pairs():
    table = arms_table.portable_differences("stale_portable")
    # Its first four rows are QaRL minus rollout-only, rounded.
    rounded = table.splitlines()[2:6]
    above = sum(int(row.split("|")[4].split()[0]) for row in rounded)
    deployed = points_of(table)["QaRL GRPO rounded minus rollout-only GRPO by GPTQ"]

    assert f"above rollout-only in {above} of 32 pairs, rounded" in in_short()
    of_pairs = f"{deployed} (here one standard error over pairs), above 0 in four of eight pairs"
    assert f"over rollout-only GRPO with GPTQ was {of_pairs}" in in_short()

    # Beside *hot*: a third of its rate, and four times its updates.
    high, low = [arms.REGIMES[regime] for regime in ("hot_portable", "stale_portable")]
    assert low["updates"] == 4 * high["updates"]
    assert 3 * low["learning_rate"] == pytest.approx(high["learning_rate"])
    cells = {arm: arms_table.read("stale_portable", arm) for arm in arms.PORTABLE_ARMS}
    collapsed = {arm: sum(map(arms_table.collapsed, of_arm)) for arm, of_arm in cells.items()}
    of_rollout_only = sum(number for arm, number in collapsed.items() if arm.startswith("rollout-only"))
    assert not any(number for arm, number in collapsed.items() if arm.startswith("QaRL"))
    learners = (ROOT / "docs" / "which_learner.md").read_text()
    assert (
        f"with four times the updates, {of_rollout_only} of 32 runs still collapsed, and none of QaRL's." in learners
    )


def test_figures_of_the_distilled_start_in_sentences_are_those_of_its_file():
    scores = {}
    start_file = arms.FOLDER / "long_distilled_before.json"
    for regime in ("long", "long_distilled"):
        shares = json.loads((arms.FOLDER / f"{regime}_before.json").read_text())["scores"]
        scores[regime] = {way: f"{100 * share:.1f} %" for way, share in shares.items()}
    start = scores["long"]
    distilled = scores["long_distilled"]

    text = (ROOT / "docs" / "recover.md").read_text()
    assert f"from {start['rounded']} rounded to {distilled['rounded']} (" in text
    assert f"(bfloat16 {start['as it is']}, GPTQ {start['gptq']})".replace(" %", "") in text
    assert f"as they are, these score {distilled['as it is']}, and {distilled['gptq']} by GPTQ" in text

    # What RL made of it.
    points = points_of(arms_table.differences(arms_table.COMPARED_DISTILLED))
    cells = arms_table.read("long_distilled", "QaRL GRPO")
    mean, _ = arms_table.deployed_accuracy(cells, "rounded", "{:.1f}").split(" ± ")
    above_bf16 = f"{points['QaRL rounded minus bf16 by GPTQ']} points above bf16 GRPO by GPTQ"
    above_rollout_only = f"{points['QaRL minus rollout-only, both rounded']} above rollout-only GRPO"
    assert f"QaRL GRPO ended at {mean} % rounded, {above_bf16} and {above_rollout_only}, also rounded" in text
    of_starts = points["QaRL rounded, this start minus that of *long*"]
    assert f"ended {of_starts} points lower" in text
    results = (ROOT / "docs" / "results.md").read_text()
    place = "../benchmarks/results/arms/README.md#long-from-a-distilled-start"
    assert f"above QaRL from that start ([on a toy]({place}) {of_starts})" in results
    of_three = points["QaRL minus rollout-only, both rounded"]
    rounded = [
        arms_table.scores_by_seed("long_distilled", arm, "rounded") for arm in ("QaRL GRPO", "rollout-only GRPO")
    ]
    first, second, third = [f"{100 * (rounded[0][seed] - rounded[1][seed]):+.1f}" for seed in sorted(rounded[0])]
    assert f"(on the toy QaRL ended {of_three} above, once by {second[1:]}, but no arm gained)" in results
    assert f"also rounded ({first}, {second} and {third})." in text
    bf16 = arms_table.scores_by_seed("long", "bf16 GRPO", "gptq")
    above = [cell for cell in cells if cell["scores"]["rounded"] > bf16[cell["seed"]]]
    assert (len(above), len(cells), len(bf16)) == (1, 3, 8)
    of_all = f"{100 * statistics.fmean(bf16.values()):.1f} %"
    assert f"one of the three pairs is above it, and over eight seeds it has {of_all}" in text
    for arm in arms.DISTILLED_ARMS:
        for way in ("rounded", "gptq", "distilled"):
            shares = arms_table.scores_by_seed("long_distilled", arm, way).values()
            # "No arm's mean is above the distilled start."
            assert sum(shares) / len(shares) < json.loads(start_file.read_text())["scores"]["rounded"]


def test_a_cell_of_the_long_toy_is_scored_in_every_deployment():
    table = arms_table.portable_table("long")
    header, _, *rows = table.split("\n\n")[0].splitlines()

    assert "| as it is | rounded | GPTQ | AWQ |" in header
    for row in rows:
        # Only bfloat16 rollouts are scored by AWQ.
        as_it_is, rounded, gptq, awq = [cell.strip() for cell in row.split("|")[4:8]]
        assert "-" not in (as_it_is, rounded, gptq)
        assert (awq == "-") == (not row.startswith("| bf16"))
