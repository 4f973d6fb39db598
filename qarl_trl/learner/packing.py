"""Pack rows of a padded batch into one row of real tokens, and unpack them; choose the rows of each pass, and their order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedRow:
    """The `T` real tokens of some rows of a padded batch, one sequence after the other; `N` get log-probs. All int64."""

    input_ids: Tensor  # `(1, T)`
    position_ids: Tensor  # `(1, T)`, from 0 in each sequence
    labels: Tensor  # `(1, T)`, -100 for tokens without a log-prob
    lengths: tuple[int, ...]  # tokens of each sequence
    scored: Tensor  # positions of the labels in the row, `(N,)`
    row: Tensor  # their row in the padded batch, `(N,)`
    column: Tensor  # their column among the last ones of the padded batch, `(N,)`


def pack(input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, rows: Sequence[int]) -> PackedRow:
    """Pack the real tokens of some `rows` of a padded batch `(B, L)` into one row; its last columns get log-probs."""
    chosen = torch.tensor(rows, device=input_ids.device)
    real = attention_mask[chosen].bool()
    row, column = real.nonzero(as_tuple=True)
    position = (real.cumsum(1) - 1)[row, column]
    row = chosen[row]
    ids, first = input_ids[row, column], input_ids.shape[1] - logits_to_keep
    # The first token of a sequence has no prediction.
    wanted = (column >= first) & (position > 0)
    labels, scored = ids.masked_fill(~wanted, -100), wanted.nonzero().squeeze(1)
    lengths = tuple(n for n in real.sum(1).tolist() if n)
    return PackedRow(ids[None], position[None], labels[None], lengths, scored, row[scored], column[scored] - first)


def unpack(values: Sequence[Tensor], packed: Sequence[PackedRow], rows: int, logits_to_keep: int) -> Tensor:
    """Put the values `(1, T - 1)` of each packed row (of tokens after the first) at their places in a padded batch `(rows, logits_to_keep)`, else 0."""
    out = values[0].new_zeros(rows, logits_to_keep)
    places = torch.cat([p.row for p in packed]), torch.cat([p.column for p in packed])
    return out.index_put(places, torch.cat([v[0, p.scored - 1] for v, p in zip(values, packed, strict=True)]))


def split_rows(lengths: Sequence[int], budget: int, passes: int = 1) -> list[list[int]]:
    """Rows of each pass, ascending. Puts the longest row first, each into the first pass with room in a `budget` of tokens; at least `passes`, none empty."""

    def tokens(rows: Sequence[int]) -> int:
        return sum(lengths[row] for row in rows)

    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        chosen = next((b for b in bins if tokens([*b, index]) <= budget), None)
        if chosen is None:
            bins.append(chosen := [])
        chosen.append(index)
    while len(bins) < passes:
        largest = max((b for b in bins if len(b) > 1), key=tokens)
        bins.append([largest.pop() for _ in range(len(largest) // 2)])
    return [sorted(b) for b in bins]


def row_order(rows: int, *seed: int) -> Tensor:
    """A permutation, int64 `(rows,)`, that depends only on `seed`."""
    return torch.tensor(random.Random(repr(seed)).sample(range(rows), rows))
