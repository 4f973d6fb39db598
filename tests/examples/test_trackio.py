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
        """The output of a Python command."""
        words = [sys.executable, *command]
        done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    model = save_chat_model(tmp_path / "model")
    logging = {"report_to": "trackio", "project": "countdown", "run_name": "w4a16", "logging_steps": 1}
    run(str(FOLDER / "countdown.py"), *small_run(model, tmp_path, save_steps=1, **logging))
    state = json.loads((tmp_path / "out" / "checkpoint-2" / "trainer_state.json").read_text())
    log = state["log_history"]

    of_the_run = ["--project", "countdown", "--run", "w4a16", "--json"]
    kept = json.loads(run("-m", "trackio.cli", "list", "metrics", *of_the_run))
    entropy = json.loads(run("-m", "trackio.cli", "get", "metric", *of_the_run, "--metric", "train/entropy"))

    logged = {name for row in log for name in row} - {"step", "epoch"}
    by_step = {f"train/{name}" for name in logged if not name.startswith(("train_", "total_"))}
    assert by_step <= set(kept["metrics"])
    assert [row["value"] for row in entropy["values"]] == [row["entropy"] for row in log if "entropy" in row]
    assert len({row["entropy"] for row in log}) == 2  # control: there are values, and not one twice
