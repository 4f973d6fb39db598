"""The prompt of the sync check: the same random tokens in every run of a model."""

from __future__ import annotations

from typing import Any

import torch


# Number of tokens of the prompt.
LENGTH = 128
# Of the prompt, and of the rounding noise.
SEED = 20260408


def sync_check_tokens(tokenizer: Any, vocab_size: int, length: int = LENGTH) -> list[int]:
    """
    A fixed prompt: random tokens of a fixed seed.

    Args:
        tokenizer: The model's tokenizer. Its special and added tokens are left out, because an engine may treat them
            differently.
        vocab_size: The number of tokens that the model knows.
        length: The number of tokens of the prompt.

    Returns:
        Token ids.
    """
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    known = min(vocab_size, len(tokenizer))
    ordinary = [token for token in range(known) if token not in special]

    generator = torch.Generator().manual_seed(SEED)
    chosen = torch.randint(len(ordinary), (length,), generator=generator)
    return [ordinary[index] for index in chosen.tolist()]
