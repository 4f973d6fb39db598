"""The quickstart's problems, their verifier, and the small model."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from sums import CHARACTERS, correct, distinct_problems, make_model, make_tokenizer, problems, work
from transformers import AutoTokenizer
from warm_start import warm_start


@pytest.mark.parametrize(
    ("numbers", "forgotten", "working"),
    [
        ([17, 5, 8], None, "22+8=30"),
        ([17, 5, 8], [False, False], "22+8=30"),
        ([17, 5, 8], [True, False], "12+8=20"),
        ([17, 5, 8], [True, True], "12+8=10"),
        # Nothing to carry: no slip is drawn.
        ([11, 2, 3], [], "13+3=16"),
    ],
)
def test_working_adds_from_left_to_right_and_forgets_the_carries_it_is_told_to(numbers, forgotten, working):
    assert work(numbers, None if forgotten is None else iter(forgotten)) == working


def operands(held_out: bool) -> set[tuple[int, ...]]:
    """The numbers of the first problems of a split, in ascending order."""
    seen = set()
    for row in islice(problems(0, held_out), 5000):
        numbers = map(int, row["prompt"].removesuffix("=").split("+"))
        # 17 + 5 + 8 is the problem 17 + 8 + 5: a model that has learned one knows the other.
        seen.add(tuple(sorted(numbers)))
    return seen


def test_training_and_held_out_problems_never_share_their_operands():
    assert not operands(held_out=True) & operands(held_out=False)
    # Control: neither is empty.
    assert operands(held_out=True)
    assert operands(held_out=False)


def test_problems_are_the_same_for_a_seed():
    assert distinct_problems(50, seed=1) == distinct_problems(50, seed=1)
    assert distinct_problems(50, seed=1) != distinct_problems(50, seed=2)


def test_the_verifier_accepts_solutions_and_rejects_forgotten_carries():
    rows = distinct_problems(400, seed=3)
    slipped = 0
    for row in rows:
        assert correct([row["solution"]], [row["answer"]]) == [1.0]
        if row["demonstration"] != row["solution"]:
            slipped += 1
            assert correct([row["demonstration"]], [row["answer"]]) == [0.0]

    # Control: of 400 problems enough have a carry that is forgotten.
    assert slipped > 100
    # In the order of the completions.
    first = rows[0]["answer"]
    assert correct(["=", f"={first}"], [first, first]) == [0.0, 1.0]


@pytest.mark.parametrize("text", ["", "=", "30", "22+8", "22+8=300", "22+8=30=", "22+8=030", "30=22"])
def test_the_verifier_wants_the_answer_after_the_last_equals_sign(text):
    assert correct([text], ["30"]) == [0.0]


def test_the_tokenizer_survives_a_round_trip_through_a_folder(tmp_path):
    text = CHARACTERS + "17+5+8=22+8=30"
    tokens = make_tokenizer().encode(text)
    make_tokenizer().save_pretrained(tmp_path)

    loaded = AutoTokenizer.from_pretrained(tmp_path)

    assert loaded.encode(text) == tokens
    assert len(tokens) == len(text)
    assert loaded.decode(tokens) == text
    assert loaded.pad_token_id == 0
    assert loaded.eos_token_id == 1


def test_the_warm_start_learns_and_is_the_same_for_the_same_seed():
    first = make_model(0)
    second = make_model(0)

    losses = warm_start(first, make_tokenizer(), 0, steps=8)
    losses_again = warm_start(second, make_tokenizer(), 0, steps=8)

    assert losses[-1] < losses[0]
    # A reader of the quickstart must get the numbers of its page.
    assert losses == losses_again
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
    # Control: it moved the weights.
    untrained = next(make_model(0).parameters())
    assert not torch.equal(next(first.parameters()), untrained)
