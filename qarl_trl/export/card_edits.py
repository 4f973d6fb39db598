"""Cards that are on the disk: whether a user edited one, and the repository in its commands."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData
from yaml import YAMLError


CARD = "README.md"
# A card without this line is not overwritten: a user edited it.
GENERATED = "<!-- Written by qarl_trl, which writes it again at each save. Delete this line to keep your edits. -->"
# The model's address in a card's commands, until `qarl-trl push` writes the Hub id there.
ADDRESS = "path/to/model"
# What peft adds to huggingface_hub's empty card, which it writes beside each adapter.
_TITLE_OF_PEFT = b"# Model Card for Model ID"
_DATA_OF_PEFT = {"base_model", "library_name", "pipeline_tag", "tags"}
_LINE_OF_PEFT = re.compile(r"### Framework versions|- PEFT \S+|")
# The first lines of how to use a model that is on a branch.
_ON_BRANCH = re.compile(r"^\*\*This is the branch .*\n\n", re.MULTILINE)
_USE = "## Use\n\n"
_TRAINING = "## Training\n"
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
    return None if is_written_by_us or _is_empty_card_of_peft(content) else content


def _is_empty_card_of_peft(content: bytes) -> bool:
    """Whether a card has nothing but what peft writes by itself."""
    if _TITLE_OF_PEFT not in content:
        return False
    # A user's card may be in any encoding, with anything in its first lines.
    with suppress(ValueError, YAMLError):
        card = ModelCard(content.decode())
        lines = set(ModelCard.from_template(ModelCardData()).text.splitlines())
        is_from_peft = all(line in lines or _LINE_OF_PEFT.fullmatch(line) for line in card.text.splitlines())
        return is_from_peft and card.data.to_dict().keys() <= _DATA_OF_PEFT
    return False


def is_card_of_base(content: bytes) -> bool:
    """
    Whether a card is that of a quantized model that nobody trained, as the base of an adapter is, also if a user has
    edited it.

    Args:
        content: The card.
    """
    text = content.decode(errors="surrogateescape")
    return _ADDRESS.search(text) is not None and _TRAINING not in text


def base_in_card(folder: Path) -> str | None:
    """
    Read of which model a card says that this one was made from.

    Args:
        folder: The folder of the card.

    Returns:
        Its Hub id; `None` if no card says it, or several models were merged.
    """
    # A user's card may be in any encoding, with anything in its first lines.
    with suppress(OSError, ValueError, YAMLError):
        base = ModelCard.load(folder / CARD).data.base_model
        return base if isinstance(base, str) else None
    return None


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
