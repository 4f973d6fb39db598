"""`qarl-trl push`: upload a low-bit model with its card to the Hub."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from .arguments import CommandParser


def main(argv: Sequence[str]) -> None:
    """
    Push a low-bit folder to the Hub, with its Hub id in the card there.

    Args:
        argv: Options of `qarl-trl push`.

    Raises:
        ValueError: if the folder holds no low-bit model, or not all of one, or it would replace the model that it was
            made from.
        OSError: if the Hub refuses or cannot be reached.
    """
    args = _parser().parse_args(argv)

    from transformers import CONFIG_MAPPING

    from ..export.card import model_card
    from ..export.card_edits import base_in_card
    from ..export.push import open_repo, push
    from .evaluate.checkpoint import check_complete

    # Only to refuse a folder without a low-bit model, before the Hub is asked.
    model_card(args.folder)
    # A copy that was broken off lacks files, and an engine would load the rest. The config of a model with code of its
    # own cannot be read without running that, and that of a model of a later transformers not at all.
    config = json.loads((args.folder / "config.json").read_text())
    if "auto_map" not in config and config.get("model_type") in CONFIG_MAPPING:
        check_complete(args.folder)
    name = open_repo(args.repo, private=args.private, revision=args.revision, saved_in=args.folder)
    if base_in_card(args.folder) == name and args.revision in (None, "main"):
        raise ValueError(
            f"A push to {name} would replace the model that {args.folder} was made from, as its card says: give "
            "another repository, or with --revision another branch."
        )

    commit = push(args.folder, name, "Low-bit model", revision=args.revision)
    print(f"pushed: {commit.commit_url}")


def _parser() -> argparse.ArgumentParser:
    """The options of `qarl-trl push`."""
    parser = CommandParser(
        prog="qarl-trl push",
        description="Push a low-bit folder to the Hub, with its Hub id in the card there.",
        example="qarl-trl push runs/sums-w4a16 me/sums-w4a16",
    )

    parser.add_argument("folder", type=Path, help="folder, as `save_model` and `qarl-trl export` write it")
    parser.add_argument("repo", help="user/model; created if it does not exist")
    # The token comes from HF_TOKEN or `hf auth login`: other users can read a command line.
    parser.add_argument("--private", action="store_true", default=None, help="make a new repository private")
    parser.add_argument("--revision", help="branch to push to (default: main)")
    return parser
