"""The page: what is drawn, that no text of a run gets out of its place, and what the command refuses."""

import base64
import io
import re

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from qarl_trl import cli
from qarl_trl.tools.report.plots import COLOURS, PANELS, draw
from qarl_trl.tools.report.runs import Run

from .folders import log, write_run


def test_every_panel_draws_what_was_logged():
    run = Run("a", [*log(updates=2), {"step": 0, "eval_reward": 0.5}, {"step": 16, "eval_reward": 0.75}])
    for panel in PANELS:
        axis = Figure().add_subplot()
        draw(axis, panel, [run])
        found = [np.stack([line.get_xdata(), line.get_ydata()]).tolist() for line in axis.lines]
        assert found == [np.stack(run.series(name)).tolist() for name in panel.metrics]


def test_the_page_holds_its_pictures_and_escapes_every_text(tmp_path):
    hostile = write_run(tmp_path / "a$b$<script>", log())
    plain = write_run(tmp_path / "_short", [{"step": 1, "reward": 0.25, "step_time": 1.0}])
    cli.main(["report", str(hostile), str(plain), "--output_dir", str(tmp_path / "out")])
    text = (tmp_path / "out" / "report.html").read_text()
    assert "<script" not in text and str(tmp_path) not in text
    assert "a$b$&lt;script&gt;" in text  # the folder's name alone
    images = re.findall(r'src="data:image/png;base64,([^"]+)"', text)
    assert len(images) == len(re.findall(r"(?:src|href)\s*=", text))  # nothing is loaded from elsewhere
    assert len(images) == len(PANELS)
    for image in images:
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(image))).convert("RGB")).astype(int)
        colour = [int(COLOURS[0][i : i + 2], 16) for i in (1, 3, 5)]
        assert (abs(pixels - colour).max(-1) < 24).sum() > 100


@pytest.mark.parametrize(
    ("runs", "message"), [(["nowhere"], "nowhere is no run"), (["a"] * (len(COLOURS) + 1), "7 runs fit")]
)
def test_bad_input_is_one_line_and_nothing_is_written(tmp_path, capsys, runs, message):
    write_run(tmp_path / "a", log(1))
    with pytest.raises(SystemExit) as stopped:
        cli.main(["report", *(str(tmp_path / run) for run in runs)])
    assert stopped.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0]
    assert not list(tmp_path.rglob("report*"))
