"""The GPU's first run, dry: its quickest stages, and what it does with one that fails or hangs."""

import argparse
import json
import os
import subprocess
import sys
import time

import pytest

from gpu import first_run
from gpu.first_run import Stage, merged, run_stages, table


def hang(run):
    run.record("child", pid=subprocess.Popen(["sleep", "90"]).pid)
    time.sleep(90)


def fail(run, word):
    run.check(word, True)
    run.check("half of it", False)
    raise RuntimeError("a reason")


def stage(function, limit_s, **settings):
    return Stage(1, function, limit_s, f"test_first_run:{function}", settings)


def run(tmp_path, *stages, budget=60):
    args = argparse.Namespace(part=None, out=tmp_path, budget=budget, dry=True)
    return run_stages(list(stages), args)


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
def test_a_stage_that_hangs_or_fails_leaves_its_figures_and_stops_no_other(tmp_path):
    hung, failed, skipped = run(
        tmp_path, stage("hang", 20), stage("fail", 30, word="so"), stage("hang", 100), budget=60
    )
    assert (hung["status"], failed["status"], skipped["status"]) == ("timeout", "failed", "skipped-for-budget")
    assert not is_alive(hung["figures"]["child"]["pid"])
    assert "time.sleep" in hung["error"] or "hang" in hung["error"]  # where it was
    assert failed["figures"] == {"checks": "1 of 2 hold", "not_so": ["half of it"]}
    assert "RuntimeError: a reason" in failed["error"]
    lines = [json.loads(line) for line in (tmp_path / "stages.jsonl").read_text().splitlines()]
    assert [line["status"] for line in lines] == ["timeout", "failed", "skipped-for-budget"]
    assert "1 failed, 1 timeout, 1 skipped-for-budget" in table(lines)
    assert "a reason" in (tmp_path / "stages.log").read_text()


def test_figures_of_one_case_are_put_together_and_a_cut_line_is_left_out():
    lines = '{"a": {"x": 1}}\n{"b": 2}\n{"a": {"y": 3}}\n{"b": 4, "c'
    assert merged(lines) == {"a": {"x": 1, "y": 3}, "b": 2}


def test_the_commit_is_that_of_git_where_nobody_gives_one(monkeypatch, tmp_path):
    monkeypatch.delenv("QARL_COMMIT", raising=False)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=first_run.ROOT, capture_output=True, text=True).stdout
    assert first_run.commit_of_tree().removesuffix("-dirty") == (head.strip() or "unknown")
    monkeypatch.setattr(first_run, "ROOT", tmp_path)
    assert first_run.commit_of_tree() == "unknown"


def test_the_quantizer_stage_runs_dry(tmp_path):
    script = os.path.join(os.path.dirname(__file__), "first_run.py")
    command = [sys.executable, script, "--dry", "--only", "quantizer", "--out", str(tmp_path)]
    env = os.environ | {"QARL_COMMIT": "of the copy"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    (line,) = (json.loads(line) for line in (tmp_path / "stages.jsonl").read_text().splitlines())
    assert line["figures"]["W4A16 float32"]["GB/s"] > 0
    assert line["figures"]["checks"] == "49 of 49 hold" and line["commit"] == "of the copy"
