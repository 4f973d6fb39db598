"""The command: what it writes, what it refuses, and that nothing of a run gets out of its text."""

import base64
import io
import math
import os
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch
from configs import config
from PIL import Image

from qarl_trl import cli
from qarl_trl.tools.report.draw import COLOURS
from qarl_trl.tools.report.figures import CHARTS
from qarl_trl.tools.report.page import POLICY

from .folders import row, token_rows, write_run, write_tokens


EVIL = "<script>document.body.innerHTML = 'owned'</script>"
SECRET = "hf_thisIsASecret"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Two runs of different length, one with a single line, NaN, tokens and hostile texts; their report."""
    folder = tmp_path_factory.mktemp("runs")
    log = [row(step, eval_reward=0.3) for step in range(1, 9)]
    log[3] |= {"reward": math.nan, "time/update": math.nan}
    long = write_run(folder / "_a$b$<script>", log)
    rows = token_rows(60)
    rows[0] |= {"prompt": EVIL, "completion": EVIL, "error_mask": [True] * 6}
    write_tokens(long, rows)
    torch.save(config(folder, hub_token=SECRET), long / "training_args.bin")
    short = write_run(folder / "short", [{"step": 1, "reward": 0.25, "step_time": 1.0}])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", SECRET)
        cli.main(["report", str(long), str(short), "--baseline", "short", "--output_dir", str(folder / "out")])
    return folder / "out"


def test_the_page_holds_every_picture_and_loads_nothing(report):
    text = (report / "report.html").read_text()
    images = re.findall(r'(?:src|srcset)="data:image/png;base64,([^"]+)"', text)
    files = sorted((report / "report").glob("*.png"))
    of_tokens = {"distributions", "low_probability"}
    assert {file.stem for file in files} == {chart.key for chart in CHARTS} | of_tokens | {"time"}
    assert len(images) == 2 * len(files)
    decoded = [base64.b64decode(image) for image in images]
    assert {file.read_bytes() for file in files} <= set(decoded)
    assert (report / "report.png").read_bytes() == (report / "report" / "overview.png").read_bytes()
    for image in decoded:
        pixels = np.asarray(Image.open(io.BytesIO(image)).convert("RGB"))
        assert pixels.shape[1] >= 600 and pixels.std() > 5  # something is drawn
    addresses = re.findall(r'(?:src|srcset|href|action)\s*=\s*"?([^" >]*)', text) + re.findall(r"url\(([^)]*)", text)
    assert all(address.startswith("data:image/png") for address in addresses)
    assert f'content="{POLICY}"' in text and len(text) < 3_000_000


def test_texts_of_runs_are_escaped_and_secrets_stay_out(report):
    text = (report / "report.html").read_text()
    assert "<script" not in text
    assert text.count("&lt;script&gt;document.body") == 2  # prompt and completion
    assert "_a$b$&lt;script&gt;" in text
    assert "W4A16 engine and learner, tbpo" in text  # control: the settings were read
    assert SECRET not in text and str(report.parent) not in text


def test_the_table_and_what_a_run_lacks(report):
    text = (report / "report.html").read_text()
    cells = [re.sub("<[^>]*>", "", cell) for cell in re.findall("<td>(.*?)</td>", text)]
    assert cells[2:9] == ["8", "0.800", "0.800 at 8", "0.300", "1.4e-02", "rollout 50%, sync 12%, update 38%", "2"]
    assert cells[9] == "0.50" and cells[-1] == "1.00"  # speed-up: 1 s an update over 2 s
    lacking = re.findall('<p class="missing"><b>short</b>: (.*?)</p>', text)
    assert len(lacking) == 1
    names = set(lacking[0].rstrip(". ").split(": ")[1].split(", "))
    assert {"ratio/*", "entropy", "eval_reward"} <= names and "reward" not in names


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{}/nowhere"], "no such folder: .*nowhere"),
        (["{}/empty"], "has logged nothing yet"),
        (["{}"], "is no run"),
        (["{}/a", "{}/b/a"], "two runs are named 'a': name them with NAME=FOLDER"),
        (["{}/a", "--baseline", "nowhere"], "no such folder: nowhere"),
        (["{}/sft"], "nothing that the report shows was logged by sft"),
        ([f"{i}={{}}/a" for i in range(len(COLOURS) + 1)], "7 runs fit in one report, got 8"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(tmp_path, capsys, arguments, message):
    write_run(tmp_path / "a", [row(1)])
    write_run(tmp_path / "b" / "a", [row(1)])
    write_run(tmp_path / "empty", [])
    write_run(tmp_path / "sft", [{"step": 1, "loss": 2.0}])
    with pytest.raises(SystemExit) as stopped:
        cli.main(["report", *(argument.format(tmp_path) for argument in arguments)])
    assert stopped.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and re.search(f"^qarl-trl report: .*{message}", lines[0])
    assert not list(tmp_path.rglob("report*"))


def browser():
    """A Chromium, given or found."""
    names = ("chromium", "chromium-headless-shell", "google-chrome", "chrome")
    return os.environ.get("QARL_TRL_BROWSER") or next(filter(None, map(shutil.which, names)), None)


@pytest.mark.skipif(browser() is None, reason="needs Chromium, on the PATH or in QARL_TRL_BROWSER")
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_shows_the_page(report, tmp_path, dark):
    def shot(name, text):
        page, image = tmp_path / f"{name}.html", tmp_path / f"{name}.png"
        page.write_text(text)
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1100,3000", f"--screenshot={image}"]
        options += [f"--user-data-dir={tmp_path / 'profile'}", f"--blink-settings=preferredColorScheme={1 - dark}"]
        subprocess.run([browser(), *options, page.as_uri()], check=True, capture_output=True, timeout=120)
        return np.asarray(Image.open(image).convert("RGB")).astype(int)

    text = (report / "report.html").read_text()
    shown, without = (
        shot("page", text),
        shot("broken", text.replace("data:image/png;base64,", "data:image/png;base64,x")),
    )
    colour = np.array([int(COLOURS[0][i : i + 2], 16) for i in (1, 3, 5)])
    coloured, broken = (int((abs(pixels - colour).max(-1) < 24).sum()) for pixels in (shown, without))
    assert coloured > 1000 > broken  # control: without its pictures, the dot of the table alone
    assert (shown[-1, 5].mean() < 60) == dark  # the page's ground
    assert shown[:200].std() > 5  # the table is there: no script replaced it
