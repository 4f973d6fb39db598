"""Levers: what several of them set together."""

from qarl_trl.tools.plan.memory.levers import Lever, merge


def test_of_an_option_that_comes_twice_the_last_value_counts_at_the_place_of_the_first():
    first = Lever("first", {"a": "1", "b": "2"})
    nothing = Lever("nothing", {})
    again = Lever("again", {"a": "3"})

    merged = Lever("all", merge([first, nothing, again]))

    assert merged.text == "--a 3 --b 2"
    # Control: the lever itself is as it was.
    assert first.text == "--a 1 --b 2"
