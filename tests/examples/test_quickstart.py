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
        ([11, 2, 3], [], "13+3=16"),  # nothing to carry: no slip is drawn
    ],
)
def test_working_adds_from_left_to_right_and_forgets_the_carries_it_is_told_to(numbers, forgotten, working):
    assert work(numbers, None if forgotten is None else iter(forgotten)) == working


def test_training_and_held_out_problems_never_share_their_operands():
    def operands(held_out):
        rows = islice(problems(0, held_out), 5000)
        return {tuple(sorted(map(int, row["prompt"][:-1].split("+")))) for row in rows}

    assert not operands(True) & operands(False)
    assert operands(True) & operands(True)  # control: the sets are not empty
    assert distinct_problems(50, 1) == distinct_problems(50, 1) != distinct_problems(50, 2)


def test_the_verifier_accepts_the_solution_and_rejects_a_forgotten_carry():
    rows = distinct_problems(400, seed=3)
    answers = [row["answer"] for row in rows]
    assert sum(correct([row["solution"] for row in rows], answers)) == 400
    slipped = [row for row in rows if row["demonstration"] != row["solution"]]
    assert len(slipped) > 100
    assert sum(correct([row["demonstration"] for row in slipped], [row["answer"] for row in slipped])) == 0
    assert correct(["", "=", "30", "22+8", "22+8=300", "22+8=30=", "22+8=030", "30=22"], ["30"] * 8) == [0.0] * 8


def test_the_tokenizer_survives_a_round_trip_through_a_folder(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = CHARACTERS + "17+5+8=22+8=30"
    assert loaded.encode(text) == make_tokenizer().encode(text)
    assert len(loaded.encode(text)) == len(text)
    assert loaded.decode(loaded.encode(text)) == text
    assert (loaded.pad_token_id, loaded.eos_token_id) == (0, 1)


def test_the_warm_start_learns_and_is_the_same_for_the_same_seed():
    models = make_model(0), make_model(0)
    losses, again = (warm_start(model, make_tokenizer(), 0, steps=8) for model in models)
    assert losses == again
    assert losses[-1] < losses[0]
    assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models), strict=True))
    assert not torch.equal(next(models[0].parameters()), next(make_model(0).parameters()))  # control
