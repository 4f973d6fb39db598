"""`qarl_trl.metrics.error_tokens` against one token at a time, on the gold solutions of maths sets, and on garble."""

import json
import random
import re

import pytest
import references
import torch
from configs import MATH_SETS, needs_math_sets

from qarl_trl.metrics.error_tokens import COPIES, DENSITY, NGRAM, WINDOW, find_error_tokens, written_tokens


SETTINGS = {"ngram": NGRAM, "copies": COPIES, "window": WINDOW, "density": DENSITY}

LOOP = "So we need to check the case again. "


def words(text):
    """A text as words, digits, spaces and signs."""
    return re.findall(r"[A-Za-z]+|\d|\s+|[^\w\s]", text)


def batch_of(texts, split):
    """Ids and mask of the texts, padded on the right with 0."""
    known = {}
    rows = []
    for text in texts:
        ids = []
        for piece in split(text):
            # The number of a piece is its place among the different ones so far; 0 is padding.
            ids.append(known.setdefault(piece, len(known) + 1))
        rows.append(torch.tensor(ids))

    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return padded, padded > 0


def share_of_errors(texts, split):
    ids, written = batch_of(texts, split)
    return find_error_tokens(ids, written).sum().item() / written.sum().item()


def random_row(draw):
    """A completion of few or many kinds of tokens, with loops and slips in them, of a length around the window."""
    kinds = draw.choice([1, 2, 3, 40])
    row = []
    while len(row) < 150:
        piece = []
        for _ in range(draw.randrange(1, 20)):
            piece.append(draw.randrange(1, 1 + kinds))
        loop = piece * draw.choice([1, 1, 4, 9])
        for token in loop:
            # A slip in a hundred: a loop with one in it has no copy of some n-grams.
            row.append(token if draw.random() > 0.01 else 99)
    # On both sides of an n-gram of 8 and of a window of 64.
    return row[: draw.choice([0, 1, 7, 8, 63, 64, 65, 80, 120, 150, 150, 150])]


def random_rows():
    """480 completions."""
    rows = []
    for seed in range(40):
        draw = random.Random(seed)
        for _ in range(12):
            rows.append(random_row(draw))
    return rows


def by_reference(rows, **changes):
    return [references.error_tokens(row, **SETTINGS | changes) for row in rows]


def test_error_tokens_are_those_of_one_token_at_a_time():
    rows = random_rows()
    lengths = torch.tensor(list(map(len, rows)))
    ids = torch.zeros(len(rows), lengths.max(), dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    written = torch.arange(ids.shape[1]) < lengths[:, None]

    errors = find_error_tokens(ids, written)

    expected = by_reference(rows)
    for error, row, by_hand in zip(errors, rows, expected, strict=True):
        assert error[: len(row)].tolist() == by_hand
    # Padding is one long run of the same token, and none of it was written.
    assert not errors[~written].any()
    assert 0.1 < errors.sum() / written.sum() < 0.9
    # Controls: each setting counts.
    assert by_reference(rows, ngram=9) != expected
    assert by_reference(rows, copies=4) != expected
    assert by_reference(rows, window=63) != expected
    assert by_reference(rows, density=0.88) != expected


@pytest.mark.parametrize("shape", [(0, 100), (3, 0), (2, 63), (2, 64)])
def test_batches_without_completions_or_shorter_than_the_window(shape):
    ids = torch.ones(shape, dtype=torch.long)

    assert find_error_tokens(ids, ids > 0).tolist() == by_reference(ids.tolist())


@pytest.mark.parametrize("split", [list, words])
@pytest.mark.parametrize("text", ["1+1+1+1=4", "+".join("1" * 12) + "=12", "0." + "3" * 30, "-" * 60, "3, 1, 4, " * 2])
def test_what_mathematicians_repeat_is_no_error(text, split):
    # Long enough for a window, and without a repetition of its own.
    numbers = "".join(map(str, range(40)))
    text = f"We see that {text}, and so the answer follows from what was given. {numbers}"

    assert share_of_errors([text], split) == 0


@pytest.mark.parametrize("split", [list, words])
@pytest.mark.parametrize(
    ("garble", "most"),
    [
        (LOOP * 40, 0.85),
        ("a b" * 400, 0.9),
        ("to-" * 400, 0.6),
        ("! " * 400, 0.9),
        ("0" * 600, 0.9),
    ],
)  # fmt: skip
def test_most_of_garbled_text_is_errors(garble, most, split):
    start = "Let x be the number of apples, so that 2x + 3 = 11 and x = 4. "
    ids, written = batch_of([start + garble], split)

    errors = find_error_tokens(ids, written)[0]

    # What was written before a completion went wrong stays what it was.
    before = len(split(start))
    assert not errors[:before].any()
    assert errors[before:].float().mean() > most


def test_most_of_random_syllables_is_errors_by_characters():
    """Table 6. By words they vary too much to be copies."""
    draw = random.Random(0)
    garble = "".join(draw.choice(["te-", "to-", "teto"]) for _ in range(400))

    assert share_of_errors([garble], list) > 0.6


@needs_math_sets
@pytest.mark.parametrize("split", [list, words])
@pytest.mark.parametrize(
    ("name", "field"),
    [("gsm8k_test", "answer"), ("math500", "solution"), ("minerva_math", "solution")],
)
def test_gold_solutions_have_almost_none(name, field, split):
    """
    Measured, characters and words: GSM8K 0 and 0, MATH-500 0.36 % and 0.04 %.

    Held out: Minerva 0.14 % and 0.23 % (one table).
    """
    texts = []
    for line in (MATH_SETS / f"{name}.jsonl").read_text().splitlines():
        texts.append(json.loads(line)[field])

    assert share_of_errors(texts, split) < 0.005


def test_a_completion_that_is_taken_out_of_the_loss_was_written_all_the_same():
    # The first one is masked as cut off, and holds the padding token; the last one wrote nothing but that.
    ids = torch.tensor([[5, 0, 7, 0, 0], [5, 6, 0, 0, 0], [0, 0, 0, 0, 0]])
    mask = torch.tensor([[0, 0, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])

    written = written_tokens({"completion_ids": ids, "completion_mask": mask}, pad_token_id=0)

    assert written.sum(1).tolist() == [3, 3, 1]
