"""A run's folder: the log, and one point per rollout batch."""

import math
import os

import numpy as np
import pytest

from qarl_trl.tools.report.runs import LoggedRun, read_run

from .folders import log, write_run


@pytest.fixture
def rows():
    """Three rollout batches of four updates, with an evaluation, a NaN and the summary of a training."""
    rows = log(batches=3, updates=4)
    rows[4]["entropy"] = math.nan
    # Lines at the steps of others, and without what these have.
    rows.append({"step": 4, "eval_reward": 0.5, "eval_runtime": 1.0})
    rows.append({"step": 12, "train_runtime": 9.0})
    return rows


@pytest.fixture
def run(rows):
    return LoggedRun("a", rows)


def test_the_log_that_is_furthest_on_is_read(tmp_path):
    # Of a run that was resumed from an earlier checkpoint, the top is not the newest.
    write_run(tmp_path / "a", log(1), checkpoint=4)
    write_run(tmp_path / "a", log(3), checkpoint=12)
    write_run(tmp_path / "a", log(2))

    run = read_run(tmp_path / "a", "a")

    assert run.log[-1]["step"] == 12


def test_a_log_that_is_furthest_on_may_have_fewer_lines(tmp_path):
    """A run resumed with a larger `logging_steps`, beside a later checkpoint of before."""
    rows = log(3)
    write_run(tmp_path / "a", rows[:8], checkpoint=8)
    write_run(tmp_path / "a", [*rows[:4], rows[11]], checkpoint=12)

    assert read_run(tmp_path / "a", "a").log[-1]["step"] == 12


def test_a_longer_run_goes_on_with_the_log_of_a_run_that_ended(tmp_path):
    """That has a line which no checkpoint has."""
    rows = log(3)
    # The last evaluation, too, comes after the checkpoint, and again in the longer run.
    evaluated = {"step": 8, "eval_reward": 0.5, "eval_runtime": 1.0, "eval_samples_per_second": 4.0}
    ended = [*rows[:8], evaluated, {"step": 8, "train_runtime": 9.0}]
    write_run(tmp_path, rows[:8], checkpoint=8)
    write_run(tmp_path, ended)

    assert read_run(tmp_path, "a").log == ended
    goes_on = [*rows[:8], evaluated | {"eval_runtime": 2.0, "eval_samples_per_second": 2.0}, *rows[8:]]
    write_run(tmp_path, goes_on, checkpoint=12)
    longer = read_run(tmp_path, "a")
    assert longer.log == goes_on
    assert not longer.note


@pytest.mark.parametrize("went_back", [True, False])
def test_after_a_return_to_an_earlier_checkpoint_the_newest_log_is_read(tmp_path, went_back):
    """Checkpoints that were left behind are further on, and would be judged in place of the run."""
    before = log(3)
    after = [*before[:4], *log(2, reward=0.9)[4:]]
    if not went_back:
        after = before[:8]
    write_run(tmp_path, before[:4], checkpoint=4)
    write_run(tmp_path, before, checkpoint=12)
    write_run(tmp_path, after, checkpoint=8)
    for seconds, checkpoint in enumerate((4, 12, 8)):
        os.utime(tmp_path / f"checkpoint-{checkpoint}" / "trainer_state.json", (seconds, seconds))

    run = read_run(tmp_path, "a")

    # Control: a log that another goes on with is not read, whenever its file was written, as by a copy.
    assert run.log == (after if went_back else before)
    assert ("left out: checkpoint-12/trainer_state.json" in run.note) == went_back


def test_a_point_has_the_extremes_of_its_rollout_batch(run):
    """The ratio saw-tooths from update to update; its extremes over a batch do not."""
    steps, largest = run.series("ratio/max")

    # Of the last of four updates, in three batches.
    distance = 3 / 64 + np.arange(3) / 1024
    assert steps.tolist() == [1, 5, 9]
    assert largest.tolist() == (1 + distance).tolist()
    assert run.values("ratio/min").tolist() == (1 - distance).tolist()


def test_a_point_has_the_mean_of_its_rollout_batch(rows, run):
    shares = [row["ratio/neg_low_frac"] for row in rows[:12]]
    # Twelve updates in batches of four.
    means = np.reshape(shares, (3, 4)).mean(axis=1)

    assert run.values("ratio/neg_low_frac") == pytest.approx(means)


def test_a_mean_leaves_out_nan(rows, run):
    # The second batch without its first update, whose entropy is NaN.
    finite = [row["entropy"] for row in rows[5:8]]

    assert run.values("entropy")[1] == pytest.approx(sum(finite) / 3)


def test_an_evaluation_stands_at_its_rollout_batch(run):
    steps, rewards = run.series("eval_reward")

    # It was logged at step 4, the last of the first batch.
    assert steps.tolist() == [1]
    assert rewards.tolist() == [0.5]


def test_a_metric_that_was_not_logged_is_empty(run):
    steps, values = run.series("nothing")

    assert steps.size == 0
    assert values.size == 0


def test_a_line_with_a_reward_begins_a_batch(rows):
    for row in rows[:12]:
        row["reward"] = 1.0
    run = LoggedRun("b", rows[:12])

    # Control: with a reward in each line, each is a batch.
    assert len(run.values("ratio/max")) == 12


def test_without_rewards_a_batch_begins_with_the_lengths_of_its_answers(rows):
    """A distillation that samples: as one batch, its last quarter would be the mean of the whole run."""
    for row in rows:
        row.pop("reward", None)
    rows[9]["completions/mean_length"] = rows[8].pop("completions/mean_length")

    assert LoggedRun("a", rows).series("entropy")[0].tolist() == [1, 5, 10]


def test_without_samples_each_line_is_a_point():
    """Of SFT; an evaluation and the summary of a training stand beside the line of their step."""
    rows = [{"step": step, "loss": 1.0 / step, "entropy": 1.0 / step} for step in (10, 20, 30)]
    rows.append({"step": 20, "eval_loss": 2.0})
    rows.append({"step": 30, "train_loss": 3.0})
    run = LoggedRun("a", rows)

    assert run.series("entropy")[0].tolist() == [10, 20, 30]
    assert run.series("eval_loss")[0].tolist() == [20]


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "\x00", "[]", "null", "3", "{}", '{"log_history": 3}', '{"log_history": null}'),
        *('{"log_history": [3]}', '{"log_history": {"step": 1}}', '{"log_history": [{"reward": 1}]}'),
        *('{"log_history": [{"step": "x"}]}', '{"log_history": [{"step": null}]}', '{"log_history": [{"step": NaN}]}'),
    ],
)
def test_a_file_that_is_no_log_is_named(tmp_path, text):
    file = tmp_path / "trainer_state.json"
    file.write_text(text)

    with pytest.raises(ValueError, match=f"{file} must (be JSON|have log_history)"):
        read_run(tmp_path, "run")

    # Control: the least that is a log.
    file.write_text('{"log_history": [{"step": 1, "reward": 2.0}]}')
    assert read_run(tmp_path, "run").series("reward")[1].tolist() == [2.0]
