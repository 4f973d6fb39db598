"""What is drawn: each panel of each figure against the log, and the bars of those that are not lines."""

import math

import numpy as np
import pytest
from slow.toys import distinct_characters, prompts, save_model
from trl import GRPOConfig, GRPOTrainer

from qarl_trl import cli
from qarl_trl.tools.report import figures, times, tokens
from qarl_trl.tools.report.runs import read_run

from .folders import row, token_rows, write_run, write_tokens


# The metrics of each panel, in the page's order.
FIGURES = {
    "overview": [
        ["reward", "eval_reward"],
        ["mismatch/logp_diff_mean", "logp_diff_floor"],
        ["ratio/pos_high_frac", "ratio/neg_low_frac", "ratio/neg_high_frac"],
        ["quant/flip_frac"],
        ["entropy"],
        ["step_time"],
    ],
    "mismatch": [
        ["mismatch/kl_k3"],
        ["ratio/kl_k3"],
        ["kl"],
        ["mismatch/seq_weight_mean", "mismatch/seq_weight_min", "mismatch/seq_weight_max"],
    ],
    "ratios": [["ratio/pos_q50", "ratio/pos_q99"], ["ratio/neg_q50", "ratio/neg_q99"], ["ratio/min", "ratio/max"]],
    "bands": [["ratio/paper_pos_high_frac"], ["ratio/paper_neg_low_frac"], ["ratio/paper_neg_high_frac"]],
    "error_tokens": [
        ["error_tokens/frac"],
        ["error_tokens/pos_frac", "error_tokens/neg_frac"],
        ["error_tokens/extreme_frac", "error_tokens/inside_frac"],
        ["error_tokens/extreme_corr"],
    ],
    "completions": [
        ["completions/mean_length"],
        ["completions/clipped_ratio", "completions/pos_clipped_ratio", "completions/neg_clipped_ratio"],
        ["reward_std"],
    ],
    "sync": [
        ["quant/flip_frac/attention"],
        ["quant/flip_frac/mlp", "quant/flip_frac/experts"],
        ["sync/verify_logp_diff", "sync/verify_noise_floor", "sync/verify_allowed"],
        ["sync/bytes"],
    ],
}
OF_A_ROLLOUT = ("sync/", "quant/", "mismatch/", "completions/", "reward")


@pytest.fixture
def kept(monkeypatch):
    """The figures of a page as objects of matplotlib, by name."""
    for module in (figures, times, tokens):
        monkeypatch.setattr(module, "picture", lambda key, title, caption, draw: (key, draw()))
    return dict


def log():
    """Of 12 updates, four to a rollout batch, as the quickstart's: rollout metrics in lines 1, 5 and 9."""
    rows = [row(step, kl=0.003 * step, logp_diff_floor=0.02) for step in range(1, 13)]
    for line in rows:
        if line["step"] % 4 != 1:
            for name in [name for name in line if name.startswith(OF_A_ROLLOUT)]:
                del line[name]
    return [*rows, {"step": 0, "eval_reward": 0.25}, {"step": 12, "eval_reward": 0.75}]


def drawn(figure):
    """Steps and values of each line, panel by panel."""
    return [[np.stack([line.get_xdata(), line.get_ydata()]).tolist() for line in axis.lines] for axis in figure.axes]


def logged(rows, name):
    found = sorted((line["step"], line[name]) for line in rows if name in line)
    return [[float(step) for step, _ in found], [value for _, value in found]]


def test_every_panel_draws_what_was_logged(tmp_path, kept):
    rows = log()
    found = kept(figures.line_charts([read_run(str(write_run(tmp_path, rows)))]))
    assert list(found) == list(FIGURES)
    lines = {}
    for key, panels in FIGURES.items():
        assert drawn(found[key]) == [[logged(rows, name) for name in panel] for panel in panels], key
        lines |= {name: tuple(logged(rows, name)[1]) for panel in panels for name in panel}
    assert len(set(lines.values())) == len(lines) == 43  # control: no metric could stand for another


@pytest.mark.parametrize("key", FIGURES)
def test_a_metric_that_is_absent_gives_no_line_and_no_figure(tmp_path, kept, key):
    gone = {name for panel in FIGURES[key] for name in panel}
    rows = [{name: value for name, value in line.items() if name not in gone} for line in log()]
    found = kept(figures.line_charts([read_run(str(write_run(tmp_path / "none", rows)))]))
    assert list(found) == [other for other in FIGURES if other != key]
    one = next(name for panel in FIGURES[key] for name in panel)
    rows = [{name: value for name, value in line.items() if name != one} for line in log()]
    found = kept(figures.line_charts([read_run(str(write_run(tmp_path / "one", rows)))]))
    expected = [[logged(rows, name) for name in panel if name != one] for panel in FIGURES[key]]
    assert drawn(found[key]) == [panel for panel in expected if panel]


def test_bars_of_time_are_the_mean_seconds_of_each_phase(tmp_path, kept):
    run = read_run(str(write_run(tmp_path / "a", [row(1), row(2, **{"time/update": 2.75})])))
    plain = read_run(str(write_run(tmp_path / "b", [{"step": 1, "step_time": 9.0}])))
    bars, faster = kept(times.time_chart([run, plain], run))["time"].axes
    widths = [bar.get_width() for bar in bars.patches if bar.get_width()]
    assert widths == [1.0, 0.25, 1.75, 9.0]
    assert [bar.get_width() for bar in faster.patches] == [1.0, 2.0 / 9.0]  # without phases, by `step_time`
    assert kept(times.time_chart([read_run(str(write_run(tmp_path / "c", [{"step": 1, "reward": 0.0}])))], None)) == {}


def test_distributions_are_of_one_sign_of_the_advantage(tmp_path, kept):
    """r and w of completions with A > 0 lie above 1 here, of the others below."""
    rows = token_rows(200)
    for line in rows:
        up = math.copysign(0.5, line["advantage"])
        line |= {"current_logps": [old + up for old in line["old_logps"]], "ratio": math.exp(up)}
        line |= {"engine_logps": [old - up for old in line["old_logps"]], "mismatch_weight": math.exp(up)}
    run = read_run(str(write_tokens(write_run(tmp_path, [row(1)]), rows)))
    charts = kept(tokens.distributions([run], {run.name: tokens.read_tokens(run)}))
    axes = charts["distributions"].axes
    assert [axis.get_title() for axis in axes] == [
        f"{what} of {of}, A {sign} 0" for of in ("tokens", "completions") for what in "rw" for sign in "><"
    ]
    for axis, sign in zip(axes, (1, -1) * 4, strict=True):
        shares, edges, _ = axis.patches[0].get_data()
        assert shares.sum() == pytest.approx(1.0)
        assert (edges[:-1][shares > 0] >= 1.0).tolist() == [sign > 0]
    for axis, sign in zip(charts["low_probability"].axes, (1, -1), strict=True):
        for line in axis.lines:
            assert line.get_ydata() == pytest.approx(math.exp(0.5 * sign), rel=1e-5)  # float32 in the file


def test_a_report_of_trls_own_trainer_goes_as_far_as_its_log(tmp_path, capsys):
    """Trained here by a stock `GRPOTrainer`; no engine, so no mismatch, and none of the trainer's own metrics."""
    size = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 8, "max_steps": 4}
    quiet = {"use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    args = {"output_dir": str(tmp_path / "run"), "steps_per_generation": 2, "logging_steps": 1}
    args |= {
        "log_completions": True,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "per_device_eval_batch_size": 4,
        "beta": 0.01,
    }
    model = save_model(tmp_path / "model", layers=1)
    data = {"train_dataset": prompts(), "eval_dataset": prompts(1)}
    trainer = GRPOTrainer(model, distinct_characters, GRPOConfig(**args, **size, **quiet), **data)
    trainer.train()
    trainer.save_state()
    cli.main(["report", str(tmp_path / "run")])
    drawn_files = {file.stem for file in (tmp_path / "run" / "report").glob("*.png")}
    assert drawn_files == {"overview", "mismatch", "completions", "time"}
    run = read_run(str(tmp_path / "run"))
    names = {name for panels in FIGURES.values() for panel in panels for name in panel}
    logged_here = names - {"logp_diff_floor"} - set(figures.missing(run))
    assert logged_here == {
        *("reward", "eval_reward", "reward_std", "entropy", "step_time", "kl"),
        *("ratio/pos_high_frac", "ratio/neg_low_frac"),  # TRL's `clip_ratio/*`
        *("completions/mean_length", "completions/clipped_ratio"),
    }
    text = (tmp_path / "run" / "report.html").read_text()
    assert "Examples of text" in text and text.count("<article>") == 2
    signs = "completions/pos_clipped_ratio, completions/neg_clipped_ratio"
    assert f"not logged by this run: mismatch/*, ratio/*, quant/*, error_tokens/*, {signs}, sync/*. " in text
