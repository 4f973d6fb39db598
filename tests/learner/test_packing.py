"""`qarl_trl.learner.packing`: rows of a padded batch to packed rows and back."""

import itertools

import pytest
import torch

from qarl_trl.learner.packing import merge_micro_batches, pack, row_order, split_rows, unpack


# Prompts of 2, 4, 1, 3 and 4 tokens before completions of 3, 0, 5, 1 and 5: (first column, one after the last) of 9.
SPANS = [(2, 7), (0, 4), (3, 9), (1, 5), (0, 9)]
COLUMNS = 9
KEEP = 5

# transformers' label of a token without a log-prob.
NO_LABEL = -100


def padded_batch(spans=SPANS):
    """Ids, all different, and mask of rows whose tokens stand in these spans."""
    mask = torch.zeros(len(spans), COLUMNS, dtype=torch.long)
    for row, (start, end) in enumerate(spans):
        mask[row, start:end] = 1

    ids = torch.arange(1, mask.numel() + 1).view(mask.shape) * mask
    return ids, mask


def test_a_packed_row_is_the_real_tokens_with_positions_from_zero():
    ids, mask = padded_batch()

    packed = pack(ids, mask, KEEP, [0, 1, 3])

    # Of rows 0, 1 and 3, which have 5, 4 and 4 tokens.
    first = ids[0, 2:7].tolist()
    second = ids[1, 0:4].tolist()
    third = ids[3, 1:5].tolist()
    assert packed.input_ids.tolist() == [first + second + third]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2, 3]]
    assert packed.lengths == (5, 4, 4)
    # Without labels: the prompt of the first, all of the second, the prompt of the third.
    assert packed.labels.tolist() == [[NO_LABEL] * 2 + first[2:] + [NO_LABEL] * 7 + third[3:]]


def test_what_is_packed_comes_back_to_its_place_from_several_rows():
    ids, mask = padded_batch()
    packed = []
    values = []
    shifted = []
    for rows in ([4, 1], [2], [0, 3]):
        row = pack(ids, mask, KEEP, rows)
        packed.append(row)
        # Of each token after the first: the token itself.
        values.append(row.input_ids[:, 1:].float())
        shifted.append(values[-1].roll(1))

    unpacked = unpack(values, packed, len(ids), KEEP)
    assert torch.equal(unpacked, ids[:, -KEEP:].float())
    # Control: values of the wrong tokens come back elsewhere.
    assert not torch.equal(unpack(shifted, packed, len(ids), KEEP), unpacked)


def test_the_first_token_of_a_sequence_is_never_scored():
    """Its log-prob would be read from the last token of the neighbour."""
    ids, mask = padded_batch([(0, 9), (4, 9)])

    packed = pack(ids, mask, KEEP, [0, 1])
    assert packed.labels[0, 9] == NO_LABEL
    assert packed.labels[0, 10] == ids[1, 5]

    unpacked = unpack([packed.input_ids[:, 1:]], [packed], 2, KEEP)
    assert unpacked[1].tolist() == [0, *ids[1, 5:].tolist()]


@pytest.mark.parametrize("passes", [1, 4, 5])
def test_rows_are_split_into_passes_under_the_budget(passes):
    lengths = [5, 4, 6, 4, 9]

    rows_of_passes = split_rows(lengths, 10, passes)

    assert sorted(itertools.chain(*rows_of_passes)) == [0, 1, 2, 3, 4]
    for rows in rows_of_passes:
        # A pass without a row could not be run, and one beyond the budget could run out of memory.
        assert rows
        assert sum(map(lengths.__getitem__, rows)) <= 10
    # 28 tokens need three passes.
    assert len(rows_of_passes) == max(passes, 3)


def test_rows_that_fit_go_together_the_longest_first():
    assert split_rows([3, 4, 3], 10) == [[0, 1, 2]]
    assert split_rows([3, 4, 3], 4) == [[1], [0], [2]]


@pytest.mark.parametrize(
    ("tokens", "updates", "sizes"),
    [
        ([[4], [3], [3], [5]], [0, 0, 0, 0], [3, 1]),
        # The budget is full to the last token, and one token more than that.
        ([[5], [5], [5], [6]], [0, 0, 0, 0], [2, 1, 1]),
        # No pass holds micro-batches of two updates.
        ([[1], [1], [1], [1]], [0, 0, 1, 1], [2, 2]),
        # Only consecutive ones: the third would fit beside the first.
        ([[2], [9], [2]], [0, 0, 0], [1, 1, 1]),
        # Above the budget: alone, and cut into passes later.
        ([[11], [1], [1]], [0, 0, 0], [1, 2]),
        # A second process, for which the second one is too long.
        ([[1, 5], [1, 6], [1, 1]], [0, 0, 0], [1, 2]),
        ([], [], []),
    ],
)
def test_micro_batches_of_an_update_share_a_pass_while_they_fit_in_every_process(tokens, updates, sizes):
    assert merge_micro_batches(tokens, updates, 10) == sizes


def test_the_order_of_rows_follows_from_its_numbers():
    order = row_order(64, 42, 3, 0)

    assert order.sort().values.tolist() == list(range(64))
    assert torch.equal(row_order(64, 42, 3, 0), order)
    for other in ((42, 4, 0), (43, 3, 0), (42, 3, 1)):
        assert not torch.equal(row_order(64, *other), order)
