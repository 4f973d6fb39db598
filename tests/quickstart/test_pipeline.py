"""The quickstart's steps in other processes: one that dies is an error that names the step, within seconds."""

from __future__ import annotations

import argparse
import os
import signal
import time
from types import SimpleNamespace

import pytest

from qarl_trl.processes import ProcessDied
from qarl_trl.quickstart import pipeline


def local_functions():
    """Pickled by value, so that the process need not import this module, and transformers with it."""

    def die(*args):
        os.kill(os.getpid(), signal.SIGILL)
        time.sleep(60)

    def hang(*args):
        time.sleep(60)

    def floor(*args):
        return 0.004

    return die, hang, floor


die, hang, floor = local_functions()


@pytest.fixture
def options(tmp_path, monkeypatch):
    trainer = SimpleNamespace(train=lambda: None, save_model=lambda: None)
    monkeypatch.setattr(pipeline, "warm_start", lambda *args, **kwargs: None)
    monkeypatch.setattr(pipeline, "_make_trainer", lambda *args: trainer)
    monkeypatch.setattr(pipeline, "answers_in_training", lambda trainer, problems: ["30"] * len(problems))
    return argparse.Namespace(seed=0, scheme="W4A16", output_dir=str(tmp_path), short=True, rollouts=1)


@pytest.mark.parametrize(("first", "second", "step"), [(die, die, "2/4"), (floor, die, "4/4")])
def test_a_step_whose_process_dies_ends_the_quickstart(options, monkeypatch, first, second, step):
    monkeypatch.setattr(pipeline, "_measure_floor", first)
    monkeypatch.setattr(pipeline, "answers_of_checkpoint", second)
    start = time.monotonic()
    with pytest.raises(ProcessDied, match=rf"^{step} .*: its process died of SIGILL"):
        pipeline.run(options)
    assert time.monotonic() - start < 20


def test_a_step_that_hangs_reaches_its_limit(options, monkeypatch):
    monkeypatch.setattr(pipeline, "LIMIT_S", 1)
    monkeypatch.setattr(pipeline, "_measure_floor", hang)
    with pytest.raises(TimeoutError, match="^2/4 .*no result within 1 s"):
        pipeline.run(options)
