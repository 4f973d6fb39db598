"""Cards that are on the disk: whether a user edited one, and the repository in its commands."""

from __future__ import annotations

import re
from pathlib import Path


CARD = "README.md"
# A card without this line is not overwritten: a user edited it.
GENERATED = "<!-- Written by qarl_trl, which writes it again at each save. Delete this line to keep your edits. -->"
# The model's address in a card's commands, until `qarl-trl push` writes the Hub id there.
ADDRESS = "path/to/model"
# The title of the empty card that peft writes beside each adapter.
_OF_PEFT = b"# Model Card for Model ID"
# The first lines of how to use a model that is on a branch.
_ON_BRANCH = re.compile(r"^\*\*This is the branch .*\n\n", re.MULTILINE)
_USE = "## Use\n\n"
# Where a card keeps the address that its commands have, so that a push can find it.
_ADDRESS = re.compile(r"<!-- Address in the commands above: (\S+) -->")


def edited_card(folder: Path) -> bytes | None:
    """
    Read the card of a folder, if a user wrote or edited it.

    Args:
        folder: Any folder.

    Returns:
        Bytes, because a user's card may be in any encoding. `None`: there is no card, or one that may be overwritten.
    """
    card = folder / CARD
    if not card.exists():
        return None

    content = card.read_bytes()
    is_written_by_us = GENERATED.encode() in content
    return None if is_written_by_us or _OF_PEFT in content else content


def addressed(card: bytes, repo: str, branch: str | None = None) -> bytes:
    """
    Put the name of a repository into a card.

    Args:
        card: The content of a card. Of one that a user edited only the address changes, where our commands have it.
        repo: The repository's full name.
        branch: The branch that gets the card. The commands load the main one.

    Returns:
        The card for that repository.
    """
    # What is not UTF-8 stays as it is.
    text = card.decode(errors="surrogateescape")
    address = _ADDRESS.search(text)
    # Another name that begins or ends with the address is not the address.
    before = re.escape(address[1] if address else ADDRESS)
    text = re.sub(rf"(?<![\w./-]){before}(?![\w./-])", repo, text)

    if GENERATED in text:
        title = repo.split("/")[-1]
        text = re.sub(r"^# .*$", f"# {title}", text, count=1, flags=re.MULTILINE)
        # A card that was downloaded may name the branch that it came from.
        text = _ON_BRANCH.sub("", text)
        if branch not in (None, "main"):
            text = text.replace(_USE, _USE + _words_of_branch(repo, branch, with_base=f"{repo}-base" in text), 1)
    return text.encode(errors="surrogateescape")


def _words_of_branch(repo: str, branch: str, with_base: bool) -> str:
    """What to do with commands that load the main branch. vLLM takes no branch of an adapter, so it is downloaded."""
    words = (
        f"**This is the branch `{branch}`**, and the commands load the main one. Download this one with "
        f"`hf download {repo} --revision {branch} --local-dir FOLDER`, and write that folder in place of `{repo}`."
    )
    if with_base:
        words += f" Do the same with its base, `{repo}-base`, which has a branch of this name."
    return words + "\n\n"
