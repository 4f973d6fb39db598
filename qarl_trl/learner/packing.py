"""Rows of a padded batch to one row of real tokens, and back; which rows share a pass, and in which order they go."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor


Size = TypeVar("Size")


@dataclass(frozen=True)
class PackedRow:
    """The `T` real tokens of some rows of a padded batch, one sequence after the other; `N` are scored. All int64."""

    input_ids: Tensor  # `(1, T)`
    position_ids: Tensor  # `(1, T)`, from 0 in each sequence
    labels: Tensor  # `(1, T)`, -100 where no log-prob is wanted
    lengths: tuple[int, ...]  # tokens of each sequence
    scored: Tensor  # where in the row the labels are, `(N,)`
    row: Tensor  # their row in the padded batch, `(N,)`
    column: Tensor  # their column among the last ones of the padded batch, `(N,)`


def pack(input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, rows: Sequence[int]) -> PackedRow:
    """
    The real tokens of some `rows` of a padded batch `(B, L)` in one row; log-probs are wanted of its last columns.

    `ValueError` for a row with padding (0 in `attention_mask`) between its tokens, whose positions would change.
    """
    chosen = torch.tensor(rows, device=input_ids.device)
    real = attention_mask[chosen].bool()
    row, column = real.nonzero(as_tuple=True)
    position = (real.cumsum(1) - 1)[row, column]
    holes = column - position != real.int().argmax(1)[row]
    row = chosen[row]
    if holes.any():
        raise ValueError(f"Row {int(row[holes][0])} has padding between its tokens; it must be outside of them.")
    ids, first = input_ids[row, column], input_ids.shape[1] - logits_to_keep
    # Nothing of its own sequence says what a first token should be.
    wanted = (column >= first) & (position > 0)
    labels, scored = ids.masked_fill(~wanted, -100), wanted.nonzero().squeeze(1)
    lengths = tuple(n for n in real.sum(1).tolist() if n)
    return PackedRow(ids[None], position[None], labels[None], lengths, scored, row[scored], column[scored] - first)


def unpack(values: Sequence[Tensor], packed: Sequence[PackedRow], rows: int, logits_to_keep: int) -> Tensor:
    """
    Per-token values of packed rows at their places in a padded batch `(rows, logits_to_keep)`, zero elsewhere.

    Of each packed row there are values `(1, T - 1)`: of every token after the first, as a causal model gives log-probs.
    """
    out = values[0].new_zeros(rows, logits_to_keep)
    places = torch.cat([p.row for p in packed]), torch.cat([p.column for p in packed])
    return out.index_put(places, torch.cat([v[0, p.scored - 1] for v, p in zip(values, packed, strict=True)]))


def split_rows(
    sizes: Sequence[Size], budget: int, passes: int = 1, tokens: Callable[[list[Size]], int] = sum
) -> list[list[int]]:
    """
    Rows of each pass, ascending: the longest first, each into the first pass that has room in a `budget` of tokens.

    `tokens` of some `sizes` is how many their rows make together; a row over the budget has a pass of its own. There are at
    least `passes`, none of them empty. `ValueError` for more passes than rows.
    """
    if passes > len(sizes):
        raise ValueError(
            f"{len(sizes)} rows cannot fill {passes} passes: another process has more rows than this one."
        )

    def of(rows: Sequence[int]) -> int:
        return tokens([sizes[row] for row in rows])

    bins: list[list[int]] = []
    for index in sorted(range(len(sizes)), key=lambda i: -of([i])):
        chosen = next((b for b in bins if of([*b, index]) <= budget), None)
        if chosen is None:
            bins.append(chosen := [])
        chosen.append(index)
    while len(bins) < passes:
        largest = max((b for b in bins if len(b) > 1), key=of)
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


def spans_of(real: Tensor) -> list[tuple[int, int]]:
    """Of each row of `(B, L)`, bool: the first column that holds something, and the one after the last."""
    end = real.shape[1] - real.flip(1).int().argmax(1)
    return list(zip(real.int().argmax(1).tolist(), (end * real.any(1)).tolist(), strict=True))


def padded_tokens(spans: Sequence[tuple[int, int]]) -> int:
    """Tokens of rows with these spans in one batch, padding included."""
    return len(spans) * (max(end for _, end in spans) - min(start for start, _ in spans))


def row_order(rows: int, *seed: int) -> Tensor:
    """A permutation, int64 `(rows,)`, by the numbers in `seed` alone."""
    return torch.tensor(random.Random(repr(seed)).sample(range(rows), rows))
