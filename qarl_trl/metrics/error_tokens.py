"""Error tokens: repetitive and garbled parts of a completion, found by its token ids alone (paper Sec. 3.2, Table 6).

A token is a copy when the `NGRAM` tokens that end in it occurred at least `COPIES` times before in the same
completion. A window of `WINDOW` tokens is dense when at least `DENSITY` of them are copies. An error token is a copy
in a dense window.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


NGRAM = 8  # tokens that are compared, a power of 2
COPIES = 3  # earlier occurrences in the same completion
WINDOW = 64  # tokens
DENSITY = 0.9  # share of the window that has such copies


@torch.no_grad()
def find_error_tokens(ids: Tensor, real: Tensor) -> Tensor:
    """
    Mask of tokens that only repeat: loops, runs of one token, garble made of few tokens.

    Args:
        ids: Token ids of completions, int64 `(B, T)`.
        real: False for the padding after the last token, `(B, T)`.

    Returns:
        bool `(B, T)`, False at padding.
    """
    real = real.bool()
    rows, length = ids.shape
    # No window fits in, or there is no token to number.
    if length < WINDOW or rows == 0:
        return torch.zeros_like(real)

    copies = _copies(ids) & real
    dense = _dense_windows(copies, real)
    return copies & _in_any_window(dense, length)


def _copies(ids: Tensor) -> Tensor:
    """Whether the n-gram that ends in a token has at least `COPIES` earlier copies in its row, `(B, T)` bool."""
    # Equal n-grams come to stand side by side, the earliest first because the sort is stable.
    ngrams = _numbered_ngrams(ids)
    order = ngrams.argsort(dim=1, stable=True)
    ngrams = ngrams.gather(1, order)

    # So the distance of an n-gram from the first one that equals it is the number of earlier ones.
    place = torch.arange(ngrams.shape[1], device=ids.device).expand_as(ngrams)
    # The first n-gram of a row has none before it.
    is_first = pad(ngrams[:, 1:] != ngrams[:, :-1], (1, 0), value=True)
    place_of_first = torch.where(is_first, place, 0).cummax(1).values
    earlier = place - place_of_first

    # `order` has the first tokens of n-grams. The first `NGRAM - 1` tokens of a row end no n-gram, and stay False.
    last_token = order + NGRAM - 1
    return torch.zeros_like(ids, dtype=torch.bool).scatter(1, last_token, earlier >= COPIES)


def _numbered_ngrams(ids: Tensor) -> Tensor:
    """Numbers of the n-grams, equal for equal ones of the batch, at their first tokens: int64 `(B, T - NGRAM + 1)`."""
    numbers = ids.long()
    size = 1

    # By doubling: an n-gram of 2 k tokens is a pair of two of k tokens, and the pair gets a number of its own.
    while size < NGRAM:
        pairs = numbers[:, :-size] * (numbers.max() + 1) + numbers[:, size:]
        # Numbered from 0 again, or products of large numbers would overflow.
        numbers = torch.unique(pairs, return_inverse=True)[1]
        size *= 2

    return numbers


def _dense_windows(copies: Tensor, real: Tensor) -> Tensor:
    """Whether the window that starts at a token is dense and within the completion, `(B, T - WINDOW + 1)` bool."""
    before = _number_before(copies)
    inside = before[:, WINDOW:] - before[:, :-WINDOW]

    ends_in_completion = real[:, WINDOW - 1 :]
    return (inside >= DENSITY * WINDOW) & ends_in_completion


def _in_any_window(windows: Tensor, length: int) -> Tensor:
    """Whether a token lies in any of the marked windows, which stand at their first tokens; `(B, length)` bool."""
    token = torch.arange(length, device=windows.device)
    first_window = (token - WINDOW + 1).clamp(min=0)
    last_window = token.clamp(max=length - WINDOW)

    # A window covers a token if it starts at one of the `WINDOW` places up to it, as far as these exist.
    before = _number_before(windows)
    return before[:, last_window + 1] > before[:, first_window]


def _number_before(flags: Tensor) -> Tensor:
    """How many flags of a row are set before each place, and in the whole row: `(B, n)` bool to `(B, n + 1)` int64."""
    return pad(flags.cumsum(1), (1, 0))


def written_tokens(batch: dict[str, Any], pad_token_id: int) -> Tensor:
    """
    Mask of all tokens of the completions, also of those that `mask_truncated_completions` takes out of the loss.

    Args:
        batch: TRL's micro-batch: `completion_ids` and `completion_mask`, `(B, T)`.
        pad_token_id: The token that pads completions. A completion may hold it too.

    Returns:
        bool `(B, T)`.
    """
    surely_written = batch["completion_mask"].bool() | (batch["completion_ids"] != pad_token_id)

    # All tokens up to the last one of these.
    # Backwards, a running maximum turns on at the last written token, and stays on to the first.
    from_the_end = surely_written.flip(1).long().cummax(1).values
    return from_the_end.flip(1).bool()
