"""Levers: what several of them set together."""

from types import SimpleNamespace

import pytest
from configs import config

from qarl_trl.tools.plan.memory.levers import SLEEP_MODE, Lever, levers_to_combine, merge


@pytest.mark.parametrize("use_vllm", [False, True])
def test_only_an_engine_can_sleep(tmp_path, use_vllm):
    """Without one, the reader of recipes refuses the engine's settings, and with it all combinations."""
    run = SimpleNamespace(tokens=8, rows=1, teacher=None, has_adapter=False)

    levers = levers_to_combine(run, config(tmp_path, use_vllm=use_vllm))

    assert (SLEEP_MODE in levers) == use_vllm
    # Control: the others are there in any case.
    assert len(levers) > 2


def test_of_an_option_that_comes_twice_the_last_value_counts_at_the_place_of_the_first():
    first = Lever("first", {"a": "1", "b": "2"})
    nothing = Lever("nothing", {})
    again = Lever("again", {"a": "3"})

    merged = Lever("all", merge([first, nothing, again]))

    assert merged.text == "--a 3 --b 2"
    # Control: the lever itself is as it was.
    assert first.text == "--a 1 --b 2"
