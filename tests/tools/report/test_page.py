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
from qarl_trl.tools.report.runs import Run

from .folders import log, write_run


ROOT = Path(__file__).parents[3]


def test_every_panel_draws_what_was_logged():
    run = Run("a", [*log(updates=2), {"step": 0, "eval_reward": 0.5}, {"step": 16, "eval_reward": 0.75}])
    for panel in PANELS:
        axis = Figure().add_subplot()
        draw(axis, panel, [run])
        found = [np.stack([line.get_xdata(), line.get_ydata()]).tolist() for line in axis.lines]
        floor = [[[0.0, 1.0], [run.values(FLOOR).mean()] * 2]] if panel.log else []  # from left to right
        assert found == [np.stack(run.series(name)).tolist() for name in panel.metrics] + floor


def test_a_constant_has_no_line_and_a_panel_of_constants_is_left_out(tmp_path):
    names = ("ratio/max", "ratio/min", "ratio/neg_low_frac")
    flat = write_run(tmp_path / "flat", log(**dict.fromkeys(names, 0.25)))
    cli.main(["report", str(flat)])
    text = (flat / "report.html").read_text()
    assert "Extremes of the sequence ratio" not in text and text.count("<figure>") == len(PANELS) - 1
    assert ", ".join(f"<code>{name}</code> 0.25" for name in sorted(names, key=text.index)) in text
    varied = Run("b", log())
    clipped = next(panel for panel in PANELS if panel.title == "Clipped")
    assert clipped.split([Run("a", log(**dict.fromkeys(names, 0.25)))])[0] == [clipped.metrics[0], clipped.metrics[2]]
    assert clipped.split([Run("a", log(**dict.fromkeys(names, 0.25))), varied])[0] == [*clipped.metrics]  # control
    assert clipped.split([Run("a", [{"step": 1, "reward": 1.0}])]) == ([], {})


def test_the_page_holds_its_pictures_and_escapes_every_text(tmp_path):
    hostile = write_run(tmp_path / "a$b$<script>", log(**{"quant/flip_frac": 0.4}))
    plain = write_run(tmp_path / "_short", [{"step": 1, "reward": 0.25, "step_time": 1.0}])
    cli.main(["report", str(hostile), str(plain), "--output_dir", str(tmp_path / "out")])
    text = (tmp_path / "out" / "report.html").read_text()
    assert "<script" not in text and str(tmp_path) not in text
    assert "a$b$&lt;script&gt;" in text  # the folder's name alone
    images = re.findall(r'src="data:image/png;base64,([^"]+)"', text)
    assert len(images) == len(re.findall(r"src\s*=", text))  # nothing is loaded from elsewhere
    assert len(images) == len(PANELS) - 1 and "<code>quant/flip_frac</code> 0.4." in text
    for image in images:
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(image))).convert("RGB")).astype(int)
        colour = [int(COLOURS[0][i : i + 2], 16) for i in (1, 3, 5)]
        assert (abs(pixels - colour).max(-1) < 24).sum() > 100


def test_advice_leads_to_a_heading_of_the_docs(tmp_path):
    run = write_run(tmp_path / "a", log(**{"quant/flip_frac": 0.4}))
    cli.main(["report", str(run)])
    site = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Documentation"]
    links = re.findall(r'<a href="([^"]+)">docs/([^<]+)</a>', (run / "report.html").read_text())
    assert (escape(f"{site}/troubleshooting/#the-reward-collapsed"), verdict.COLLAPSED) in links
    pages = {limit.page for limit in verdict.LIMITS} | {verdict.COLLAPSED, verdict.NOTHING, verdict.MISMATCH}
    for page, _, anchor in (page.partition("#") for page in pages):
        titles = re.findall(r"^## (.*)", (ROOT / "docs" / page).read_text(), re.MULTILINE)
        assert anchor in [title.lower().replace("'", "").replace(" ", "-") for title in titles]


@pytest.mark.parametrize(
    ("runs", "message"), [(["nowhere"], "nowhere is not a run"), (["a"] * (len(COLOURS) + 1), "7 runs fit")]
)
def test_bad_input_is_one_line_and_nothing_is_written(tmp_path, capsys, runs, message):
    write_run(tmp_path / "a", log(1))
    with pytest.raises(SystemExit) as stopped:
        cli.main(["report", *(str(tmp_path / run) for run in runs)])
    assert stopped.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0]
    assert not list(tmp_path.rglob("report*"))
