"""
Pack rows of a padded batch into one row of real tokens, and unpack them; choose the micro-batches and the rows of each
pass, and their order.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


# transformers' label of a token that needs no log-prob.
NO_LABEL = -100


@dataclass(frozen=True)
class PackedRow:
    """
    The `T` real tokens of some rows of a padded batch, one sequence after the other; `N` of them get log-probs.

    Attributes:
        input_ids: `(1, T)` int64.
        position_ids: `(1, T)` int64, from 0 in each sequence.
        labels: `(1, T)` int64, `NO_LABEL` for tokens that get no log-prob.
        lengths: Number of tokens of each sequence.
        scored: Positions in the packed row of the tokens that get log-probs, `(N,)` int64.
        row: Their rows in the padded batch, `(N,)` int64.
        column: Their columns among the last `logits_to_keep` of the padded batch, `(N,)` int64.
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    lengths: tuple[int, ...]
    scored: Tensor
    row: Tensor
    column: Tensor


def pack(input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, rows: Sequence[int]) -> PackedRow:
    """
    Pack the real tokens of some rows of a padded batch into one row.

    Args:
        input_ids: Token ids `(B, L)`, padded on either side.
        attention_mask: 1 for real tokens, `(B, L)`.
        logits_to_keep: The last so many columns get log-probs.
        rows: The rows to pack, in the order of the packed row.
    """
    chosen = torch.tensor(rows, device=input_ids.device)
    real = attention_mask[chosen].bool()

    # Of each real token: its row among the chosen ones, its column, and its position in its sequence.
    # `nonzero` goes row by row, so the tokens of a sequence follow each other, and sequences stand in the order of
    # `rows`.
    chosen_row, column = real.nonzero(as_tuple=True)
    position = (real.cumsum(1) - 1)[chosen_row, column]
    row = chosen[chosen_row]
    ids = input_ids[row, column]

    first_kept = input_ids.shape[1] - logits_to_keep
    # The first token of a sequence has no prediction: its log-prob would come from the neighbour before it.
    wanted = (column >= first_kept) & (position > 0)
    scored = wanted.nonzero().squeeze(1)

    # A row of padding alone has no token here, and attention must not see an empty sequence.
    lengths = tuple(length for length in real.sum(1).tolist() if length > 0)
    return PackedRow(
        input_ids=ids[None],
        position_ids=position[None],
        labels=ids.masked_fill(~wanted, NO_LABEL)[None],
        lengths=lengths,
        scored=scored,
        row=row[scored],
        column=column[scored] - first_kept,
    )


def unpack(values: Sequence[Tensor], packed: Sequence[PackedRow], rows: int, logits_to_keep: int) -> Tensor:
    """
    Put the values of packed rows at their places in a padded batch.

    Args:
        values: For each packed row `(1, T - 1)`: the values of its tokens after the first.
        packed: The packed rows.
        rows: Number of rows of the padded batch, `B`.
        logits_to_keep: Number of its columns.

    Returns:
        `(B, logits_to_keep)`, 0 where there is no value.
    """
    # The head returns nothing for the first token of a packed row, so token t is at t - 1.
    scored_values = [value[0, row.scored - 1] for value, row in zip(values, packed, strict=True)]
    row = torch.cat([packed_row.row for packed_row in packed])
    column = torch.cat([packed_row.column for packed_row in packed])

    # Not in place: gradients must flow back into each pass.
    padded = values[0].new_zeros(rows, logits_to_keep)
    return padded.index_put((row, column), torch.cat(scored_values))


def split_rows(lengths: Sequence[int], budget: int, passes: int = 1) -> list[list[int]]:
    """
    Choose the rows of each pass: the longest row first, each into the first pass that has room for it.

    Args:
        lengths: Number of tokens of each row.
        budget: Maximum number of tokens in a pass.
        passes: Make at least so many passes. At most the number of rows.

    Returns:
        The rows of each pass, ascending; no pass is empty.
    """
    # Ties stay in the order of rows (the sort is stable), so a pass for `old` and one for the loss have them alike.
    longest_first = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    chosen: list[list[int]] = []
    tokens: list[int] = []

    for row in longest_first:
        for index, used in enumerate(tokens):
            if used + lengths[row] <= budget:
                chosen[index].append(row)
                tokens[index] += lengths[row]
                break
        else:
            # No `break`: no pass has room.
            chosen.append([row])
            tokens.append(lengths[row])

    while len(chosen) < passes:
        _halve_the_largest(chosen, lengths)
    return [sorted(rows) for rows in chosen]


def _halve_the_largest(chosen: list[list[int]], lengths: Sequence[int]) -> None:
    """Move half of the rows of the pass with most tokens, among those with several rows, into a new pass."""

    def tokens(rows: Sequence[int]) -> int:
        return sum(lengths[row] for row in rows)

    divisible = [rows for rows in chosen if len(rows) > 1]
    largest = max(divisible, key=tokens)

    half = len(largest) // 2
    # The shorter rows: they were appended last.
    moved = largest[-half:]
    del largest[-half:]
    chosen.append(moved)


def merge_micro_batches(tokens: Sequence[Sequence[int]], updates: Sequence[int], budget: int) -> list[int]:
    """
    Choose the micro-batches that share a pass: consecutive ones of one update, as many as fit.

    Args:
        tokens: For each micro-batch its number of tokens in each process.
        updates: For each micro-batch the number of its update.
        budget: Maximum number of tokens in a pass of any process.

    Returns:
        The number of micro-batches in each group, in their order. A micro-batch above the budget is alone.
    """
    sizes: list[int] = []
    used: list[int] = []
    update_of_group = None

    for counts, update in zip(tokens, updates, strict=True):
        # Per process: a group must fit into the pass of each of them. `used` is empty before the first group.
        together = [before + count for before, count in zip(used, counts, strict=False)]
        if sizes and update == update_of_group and max(together) <= budget:
            sizes[-1] += 1
            used = together
        else:
            sizes.append(1)
            used = list(counts)
            update_of_group = update
    return sizes


def row_order(rows: int, *seed: int) -> Tensor:
    """A permutation, int64 `(rows,)`, that depends only on `seed`."""
    # Neither torch's nor Python's global numbers: drawing from those would change what TRL samples afterwards.
    generator = random.Random(repr(seed))
    return torch.tensor(generator.sample(range(rows), rows))
