"""The quickstart's problems, their verifier, and the small model."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from transformers import AutoTokenizer

from qarl_trl.quickstart.model import make_model, make_tokenizer
from qarl_trl.quickstart.task import CHARACTERS, correct, distinct_problems, problems, results
from qarl_trl.quickstart.warmstart import exact_share, warm_start


def test_results_are_last_digits_from_left_to_right():
    assert results([3, 8, 5, 9, 4, 7], "*+*+*") == [4, 9, 1, 5, 5]


def test_training_and_held_out_problems_never_share_their_operands():
    def operands(held_out):
        rows = islice(problems(0, held_out), 5000)
        return {tuple(sorted(c for c in row["prompt"] if c.isdigit())) for row in rows}

    assert not operands(True) & operands(False)
    assert operands(True) & operands(True)  # control: the sets are not empty


def test_the_verifier_accepts_both_forms_and_rejects_corrupted_ones():
    rows = distinct_problems(200, seed=3)
    answers = [row["answer"] for row in rows]
    assert sum(correct([row["working"] for row in rows], answers)) == 200
    assert sum(correct([row["direct"] for row in rows], answers)) == 200
    wrong = [row["direct"][:-1] + str((int(row["answer"]) + 1) % 10) for row in rows]
    assert sum(correct(wrong, answers)) == 0


@pytest.mark.parametrize("text", ["", "=", "5", "4,9,1,5", "=55", "=5,", "5=", "=5=4"])
def test_a_completion_that_does_not_end_in_the_answer_scores_zero(text):
    assert correct([text], ["5"]) == [0.0]


def test_the_same_seed_gives_the_same_problems():
    assert distinct_problems(50, 1) == distinct_problems(50, 1)
    assert distinct_problems(50, 1) != distinct_problems(50, 2)


def test_the_tokenizer_survives_a_round_trip_through_a_folder(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "3*8+5*9+4*7:4,9,1,5=5"
    assert loaded.encode(text) == tokenizer.encode(text)
    assert len(tokenizer.encode(text)) == len(text)
    assert loaded.decode(loaded.encode(text)) == text
    assert (loaded.pad_token_id, loaded.eos_token_id) == (0, 1)
    assert len({*tokenizer.encode(CHARACTERS)}) == len(CHARACTERS)


def test_every_layer_fits_the_group_size_of_w4a16():
    linear = [m for n, m in make_model(0).named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
    assert len(linear) == 21
    assert all(module.in_features % 128 == 0 for module in linear)


def test_the_warm_start_learns_and_is_the_same_for_the_same_seed():
    def trained():
        model, losses = make_model(0), []
        warm_start(
            model, make_tokenizer(), 0, worked_steps=6, mixed_steps=2, progress=lambda _, loss: losses.append(loss)
        )
        return model, losses

    (first, losses), (second, again) = trained(), trained()
    assert losses == again
    assert losses[5] < losses[0]
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(next(first.parameters()), next(make_model(0).parameters()))  # control


def test_exact_share_counts_whole_completions():
    model = make_model(0)
    ids = torch.tensor([[3, 4, 5, 6], [3, 4, 5, 6]])
    with torch.no_grad():
        best = model(input_ids=ids).logits.argmax(-1)
    ids = torch.cat([ids[:, :3], best[:, 2:3]], dim=1)
    ids[1, 3] = (ids[1, 3] + 1) % 8  # the second completion is wrong in its only token
    mask = torch.tensor([[False, False, False, True]] * 2)
    assert exact_share(model, ids, mask) == 0.5
