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
from .processes import same, trainer_of_two, whole_arrays
from .toys import save_model


pytestmark = [pytest.mark.slow, pytest.mark.alone]


def test_a_run_killed_while_it_syncs_saves_and_trains_ends_in_the_same_bits(tmp_path):
    """With SIGTERM at last, beside an engine. The long form is benchmarks/faults.py."""
    model = save_model(tmp_path / "model", layers=1)
    folder = tmp_path / "killed"
    straight = run(model, tmp_path / "straight", engine=True)

    # Each start continues from the last checkpoint of the one before.
    for kill in (("sync", 2, 0.01), ("save", 2, 0.05), ("train", 2, 0.02)):
        outcome = run(model, folder, engine=True, kill=kill)
        assert outcome["killed"]
        # A checkpoint gets its name when it is whole, and until then is none.
        assert not any(map(damage, folder.glob("checkpoint-*")))

    stopped = run(model, folder, engine=True, kill=("sample", 1, 0.0), by=signal.SIGTERM)
    assert stopped["code"] == EXIT_CODE

    last = run(model, folder, engine=True)
    # Control: it did not start from the beginning.
    assert last["resumed"]
    assert last["digests"] == straight["digests"]


def _train_until_signal(model: str, folder: str, resume: str | None) -> tuple[int, dict[str, Any]]:
    """The exit code of one of two processes and its master weights; without `resume` the second gets a SIGTERM."""
    changes = {"use_vllm": False, "max_completion_length": 8, "seed": 1, "optim_muon": True, "save_total_limit": 1}
    trainer = trainer_of_two(model, folder, True, **changes)
    if resume is None and trainer.accelerator.process_index == 1:
        _signal_in_rollout(trainer)

    try:
        trainer.train(resume_from_checkpoint=resume)
    except SystemExit as stop:
        return stop.code, {}
    return 0, whole_arrays(trainer)


def _signal_in_rollout(trainer: Any) -> None:
    """Let this process get a SIGTERM before each rollout."""
    sample = trainer._generate_and_score_completions

    def signalled(inputs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return sample(inputs)

    trainer._generate_and_score_completions = signalled


def test_a_signal_to_one_process_stops_all_of_them_together(tmp_path):
    model = save_model(tmp_path / "model", layers=1)
    folder = tmp_path / "run"
    # "auto" in an empty folder is a start.
    straight = isolated_group(_train_until_signal, 2, model, str(tmp_path / "straight"), "auto")

    stopped = isolated_group(_train_until_signal, 2, model, str(folder), None)
    assert stopped == [(EXIT_CODE, {})] * 2
    # Signalled in its first rollout, the run saves at the end of that step.
    assert [checkpoint.name for checkpoint in finished(folder)] == ["checkpoint-1"]
    rollouts = Path(folder, "checkpoint-1").glob("rollout_*.pt")
    assert len(list(rollouts)) == 2

    again = isolated_group(_train_until_signal, 2, model, str(folder), "true")
    assert [code for code, _ in again] == [0, 0]
    _, weights = again[0]
    _, straight_weights = straight[0]
    assert same(weights, straight_weights)
