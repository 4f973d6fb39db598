"""Runs that are killed or stopped from outside end as if nothing had been."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from qarl_trl.checkpoints.folder import damage, finished
from qarl_trl.checkpoints.signals import EXIT_CODE

from .isolated import isolated_group
from .kills import run
from .test_processes import _same, _trainer, _whole
from .toys import save_model


pytestmark = [pytest.mark.slow, pytest.mark.alone]


def test_a_run_killed_while_it_syncs_saves_and_trains_ends_in_the_same_bits(tmp_path):
    """With SIGTERM at last, beside an engine. The long form is benchmarks/faults.py."""
    model, folder = save_model(tmp_path / "model", layers=1), tmp_path / "killed"
    straight = run(model, tmp_path / "straight", engine=True)
    for kill in (("sync", 2, 0.01), ("save", 2, 0.05), ("train", 2, 0.02)):
        found = run(model, folder, engine=True, kill=kill)
        assert found["killed"]
        assert not any(map(damage, folder.glob("checkpoint-*")))
    asked = run(model, folder, engine=True, kill=("sample", 1, 0.0), by=signal.SIGTERM)
    assert asked["code"] == EXIT_CODE
    last = run(model, folder, engine=True)
    assert last["resumed"] and last["digests"] == straight["digests"]


def _stopped(model: str, folder: str, resume: Any) -> tuple[int, dict[str, Any]]:
    changes = {"use_vllm": False, "max_completion_length": 8, "seed": 1, "optim_muon": True, "save_total_limit": 1}
    trainer = _trainer(model, folder, True, **changes)
    if resume is None and trainer.accelerator.process_index == 1:
        sample = trainer._generate_and_score_completions

        def signalled(inputs: Any) -> Any:
            os.kill(os.getpid(), signal.SIGTERM)
            return sample(inputs)

        trainer._generate_and_score_completions = signalled
    try:
        trainer.train(resume_from_checkpoint=resume)
    except SystemExit as left:
        return left.code, {}
    return 0, {name: p.numpy() for name, p in _whole(trainer).items()}


def test_a_signal_to_one_process_stops_all_of_them_together(tmp_path):
    model = save_model(tmp_path / "model", layers=1)
    straight = isolated_group(_stopped, 2, model, str(tmp_path / "straight"), "auto")
    assert isolated_group(_stopped, 2, model, str(tmp_path / "run"), None) == [(EXIT_CODE, {})] * 2
    assert [folder.name for folder in finished(tmp_path / "run")] == ["checkpoint-1"]
    assert len(list(Path(tmp_path, "run", "checkpoint-1").glob("rollout_*.pt"))) == 2
    again = isolated_group(_stopped, 2, model, str(tmp_path / "run"), "true")
    assert [code for code, _ in again] == [0, 0]
    assert _same(again[0][1], straight[0][1])
