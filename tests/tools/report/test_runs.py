"""A run's folder as `trainer_state.json`, quickstart or neither; its settings without its pickles being run."""

import json
import math
import pickle
import zipfile

import numpy as np
import pytest
import torch
from configs import config
from trl import GRPOConfig

from qarl_trl.metrics.bounds import Bounds
from qarl_trl.tools.report.figures import CHARTS, draw_panels
from qarl_trl.tools.report.runs import read_run
from qarl_trl.tools.report.settings import arm, bounds, level, read_settings

from .folders import row, write_run


def test_the_state_that_is_furthest_on_is_read(tmp_path):
    write_run(tmp_path / "a", [row(1), row(2)])
    write_run(tmp_path / "a", [row(1), row(2), row(3)], checkpoint=3)
    write_run(tmp_path / "a", [row(1)], checkpoint=10)
    run = read_run(str(tmp_path / "a"))
    assert (run.name, run.last_step) == ("a", 3)
    assert read_run(f"other={tmp_path / 'a'}").name == "other"
    (tmp_path / "b=c").mkdir()
    assert read_run(str(write_run(tmp_path / "b=c", [row(1)]))).name == "b=c"


def test_series_are_in_order_with_nan_for_what_is_no_number(tmp_path):
    log = [
        row(3),
        row(1, reward=math.nan),
        row(2, reward=math.inf),
        {"step": 4, "reward": "high"},
        {"step": 5, "x": 1},
    ]
    run = read_run(str(write_run(tmp_path, log)))
    steps, values = run.series("reward")
    assert steps.tolist() == [1, 2, 3]
    assert np.array_equal(values, [math.nan, math.nan, 3 * 0.1], equal_nan=True)
    assert run.has("reward") and not run.has("eval_reward")
    assert run.mean("entropy") == pytest.approx((1 + 1 / 2 + 1 / 3) / 3)
    assert run.phases() == {"rollout": 1.0, "sync": 0.25, "update": 0.75}
    assert run.seconds() == 2.0


def test_a_plain_grpo_log_serves_under_our_names(tmp_path):
    log = [{"step": 1, "sampling/sampling_logp_difference/mean": 0.5, "clip_ratio/low_mean": 0.1, "step_time": 3.0}]
    run = read_run(str(write_run(tmp_path, log)))
    assert run.mean("mismatch/logp_diff_mean") == 0.5
    assert run.mean("ratio/neg_low_frac") == 0.1
    assert run.seconds() == 3.0 and run.phases() == {}
    both = read_run(str(write_run(tmp_path, [log[0] | {"mismatch/logp_diff_mean": 0.25}])))
    assert both.mean("mismatch/logp_diff_mean") == 0.25  # control: ours comes first


def test_the_quickstarts_accuracies_become_held_out_rewards(tmp_path):
    (tmp_path / "log.json").write_text(json.dumps([row(1), row(4)]))
    summary = {"accuracy_before": 0.25, "accuracy_after": 0.75, "logp_diff_bf16_floor": 0.01, "scheme": "W4A16"}
    (tmp_path / "quickstart.json").write_text(json.dumps(summary))
    run = read_run(str(tmp_path))
    assert [part.tolist() for part in run.series("eval_reward")] == [[0, 4], [0.25, 0.75]]
    assert run.mean("logp_diff_floor") == 0.01
    assert run.arm == "W4A16 engine and learner"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "is no run: it needs a trainer_state.json"),
        ({"trainer_state.json": "{"}, "cannot be read"),
        ({"trainer_state.json": "[]"}, "must hold a dict, got a list"),
        ({"trainer_state.json": '{"log_history": []}'}, "has logged nothing yet"),
        ({"trainer_state.json": '{"log_history": [{"step": 1}, {"reward": 1}, 3]}'}, "has logged nothing yet"),
        ({"trainer_state.json": '{"log_history": 3}'}, "has logged nothing yet"),
        ({"log.json": "[]", "quickstart.json": "{}"}, "has logged nothing yet"),
        ({"log.json": "[]"}, "is no run"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_run(str(tmp_path))


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no such folder: .*nowhere"):
        read_run(str(tmp_path / "nowhere"))


def saved(tmp_path, args):
    torch.save(args, tmp_path / "training_args.bin")
    return read_settings(tmp_path)


def test_settings_come_from_the_training_arguments(tmp_path):
    args = config(tmp_path, hub_token="hf_secret", tbpo_epsilon_high=0.0003)
    found = saved(tmp_path, args)
    assert arm(found) == "W4A16 engine and learner, tbpo"
    band = args.trust_band
    assert bounds(found) == Bounds.of_band(band) and level(found) == "sequence"
    trl_args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, hub_token="hf_secret")
    assert "hf_secret" in pickle.dumps(trl_args).decode(errors="ignore")  # control: it is in TRL's file
    assert "hf_secret" not in repr(saved(tmp_path, trl_args))
    gspo = {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.1, "epsilon_high": 0.3}
    found = saved(tmp_path, config(tmp_path, quantize_learner=False, delta=2.5, **gspo))
    assert arm(found) == "W4A16 engine, learner not quantized, grpo, sequence ratio"
    assert bounds(found) == Bounds(1.3, 0.9, 2.5) and level(found) == "sequence"
    found = saved(tmp_path, GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, loss_type="sapo"))
    assert arm(found) == "plain TRL, sapo"
    assert bounds(found) == bounds({}) == Bounds() and level(found) == "token"


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
    (tmp_path / "training_args.bin").write_bytes(b"no zip")
    assert read_settings(tmp_path) == {}
    assert arm({}) == "settings not found"


def test_code_flips_are_drawn_by_the_type_of_their_layer(tmp_path):
    pytest.importorskip("matplotlib")
    shares = {"attention": 0.01, "mlp": 0.02, "experts": 0.04}
    log = [row(s, **{f"quant/flip_frac/{kind}": s * share for kind, share in shares.items()}) for s in (1, 2)]
    (chart,) = [chart for chart in CHARTS if chart.key == "sync"]
    figure = draw_panels(chart.panels[:2], [read_run(str(write_run(tmp_path, log)))])
    found = [[line.get_ydata().tolist() for line in axis.lines] for axis in figure.axes]
    assert found == [[[0.01, 0.02]], [[0.02, 0.04], [0.04, 0.08]]]
