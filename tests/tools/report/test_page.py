"""The page: what is drawn, that no text of a run gets out of its place, and what the command refuses."""

import base64
import io
import re
import tomllib
from html import escape
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from qarl_trl import cli
from qarl_trl.tools.report import verdict
from qarl_trl.tools.report.plots import COLOURS, FLOOR, PANELS, draw
from qarl_trl.tools.report.runs import LoggedRun

from .folders import log, write_run


ROOT = Path(__file__).parents[3]
# All of one panel and one of another, so that a panel and a part of one become constant.
RATIOS = ("ratio/max", "ratio/min", "ratio/neg_low_frac")
CONSTANT_RATIOS = dict.fromkeys(RATIOS, 0.25)


def panel_of(title):
    return next(panel for panel in PANELS if panel.title == title)


# What is drawn ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_every_panel_draws_what_was_logged(panel):
    run = LoggedRun("a", [*log(updates=2), {"step": 0, "eval_reward": 0.5}, {"step": 16, "eval_reward": 0.75}])
    axis = Figure().add_subplot()

    draw(axis, panel, [run])

    expected = []
    for name in panel.metrics:
        expected.append(points(*run.series(name)))
    # The noise floor, from left to right.
    if panel.log:
        expected.append(points([0.0, 1.0], [run.values(FLOOR).mean()] * 2))

    drawn = []
    for line in axis.lines:
        drawn.append(points(line.get_xdata(), line.get_ydata()))
    assert drawn == expected


def points(steps, values):
    """A line as numbers that are compared exactly."""
    return np.stack([steps, values]).tolist()


def test_a_metric_is_constant_if_it_is_equal_in_all_runs():
    clipped = panel_of("Clipped")
    flat = LoggedRun("a", log(**CONSTANT_RATIOS))
    varied = LoggedRun("b", log())

    assert clipped.split([flat])[0] == [clipped.metrics[0], clipped.metrics[2]]
    # Control: beside a run in which they vary, none is constant.
    assert clipped.split([flat, varied])[0] == [*clipped.metrics]


def test_a_metric_that_was_not_logged_is_neither_varying_nor_constant():
    run = LoggedRun("a", [{"step": 1, "reward": 1.0}])

    assert panel_of("Clipped").split([run]) == ([], {})


def test_a_panel_of_constants_is_left_out(tmp_path):
    folder = write_run(tmp_path / "flat", log(**CONSTANT_RATIOS))

    cli.main(["report", str(folder)])

    text = (folder / "report.html").read_text()
    assert "Extremes of the sequence ratio" not in text
    assert text.count("<figure>") == len(PANELS) - 1
    # The page lists constants by panel, and the ratios are in two panels.
    in_order_of_the_page = sorted(RATIOS, key=text.index)
    assert ", ".join(f"<code>{name}</code> 0.25" for name in in_order_of_the_page) in text


# What is written ----------------------------------------------------------------------------------------------------


@pytest.fixture
def hostile_page(tmp_path):
    """The page about a run whose folder has a script in its name, and a short one of plain TRL."""
    hostile = write_run(tmp_path / "a$b$<script>", log(**{"quant/flip_frac": 0.4}))
    plain = write_run(tmp_path / "_short", [{"step": 1, "reward": 0.25, "step_time": 1.0}])
    cli.main(["report", str(hostile), str(plain), "--output_dir", str(tmp_path / "out")])
    return (tmp_path / "out" / "report.html").read_text()


def images(text):
    return re.findall(r'src="data:image/png;base64,([^"]+)"', text)


def test_the_page_escapes_every_text(tmp_path, hostile_page):
    assert "<script" not in hostile_page
    assert "a$b$&lt;script&gt;" in hostile_page
    # The folder's name alone: its path may name a user.
    assert str(tmp_path) not in hostile_page


def test_the_page_holds_its_pictures(hostile_page):
    # Nothing is loaded from elsewhere: the page is one file.
    assert len(images(hostile_page)) == len(re.findall(r"src\s*=", hostile_page))
    # The flips are constant and so have no panel.
    assert len(images(hostile_page)) == len(PANELS) - 1
    assert "<code>quant/flip_frac</code> 0.4." in hostile_page


def test_each_picture_has_the_colour_of_the_first_run(hostile_page):
    # A picture may be drawn without its lines: these have the colour of their run.
    colour = list(bytes.fromhex(COLOURS[0].removeprefix("#")))

    for image in images(hostile_page):
        file = io.BytesIO(base64.b64decode(image))
        pixels = np.asarray(Image.open(file).convert("RGB")).astype(int)
        # Not exactly: lines have soft edges.
        coloured = abs(pixels - colour).max(-1) < 24
        assert coloured.sum() > 100


def test_the_verdict_is_printed_too(tmp_path, capsys):
    """For a run on a machine without a browser."""
    run = write_run(tmp_path / "a", log(**{"quant/flip_frac": 0.4}))

    cli.main(["report", str(run)])

    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("a: ")
    assert "learning_rate" in "\n".join(said[1:-1])
    assert said[-1] == f"written to {run / 'report.html'}"


def test_a_log_that_was_left_out_is_named(tmp_path, capsys):
    run = write_run(tmp_path / "a", log(3), checkpoint=12)
    cli.main(["report", str(run)])
    assert "left out" not in capsys.readouterr().out  # control: one log

    write_run(run, log(2, reward=0.9), checkpoint=8)
    cli.main(["report", str(run)])

    assert "left out: checkpoint-12/trainer_state.json" in capsys.readouterr().out
    assert "left out: checkpoint-12/trainer_state.json" in (run / "report.html").read_text()


def test_advice_is_a_link_to_the_docs(tmp_path):
    run = write_run(tmp_path / "a", log(**{"quant/flip_frac": 0.4}))
    site = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Documentation"]

    cli.main(["report", str(run)])

    links = re.findall(r'<a href="([^"]+)">docs/([^<]+)</a>', (run / "report.html").read_text())
    assert (escape(f"{site}/troubleshooting/#the-reward-collapsed"), verdict.COLLAPSED) in links


def test_advice_leads_to_a_heading_of_the_docs():
    # Headings become anchors as MkDocs and GitHub make them.
    pages = {limit.page for limit in verdict.LIMITS} | {verdict.COLLAPSED, verdict.NOTHING, verdict.MISMATCH}

    for link in pages:
        page, _, anchor = link.partition("#")
        headings = re.findall(r"^## (.*)", (ROOT / "docs" / page).read_text(), re.MULTILINE)
        anchors = "\n".join(headings).lower().replace("'", "").replace(" ", "-").splitlines()
        assert anchor in anchors


# What is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("runs", "message"), [(["nowhere"], "nowhere is not a run"), (["a"] * (len(COLOURS) + 1), "7 runs fit")]
)
def test_bad_input_is_one_line_and_nothing_is_written(tmp_path, capsys, runs, message):
    write_run(tmp_path / "a", log(1))

    folders = [str(tmp_path / run) for run in runs]
    with pytest.raises(SystemExit) as stopped:
        cli.main(["report", *folders])

    assert stopped.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]
    assert not list(tmp_path.rglob("report*"))
