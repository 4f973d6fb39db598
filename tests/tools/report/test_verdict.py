"""The verdict on made-up and on committed runs: healthy ones and collapsed ones are told apart."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from qarl_trl.tools.report.runs import LoggedRun
from qarl_trl.tools.report.verdict import headline, judge, least_kl

from .folders import log, without


ARMS = Path(__file__).parents[3] / "benchmarks" / "results" / "arms"


def judge_log(rows):
    return judge(LoggedRun("a", rows))


def levels_of(judgements):
    return [judgement.level for judgement in judgements]


def texts_of(judgements):
    return "\n".join(judgement.text for judgement in judgements)


def judgements_of_level(rows, level):
    return [judgement for judgement in judge_log(rows) if judgement.level == level]


def test_a_healthy_run():
    judgements = judge_log(log())

    assert headline(judgements) == "healthy"
    # Of the reward, of the mismatch and of the shares.
    assert levels_of(judgements) == ["good"] * 3
    assert "rounding alone moves" in texts_of(judgements)


def test_what_is_within_its_limit_is_told_with_its_figure():
    rows = [row | {"ratio/clipped_frac": 0.06} for row in log()]

    assert "6% of the answers with an advantage are clipped" in judge_log(rows)[-1].text


def test_a_run_of_an_earlier_version_is_judged_by_the_shares_that_it_logged():
    rows = [without(row, "ratio/clipped_frac") for row in log(**{"ratio/neg_low_frac": 0.9})]
    (judgement,) = judgements_of_level(rows, "bad")
    assert "90% of the answers are clipped (A < 0, below)" in judgement.text

    # Control: a run that logs the share of all answers is judged by that.
    rows = log(**{"ratio/neg_low_frac": 0.9, "ratio/clipped_frac": 0.06})
    assert judgements_of_level(rows, "bad") == []


@pytest.mark.parametrize(
    ("changes", "level", "text"),
    [
        # Just beyond one limit of `verdict`, everything else as in a healthy run.
        ({"mismatch/logp_diff_mean": 0.2, "mismatch/kl_k3": 0.02}, "bad", "a KL of 0.02"),
        ({"mismatch/logp_diff_mean": 0.2, "sync/verify_noise_floor": 0.02}, "look", "10.0 noise floors"),
        ({"quant/flip_frac": 0.0}, "bad", "no sync changes"),
        ({"quant/flip_frac": 9e-6}, "look", "changes a share of 9.0e-06 of the quantized values, below 2e-05"),
        ({"quant/flip_frac": 0.4}, "bad", "changes 40.000%"),
        ({"ratio/clipped_frac": 0.4}, "look", "40% of the answers with an advantage are clipped"),
        ({"ratio/clipped_frac": 0.9}, "bad", "90% of the answers with an advantage are clipped"),
        ({"frac_reward_zero_std": 0.9}, "look", "90% of the prompts have equal rewards"),
        ({"mismatch/seq_weight_capped_frac": 0.5}, "look", "weight of 50% of the answers is at its cap"),
        ({"mismatch/unscored_max": 0.4}, "look", "no log-prob to 40% of the tokens"),
    ],
)
def test_what_is_wrong_is_said_with_what_to_do(changes, level, text):
    (judgement,) = judgements_of_level(log(**changes), level)

    assert text in judgement.text
    assert judgement.advice
    assert judgement.page


def test_a_stop_string_is_named_where_the_trainer_counts_it_as_cut_off():
    """RLOO, distillation and plain TRL: they know the end token alone."""
    of_qarl = log(**{"completions/clipped_ratio": 1.0})
    of_others = [without(row, ("ratio/",)) for row in of_qarl]

    (judgement,) = judgements_of_level(of_others, "look")
    assert judgement.text == "100% of the answers are cut off"
    assert judgement.advice.startswith("Raise max_completion_length. Answers that end at a stop string")

    # Control: QaRL knows stop strings.
    (judgement,) = judgements_of_level(of_qarl, "look")
    assert judgement.advice == "Raise max_completion_length."


@pytest.mark.parametrize("name", ["grad_norm", "entropy", "sampling/sampling_logp_difference/mean"])
def test_a_run_that_ended_in_nan_is_wrong(name):
    """Means leave NaN out, so all else is judged by what came before."""
    rows = log()
    for row in rows[8:]:
        row[name] = float("nan")

    (judgement,) = judgements_of_level(rows, "bad")

    assert f"{name} is nan at step 36" in judgement.text

    # Control: one line of it, of a run that goes on, is none.
    rows[-1][name] = 1.0
    assert not judgements_of_level(rows, "bad")


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        # As with a reward that reads no answer.
        ({"grad_norm": 0.0, "frac_reward_zero_std": 1.0}, "qarl-trl doctor"),
        # As with `mask_truncated_completions`.
        ({"grad_norm": 0.0}, "cut off"),
        # Without a log of the gradient.
        ({"frac_reward_zero_std": 1.0}, "qarl-trl doctor"),
        # A penalty has one.
        ({"grad_norm": 0.3, "frac_reward_zero_std": 1.0}, "lost in rounding"),
    ],
)
def test_without_a_gradient_nothing_is_lost_in_rounding(changes, advice):
    (judgement,) = judgements_of_level(log(**{"quant/flip_frac": 0.0} | changes), "bad")

    assert ("no gradient" in judgement.text) == ("rounding" not in advice)
    assert advice in judgement.advice


def test_a_sync_after_updates_without_a_gradient_says_nothing_of_rounding():
    """As in a run of two batches, of which the first had equal rewards."""
    zeros = {"quant/flip_frac": 0.0, "grad_norm": 0.5}
    rows = log(2, **zeros)
    # The first sync has no share.
    del rows[0]["quant/flip_frac"]
    for row in rows[:4]:
        row["grad_norm"] = 0.0
    texts = [judgement.text for judgement in judgements_of_level(rows, "unknown")]
    assert any("each followed updates without a gradient" in text for text in texts)

    # Control: the second batch learned, and the sync after it changed nothing.
    rows = log(3, **zeros)
    del rows[0]["quant/flip_frac"]
    for row in rows[:4]:
        row["grad_norm"] = 0.0
    (judgement,) = judgements_of_level(rows, "bad")
    assert "no sync changes a quantized value" in judgement.text


def test_a_small_share_of_flips_that_committed_runs_learned_with_is_good():
    # The smallest share of the committed runs that learned.
    good = judgements_of_level(log(**{"quant/flip_frac": 7.5e-5}), "good")

    # How a half in the last digit is rounded is not what is tested.
    said = re.findall(r"each sync changes 0\.00[78]%", texts_of(good))
    assert len(said) == 1


def falling_log():
    """Twelve rollout batches: the reward rises, and falls to 0 after the eighth; the mismatch grows all the time."""
    rows = log(batches=12)
    for row in rows:
        if "reward" in row:
            batch = (row["step"] - 1) // 4
            row["reward"] = 0.1 * batch if batch < 8 else 0.0
            row["mismatch/logp_diff_mean"] = 0.02 * (batch + 1)
    return rows


def test_trends_are_of_quarters():
    texts = texts_of(judgements_of_level(falling_log(), "bad"))

    assert "it fell" in texts
    assert "it grows" in texts


def test_a_short_run_has_no_trend():
    seven_batches = falling_log()[:28]

    # Control of the test above: one batch fewer than a trend needs.
    assert not judgements_of_level(seven_batches, "bad")


def log_with_rewards(*rewards):
    """A log of one update a batch with such rewards."""
    rows = log(batches=len(rewards), updates=1)
    for row, reward in zip(rows, rewards, strict=True):
        row["reward"] = reward
    return rows


@pytest.mark.parametrize(
    ("rewards", "level", "words"),
    [
        # About 4 against 7 right answers of 64 a batch, of a newcomer's run: noise.
        ([0.0, 0.03, 0.016, 0.0, 0.016, 0.03, 0.0, 0.03, 0.05, 0.0, 0.016, 0.04], "unknown", "no clear change"),
        # Controls: the same ends with less noise in each.
        ([0.0, 0.01, 0.0, 0.03, 0.02, 0.03, 0.02, 0.03, 0.02, 0.05, 0.06, 0.05], "good", "it rises"),
        ([0.5, 0.51, 0.5, 0.1, 0.9, 0.5, 0.4, 0.5, 0.4, 0.4, 0.41, 0.4], "look", "it falls"),
        # The fewest, and one fewer: a quarter of two has no standard error to speak of.
        ([0.0, 0.1, 0.0, 0.3, 0.4, 0.5, 0.9, 1.0, 0.9], "good", "it rises"),
        ([0.0, 0.1, 0.3, 0.3, 0.4, 0.5, 0.9, 1.0], "unknown", "8 rollout batches are too few for a trend"),
    ],
)
def test_a_reward_rises_or_falls_by_more_than_noise(rewards, level, words):
    judgement = judge_log(log_with_rewards(*rewards))[0]

    assert judgement.level == level
    assert words in judgement.text


def test_noise_is_no_fall():
    """Of nine batches the best quarter is often far above the last: a quarter of such runs was to be stopped."""
    generator = np.random.default_rng(0)
    fell = 0
    for _ in range(400):
        judgements = judge_log(log_with_rewards(*generator.normal(0.5, 0.1, 9).tolist()))
        fell += "it fell" in texts_of(judgements)
    assert fell < 0.12 * 400

    # A committed run whose reward rose, and dipped once.
    rising = [0.07, 0.12, 0.15, 0.12, 0.23, 0.18, 0.33, 0.32, 0.16, 0.2]
    assert "it rises" in judge_log(log_with_rewards(*rising))[0].text

    # Control: as much noise, and a reward that collapses.
    fallen = 0
    for _ in range(100):
        rewards = np.array([0.3, 0.4, 0.5, 0.5, 0.6, 0.6, 0.05, 0.05, 0.05]) + generator.normal(0, 0.08, 9)
        fallen += "it fell" in texts_of(judge_log(log_with_rewards(*rewards.tolist())))
    assert fallen > 95


@pytest.mark.parametrize(
    ("rewards", "advice"),
    [
        # Low also where the last quarter is above the middle of what was seen.
        ([0.0, 0.016, 0.016, 0.0, 0.04, 0.016, 0.0, 0.016, 0.03, 0.03, 0.02, 0.03], "Use easier problems"),
        # Rewards that may be negative.
        ([-1.0, -0.9, -0.8, -0.6, -0.4, -0.2, 0.0, 0.2, 0.4, 0.6, 0.8, 0.9], "Use harder problems"),
        ([0.9, 0.98, 0.98, 1.0, 0.98, 0.95, 1.0, 0.98, 0.97, 1.0, 0.98, 1.0], "Use harder problems"),
        # Controls: the log does not tell.
        ([0.0] * 12, "Try the reward with `qarl-trl doctor`; if it is right, use other problems"),
        ([None] * 12, "Use other problems"),
    ],
)
def test_equal_rewards_ask_for_easier_or_harder_problems(rewards, advice):
    rows = log_with_rewards(*rewards)
    for row in rows:
        row["frac_reward_zero_std"] = 0.83

    (judgement,) = [judgement for judgement in judge_log(rows) if "equal rewards" in judgement.text]

    assert judgement.advice.startswith(advice)


def test_a_run_of_which_nothing_can_be_judged_is_not_healthy():
    """It was, and a run of SFT was told to sample."""
    rows = [{"step": step, "loss": 2.0, "entropy": 1.5} for step in range(1, 20)]

    (judgement,) = judge_log(rows)

    assert headline([judgement]) == "cannot be judged"
    assert judgement.level == "unknown"
    assert not judgement.advice
    # Control: a trainer that samples.
    rows[0]["completions/mean_length"] = 9.0
    assert "use_vllm" in judge_log(rows)[0].advice


def test_without_a_log_of_it_nothing_is_claimed():
    judgements = judge_log([{"step": 1, "reward": 0.5}])

    assert levels_of(judgements) == ["unknown", "unknown"]
    assert "too few for a trend" in judgements[0].text


def log_of_trl(base=0.2):
    """The log of a run of plain TRL, with a mismatch of 0.2 or so."""
    rows = []
    for row in log():
        mismatch = row.get("mismatch/logp_diff_mean", 0) + base
        others = without(row, ("mismatch/", "sync/"))
        rows.append(others | {"sampling/sampling_logp_difference/mean": mismatch})
    return rows


def test_a_run_of_plain_trl_has_its_mismatch():
    run = LoggedRun("a", log_of_trl())

    assert run.values("mismatch/logp_diff_mean") == pytest.approx([0.2] * 9, rel=1e-4)
    assert "mismatch 0.2 nats" in texts_of(judge(run))


def test_a_large_mismatch_of_plain_trl_is_wrong_although_trl_logs_no_kl():
    (judgement,) = judgements_of_level(log_of_trl(), "bad")

    # exp(-0.2) - 1 + 0.2
    assert "a KL of at least 0.019, above 0.01" in judgement.text
    # Controls: what engines in bf16 have, and what may have a KL below the limit.
    for base in (0.02, 0.14):
        assert not judgements_of_level(log_of_trl(base), "bad")


def test_the_least_kl_is_below_that_of_any_log_probs():
    generator = np.random.default_rng(0)
    for differences in (generator.normal(0, 0.3, 1000), np.full(10, -0.3), generator.exponential(0.2, 1000) - 0.1):
        kl = np.mean(np.expm1(differences) - differences)
        assert least_kl(np.abs(differences).mean()) <= kl * (1 + 1e-9)


def committed_log(regime, cell):
    """The log of a committed run, a row a step."""
    columns = json.loads((ARMS / regime / f"{cell}.json").read_text())["log"]
    rows = []
    for step in range(len(columns["reward"])):
        row = {"step": step}
        for name, values in columns.items():
            # What was not logged at this step.
            if values[step] is not None:
                row[name] = values[step]
        rows.append(row)
    return rows


@pytest.mark.parametrize(
    ("cell", "state"), [("qarl_tbpo.2", "healthy"), ("rollout-only_grpo.2", "something is wrong")]
)
def test_committed_runs(cell, state):
    """Regime "hot": the rollout-only run collapses (docs/metrics.md)."""
    assert headline(judge_log(committed_log("hot", cell))) == state
