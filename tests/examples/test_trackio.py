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
    # For processes of their own: trackio reads the name of the folder when it is imported.
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

    logged = set().union(*log) - {"step", "epoch"}
    for name in logged:
        # transformers sends the summary of a training under other names.
        if not name.startswith(("train_", "total_")):
            assert f"train/{name}" in kept["metrics"]

    expected = [row["entropy"] for row in log if "entropy" in row]
    assert [row["value"] for row in entropy["values"]] == expected
    # Control: there are values, and not one twice.
    assert len(expected) == len(set(expected)) == 2
