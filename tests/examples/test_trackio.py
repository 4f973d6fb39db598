"""`report_to: trackio`: what a run logs lies in a folder of this machine, and trackio's own command reads it back."""

import json
import os
import subprocess
import sys

import pytest
from conftest import save_chat_model

from .test_countdown import FOLDER, small_run


pytest.importorskip("trackio")


def test_metrics_are_those_of_the_trainers_log(tmp_path):
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio"), "PYTHONPATH": str(FOLDER.parents[1])}

    def run(*command):
        done = subprocess.run(
            [sys.executable, *command], env=environment, cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    given = small_run(
        save_chat_model(tmp_path / "model"),
        tmp_path,
        report_to="trackio",
        project="countdown",
        save_steps=1,
        run_name="w4a16",
    )
    run(str(FOLDER / "countdown.py"), *given, "--logging_steps", "1")
    log = json.loads((tmp_path / "out" / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]
    where = "--project", "countdown", "--run", "w4a16"
    names = json.loads(run("-m", "trackio.cli", "list", "metrics", *where, "--json"))["metrics"]
    logged = {name for row in log for name in row} - {"step", "epoch"}
    assert {f"train/{name}" for name in logged if not name.startswith(("train_", "total_"))} <= set(names)
    found = json.loads(run("-m", "trackio.cli", "get", "metric", *where, "--metric", "train/entropy", "--json"))
    assert [row["value"] for row in found["values"]] == [row["entropy"] for row in log if "entropy" in row]
    assert len({row["entropy"] for row in log}) == 2  # control: there are values, and not one twice
