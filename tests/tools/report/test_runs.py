"""A run's folder: the log, and one point per rollout batch."""

import math

import pytest

from qarl_trl.tools.report.runs import Run, read_run

from .folders import log, write_run


def test_the_log_that_is_furthest_on_is_read(tmp_path):
    write_run(tmp_path / "a", log(1), checkpoint=4)
    write_run(tmp_path / "a", log(3), checkpoint=12)
    write_run(tmp_path / "a", log(2))
    assert read_run(tmp_path / "a", "a").log[-1]["step"] == 12


def test_a_point_is_a_rollout_batch():
    """The ratio saw-tooths from update to update; its mean and its extremes over a batch do not."""
    rows = log(batches=3, updates=4)
    rows[4] |= {"entropy": math.nan}
    rows += [{"step": 4, "eval_reward": 0.5, "eval_runtime": 1.0}, {"step": 12, "train_runtime": 9.0}]
    run = Run("a", rows)
    assert [part.tolist() for part in run.series("ratio/max")] == [
        [1, 5, 9],
        [1 + 3 / 64 + batch / 1024 for batch in range(3)],
    ]
    assert run.values("ratio/min").tolist() == [1 - 3 / 64 - batch / 1024 for batch in range(3)]
    shares = [row["ratio/neg_low_frac"] for row in rows[:12]]
    assert run.values("ratio/neg_low_frac") == pytest.approx([sum(shares[i : i + 4]) / 4 for i in (0, 4, 8)])
    assert run.values("entropy")[1] == pytest.approx(sum(row["entropy"] for row in rows[5:8]) / 3)  # without the NaN
    assert [part.tolist() for part in run.series("eval_reward")] == [[1], [0.5]]
    assert run.series("nothing")[0].size == 0
    by_line = Run("b", [row | {"reward": 1.0} for row in rows[:12]])
    assert len(by_line.values("ratio/max")) == 12  # control: with a reward in each line, each is a batch
