"""Whether a folder has the vocabulary of its tokenizer, without which transformers makes an empty one."""

from __future__ import annotations

from pathlib import Path
from typing import Any


# Files with a vocabulary by names that a tokenizer's class need not list.
_USUAL = ("tokenizer.*", "vocab*", "merges.txt", "tekken.json", "*.model", "*.tiktoken")


def check_vocabulary_files(folder: str | Path, tokenizer: Any) -> None:
    """
    Refuse a tokenizer that transformers made without a vocabulary.

    Args:
        folder: From where it was loaded. A Hub id is not looked at.
        tokenizer: The tokenizer.

    Raises:
        ValueError: if its class has files with a vocabulary, and the folder none of them.
    """
    folder = Path(folder)
    # A tokenizer of bytes or characters has none.
    names = sorted(set(getattr(tokenizer, "vocab_files_names", {}).values()))
    if not names or not folder.is_dir():
        return
    if not any(any(folder.glob(pattern)) for pattern in (*names, *_USUAL)):
        raise ValueError(
            f"{folder} must have the vocabulary of its tokenizer, got none of {', '.join(names)}: transformers would "
            "make an empty one. Copy the tokenizer's files from the model that was trained."
        )
