"""A run's folder: the log, one point per rollout batch, and settings without running what is pickled."""

import math
import pickle
import zipfile

import pytest
import torch
from configs import config

from qarl_trl.tools.report.page import _settings
from qarl_trl.tools.report.runs import Run, read_run, read_settings

from .folders import log, write_run


def test_the_log_that_is_furthest_on_is_read(tmp_path):
    write_run(tmp_path / "a", log(1), checkpoint=4)
    write_run(tmp_path / "a", log(3), checkpoint=12)
    write_run(tmp_path / "a", log(2))
    assert read_run(tmp_path / "a", "a").log[-1]["step"] == 12


def test_a_point_is_a_rollout_batch(tmp_path):
    """The ratio saw-tooths from update to update; its mean and its extremes over a batch do not."""
    rows = log(batches=3, updates=4)
    rows[4] |= {"entropy": math.nan}
    rows += [{"step": 4, "eval_reward": 0.5, "eval_runtime": 1.0}, {"step": 12, "train_runtime": 9.0}]
    run = Run("a", tmp_path, rows)
    assert [part.tolist() for part in run.series("ratio/max")] == [[1, 5, 9], [1 + 3 / 64] * 3]
    assert run.values("ratio/min").tolist() == [1 - 3 / 64] * 3
    shares = [row["ratio/neg_low_frac"] for row in rows[:12]]
    assert run.values("ratio/neg_low_frac") == pytest.approx([sum(shares[i : i + 4]) / 4 for i in (0, 4, 8)])
    assert run.values("entropy")[1] == pytest.approx(sum(row["entropy"] for row in rows[5:8]) / 3)  # without the NaN
    assert [part.tolist() for part in run.series("eval_reward")] == [[1], [0.5]]
    assert run.series("nothing")[0].size == 0
    by_line = Run("b", tmp_path, [row | {"reward": 1.0} for row in rows[:12]])
    assert len(by_line.values("ratio/max")) == 12  # control: with a reward in each line, each is a batch


def test_settings_that_differ_are_a_table_without_secrets(tmp_path):
    runs = []
    for name, changes in {"a": {"seed": 1}, "b": {"seed": 2}}.items():
        args = config(tmp_path / name, hub_token="hf_secret" + name, **changes)
        args.vllm_engine_kwargs, args.max_tokens_per_pass = {"hf_token": "hf_secret" + name}, len(runs)
        write_run(tmp_path / name, log(1))
        torch.save(args, tmp_path / name / "training_args.bin")
        runs.append(read_run(tmp_path / name, name))
    assert "hf_secret" in pickle.dumps(args).decode(errors="ignore")  # control: it is in the file
    assert not any("hf_secret" in repr(run.settings) for run in runs)
    table = _settings(runs, ["a", "b"])
    assert "<tr><th>seed</th><td>1</td><td>2</td></tr>" in table and "<td>W4A16</td><td>W4A16</td>" in table
    assert not [name for name in ("output_dir", "hub_token", "vllm_engine_kwargs", "weight_decay") if name in table]


class Command:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_pickle_in_a_run_is_not_run(tmp_path):
    mark = tmp_path / "mark"
    with zipfile.ZipFile(tmp_path / "training_args.bin", "w") as archive:
        archive.writestr("a/data.pkl", pickle.dumps({"x": Command(mark)}))
    assert read_settings(tmp_path) == {}
    assert not mark.exists()
    pickle.loads(pickle.dumps(Command(mark))).close()
    assert mark.exists()  # control: as pickle reads it, it does run
