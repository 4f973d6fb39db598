"""The GPU's first run, dry: its quickest stages, and what it does with one that fails or hangs."""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpu import first_run
from gpu.first_run import Stage, extrapolated, merged, run_stages, slice_of, table


def hang(run):
    run.record("child", pid=subprocess.Popen(["sleep", "90"]).pid)
    run.record(
        "engine", pid=subprocess.Popen(["sleep", "90"], process_group=0).pid
    )  # as tests/slow/isolated.py has it
    time.sleep(90)


def fail(run, word):
    run.check(word, True)
    run.check("half of it", False)
    raise RuntimeError("a reason")


def stage(function, limit_s, **settings):
    return Stage(1, function, limit_s, f"test_first_run:{function}", settings)


def run(tmp_path, *stages, budget=60):
    tmp_path.mkdir(exist_ok=True)
    args = argparse.Namespace(part=None, out=tmp_path, budget=budget, dry=True)
    return run_stages(list(stages), args)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
def test_a_stage_that_hangs_or_fails_leaves_its_figures_and_stops_no_other(tmp_path):
    hung, failed, skipped = run(
        tmp_path, stage("hang", 20), stage("fail", 30, word="so"), stage("hang", 100), budget=60
    )
    assert (hung["status"], failed["status"], skipped["status"]) == ("timeout", "failed", "skipped-for-budget")
    assert not any(is_alive(hung["figures"][name]["pid"]) for name in ("child", "engine"))
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


def test_the_tests_are_not_started_without_a_minute(tmp_path):
    (row,) = run(tmp_path, Stage(3, "pytest", 540, "no:such"), budget=64)
    assert row["status"] == "skipped-for-budget"


def test_a_step_of_48_layers_is_a_line_of_its_own_once_2_and_4_are_measured(monkeypatch, tmp_path):
    two = {"seconds": {"forward": [1.0, 9.0, 1.5], "sync": [0.5]}, "peak_gib": {"forward": 10.0}}
    four = {"seconds": {"forward": [2.0, 2.0, 2.5], "rollout": [3.0]}, "peak_gib": {"forward": 12.0}}
    whole = {"seconds": {"forward": 13.0}, "peak_gib": {"forward": 56.0}}  # 1.5 + 23 * 0.5, and 10 + 23 * 2
    assert extrapolated(two, four, 48) == whole
    assert extrapolated(two, two, 48)["seconds"] == {"forward": 1.5, "sync": 0.5}
    figures, status = {slice_of(2): two, slice_of(4): four}, {slice_of(4): "ok"}

    def measured(stage, *_):
        return {"stage": stage.name, "status": status.get(stage.name, "ok"), "seconds": 1.0, "error": ""} | {
            "figures": figures[stage.name]
        }

    monkeypatch.setattr(first_run, "run_stage", measured)
    stages = [stage for stage in first_run.STAGES if stage.name in figures]
    run(tmp_path, *stages, budget=600)
    line = json.loads((tmp_path / "stages.jsonl").read_text().splitlines()[-1])
    assert (line["stage"], line["figures"]) == ("step-MoE-48-layers", whole)
    status[slice_of(4)] = "timeout"
    run(tmp_path / "x", *stages, budget=600)
    assert len((tmp_path / "x/stages.jsonl").read_text().splitlines()) == 2  # control


def test_the_commit_is_that_of_git_where_nobody_gives_one(monkeypatch, tmp_path):
    monkeypatch.delenv("QARL_COMMIT", raising=False)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=first_run.ROOT, capture_output=True, text=True).stdout
    assert first_run.commit_of_tree().removesuffix("-dirty") == (head.strip() or "unknown")
    monkeypatch.setattr(first_run, "ROOT", tmp_path)
    assert first_run.commit_of_tree() == "unknown"


def test_stages_run_dry_and_without_pytest(tmp_path):
    """A GPU machine may have none. `adamw-8B` is of the module that imports most."""
    (tmp_path / "pytest.py").write_text("raise ModuleNotFoundError('no pytest')")
    script = str(Path(__file__).with_name("first_run.py"))
    command = [sys.executable, script, "--dry", "--only", "quantizer,adamw-8B", "--out", str(tmp_path)]
    env = os.environ | {"QARL_COMMIT": "of the copy", "PYTHONPATH": str(tmp_path)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    line, adamw = (json.loads(line) for line in (tmp_path / "stages.jsonl").read_text().splitlines())
    assert adamw["figures"]["numbers"] == 2**17
    assert line["figures"]["W4A16 float32"]["GB/s"] > 0
    assert line["figures"]["checks"] == "49 of 49 hold" and line["commit"] == "of the copy"
