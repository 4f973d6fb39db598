"""`qarl_trl.learner.packing`: rows of a padded batch to packed rows and back."""

import pytest
import torch

from qarl_trl.learner.packing import pack, row_order, split_rows, unpack


# Prompts of 2, 4, 1, 3 and 4 tokens before completions of 3, 0, 5, 1 and 5: (first column, one after the last) of 9.
SPANS = [(2, 7), (0, 4), (3, 9), (1, 5), (0, 9)]
KEEP = 5


def padded(spans=SPANS, columns=9):
    mask = torch.zeros(len(spans), columns, dtype=torch.long)
    for row, (start, end) in enumerate(spans):
        mask[row, start:end] = 1
    ids = torch.arange(1, mask.numel() + 1).view(mask.shape) * mask
    return ids, mask


def test_a_packed_row_is_the_real_tokens_with_positions_from_zero():
    ids, mask = padded()
    packed = pack(ids, mask, KEEP, [0, 1, 3])
    sequences = [ids[row, slice(*SPANS[row])].tolist() for row in (0, 1, 3)]
    assert packed.input_ids.tolist() == [[token for sequence in sequences for token in sequence]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2, 3]]
    assert packed.lengths == (5, 4, 4)
    expected = [-100] * 2 + sequences[0][2:] + [-100] * 7 + sequences[2][3:]
    assert packed.labels.tolist() == [expected]


def test_what_is_packed_comes_back_to_its_place_from_several_rows():
    ids, mask = padded()
    packed = [pack(ids, mask, KEEP, rows) for rows in ([4, 1], [2], [0, 3])]
    values = [p.input_ids[:, 1:].float() for p in packed]  # of each token after the first: the token itself
    found = unpack(values, packed, len(ids), KEEP)
    assert torch.equal(found, ids[:, -KEEP:].float())
    assert not torch.equal(unpack([v.roll(1) for v in values], packed, len(ids), KEEP), found)  # control


def test_the_first_token_of_a_sequence_is_never_scored():
    """Its log-prob would be read from the last token of the neighbour."""
    ids, mask = padded([(0, 9), (4, 9)])
    packed = pack(ids, mask, KEEP, [0, 1])
    assert packed.labels[0, 9] == -100 and packed.labels[0, 10] == ids[1, 5]
    assert unpack([packed.input_ids[:, 1:]], [packed], 2, KEEP)[1].tolist() == [0, *ids[1, 5:].tolist()]


@pytest.mark.parametrize("passes", [1, 4, 5])
def test_rows_are_split_into_passes_under_the_budget(passes):
    lengths = [5, 4, 6, 4, 9]
    found = split_rows(lengths, 10, passes)
    assert sorted(row for rows in found for row in rows) == [0, 1, 2, 3, 4]
    assert all(found) and all(sum(lengths[i] for i in rows) <= 10 for rows in found)
    assert len(found) == max(passes, 3)  # 28 tokens need three passes


def test_rows_that_fit_go_together_the_longest_first():
    assert split_rows([3, 4, 3], 10) == [[0, 1, 2]]
    assert split_rows([3, 4, 3], 4) == [[1], [0], [2]]


def test_the_order_of_rows_follows_from_its_numbers():
    order = row_order(64, 42, 3, 0)
    assert order.sort().values.tolist() == list(range(64))
    assert torch.equal(row_order(64, 42, 3, 0), order)
    assert all(not torch.equal(row_order(64, *other), order) for other in ((42, 4, 0), (43, 3, 0), (42, 3, 1)))
