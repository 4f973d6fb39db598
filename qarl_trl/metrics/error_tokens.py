"""Error tokens: repetitive and garbled parts of a completion, found by its token ids alone (paper Sec. 3.2, Table 6)."""

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
    Mask of tokens that only repeat: loops, runs of one token, garble made of few tokens. bool `(B, T)`, False at padding.

    A token is a copy when the `NGRAM` tokens that end in it occurred at least `COPIES` times before in the same completion.
    It is an error token when it is a copy and lies in a window of `WINDOW` tokens of which at least `DENSITY` are copies.
    `ids` `(B, T)` are completions; `real` `(B, T)` is False for the padding after the last token.
    """
    length, real = ids.shape[1], real.bool()
    if length < WINDOW or not len(ids):
        return torch.zeros_like(real)
    copies = _copies(ids) & real
    before = pad(copies.cumsum(1), (1, 0))
    # Indexed by the first token of the window, which must end within the completion.
    dense = (before[:, WINDOW:] - before[:, :-WINDOW] >= DENSITY * WINDOW) & real[:, WINDOW - 1 :]
    before = pad(dense.cumsum(1), (1, 0))
    token = torch.arange(length, device=ids.device)
    first, last = (token - WINDOW + 1).clamp(min=0), token.clamp(max=length - WINDOW)  # windows that contain the token
    return copies & (before[:, last + 1] > before[:, first])


def written_tokens(batch: dict[str, Any], pad_token_id: int) -> Tensor:
    """Mask of the tokens in TRL's batch, `(B, T)` bool, also in completions that `mask_truncated_completions` masks."""
    written = batch["completion_mask"].bool() | (batch["completion_ids"] != pad_token_id)
    return written.flip(1).long().cummax(1).values.flip(1).bool()  # up to the last one


def _copies(ids: Tensor) -> Tensor:
    """Whether the n-gram that ends in a token has at least `COPIES` earlier copies in its row, `(B, T)` bool."""
    # Numbers n-grams by doubling: an n-gram of 2 k tokens is a pair of numbers of k tokens.
    grams, size = ids.long(), 1
    while size < NGRAM:
        grams = grams[:, :-size] * (grams.max() + 1) + grams[:, size:]
        grams = torch.unique(grams, return_inverse=True)[1]
        size *= 2
    # Stable: equal n-grams stay in order, so an n-gram's distance from the first equal one is the number of earlier ones.
    order = grams.argsort(dim=1, stable=True)
    grams = grams.gather(1, order)
    place = torch.arange(grams.shape[1], device=ids.device).expand_as(grams)
    is_first = pad(grams[:, 1:] != grams[:, :-1], (1, 0), value=True)
    earlier = place - torch.where(is_first, place, 0).cummax(1).values
    return torch.zeros_like(ids, dtype=torch.bool).scatter(1, order + NGRAM - 1, earlier >= COPIES)
