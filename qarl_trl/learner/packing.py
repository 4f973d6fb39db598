"""Rows of a padded batch to one row of real tokens, and back; which rows share a pass, and in which order they go."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedRow:
    """
    The real tokens of some rows of a padded batch, one sequence after the other; `T` is their number.

    Attributes:
        input_ids (`Tensor`): int64 `(1, T)`.
        position_ids (`Tensor`): int64 `(1, T)`, from 0 in each sequence.
        labels (`Tensor`): int64 `(1, T)`, -100 where no log-prob is wanted.
        lengths (`tuple[int, ...]`): Tokens of each sequence.
        scored (`Tensor`): Where in the row the labels are, int64 `(N,)`.
        row (`Tensor`): Their row in the padded batch, int64 `(N,)`.
        column (`Tensor`): Their column among the last ones of the padded batch, int64 `(N,)`.
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
    Put the real tokens of some rows of a padded batch into one row.

    Args:
        input_ids (`Tensor`): int64 `(B, L)`.
        attention_mask (`Tensor`): `(B, L)`, 1 for real tokens, which are neighbours in each row.
        logits_to_keep (`int`): Log-probs are wanted of the last columns, this many.
        rows (`Sequence[int]`): Which rows.

    Raises:
        ValueError: for a row with padding between its tokens, whose positions would change.
    """
    chosen = torch.tensor(rows, device=input_ids.device)
    real = attention_mask[chosen].bool()
    row, column = real.nonzero(as_tuple=True)
    position = (real.cumsum(1) - 1)[row, column]
    gaps = column - position != real.int().argmax(1)[row]
    row = chosen[row]
    if gaps.any():
        raise ValueError(f"Row {int(row[gaps][0])} has padding between its tokens; it must be outside of them.")
    ids, first = input_ids[row, column], input_ids.shape[1] - logits_to_keep
    # Nothing of its own sequence says what a first token should be.
    wanted = (column >= first) & (position > 0)
    labels, scored = ids.masked_fill(~wanted, -100), wanted.nonzero().squeeze(1)
    lengths = tuple(n for n in real.sum(1).tolist() if n)
    return PackedRow(ids[None], position[None], labels[None], lengths, scored, row[scored], column[scored] - first)


def unpack(values: Sequence[Tensor], packed: Sequence[PackedRow], rows: int, logits_to_keep: int) -> Tensor:
    """
    Per-token values of packed rows at their places in the padded batch, zero elsewhere.

    Args:
        values (`Sequence[Tensor]`): Of each row `(1, T - 1)`: of every token after the first, as a causal model gives log-probs.
        packed (`Sequence[PackedRow]`): What they are of.
        rows (`int`): `B` of the padded batch.
        logits_to_keep (`int`): Its last columns.

    Returns:
        `Tensor`: `(B, logits_to_keep)`.
    """
    out = values[0].new_zeros(rows, logits_to_keep)
    places = torch.cat([p.row for p in packed]), torch.cat([p.column for p in packed])
    return out.index_put(places, torch.cat([v[0, p.scored - 1] for v, p in zip(values, packed, strict=True)]))


def split_rows(lengths: Sequence[int], budget: int, passes: int = 1) -> list[list[int]]:
    """
    Which rows go through the model together: the longest first, each into the first pass that has room.

    Args:
        lengths (`Sequence[int]`): Real tokens of each row.
        budget (`int`): Tokens that a pass may hold.
        passes (`int`, *optional*, defaults to 1): At least this many passes, none of them empty.

    Returns:
        `list[list[int]]`: Rows of each pass, ascending.

    Raises:
        ValueError: for a row longer than the budget, and for more passes than rows.
    """
    check_longest(max(lengths), budget)
    if passes > len(lengths):
        raise ValueError(
            f"{len(lengths)} rows cannot fill {passes} passes: another process has more rows than this one."
        )
    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        room = (b for b in bins if sum(lengths[i] for i in b) + lengths[index] <= budget)
        chosen = next(room, None)
        if chosen is None:
            bins.append(chosen := [])
        chosen.append(index)
    while len(bins) < passes:
        largest = max((b for b in bins if len(b) > 1), key=lambda b: sum(lengths[i] for i in b))
        bins.append([largest.pop() for _ in range(len(largest) // 2)])
    return [sorted(b) for b in bins]


def check_longest(tokens: int, budget: int) -> None:
    """Refuse (`ValueError`) a longest sequence of `tokens` that no pass can hold."""
    if tokens > budget:
        raise ValueError(
            f"A sequence of {tokens} tokens does not fit into max_tokens_per_pass={budget}. Set max_tokens_per_pass to at "
            "least the longest prompt and completion together."
        )


def outer_columns(attention_mask: Tensor, logits_to_keep: int) -> tuple[int, int]:
    """
    The first column of `(B, L)` that has a real token, and the one after the last.

    At least the last column of the prompts and the first of the completions lie within.
    """
    used = attention_mask.bool().any(0).nonzero().squeeze(1).tolist()
    start = attention_mask.shape[1] - logits_to_keep
    return min([*used[:1], start - 1]), max([*used[-1:], start]) + 1


def row_order(rows: int, *seed: int) -> Tensor:
    """A permutation, int64 `(rows,)`, by the numbers in `seed` alone."""
    return torch.tensor(random.Random(repr(seed)).sample(range(rows), rows))
