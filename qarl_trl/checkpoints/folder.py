"""Folders of checkpoints: complete one by a manifest and a rename, find out what is missing, delete old ones."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..export.card_edits import CARD
from ..export.files import LOW_BIT_FOLDER, apply_umask, flush


MANIFEST = "manifest.json"
# Its entry that says whether a checkpoint is of the last update of an epoch or of the run, saved before the end of its
# epoch.
MISSES_EPOCH_END = "misses_epoch_end"
# Folder in which a checkpoint is written. Uploads of the output folder skip names that begin with an underscore.
INCOMING = "_incoming"
# Folder of a checkpoint that another of the same step is just replacing. A failed save does not delete it.
REPLACED = "_replaced"
# What a user may edit or move away, for example to serve the low-bit model: no resume reads it.
_NOT_FOR_A_RESUME = re.compile(
    rf"{LOW_BIT_FOLDER}/.*|(tokenizer|chat_template|special_tokens|added_tokens|vocab|merges|generation_config)[^/]*"
)


def commit(folder: Path, target: Path, **facts: Any) -> None:
    """
    Turn a written folder into a complete checkpoint, by one rename on the same file system.

    Args:
        folder: The folder that was written. Its parent is deleted later.
        target: Where the checkpoint belongs. This replaces a checkpoint that is already there. Files that are of none
            stay in it.
        facts: Further entries of the manifest, which also has the size of each file and a number that grows from
            checkpoint to checkpoint.

    Raises:
        OSError: if the disk fails. A checkpoint that was there before is in its place again; if even that fails, the
            message says where it is.
    """
    apply_umask(folder)
    # Content must be on the disk before the manifest, whose presence says that the checkpoint is complete.
    flush(folder)
    manifest = {"number": _next_number(target.parent), **facts, "files": _file_sizes(folder)}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    # Not moved: after a kill the folder that is in its place has them, whichever of both that is.
    copy_files_of_user(target, folder)
    # A folder may wait here since an earlier save, whose renames failed.
    aside = target.parent / REPLACED / target.name
    copy_files_of_user(aside, folder)
    flush(folder)

    # No file system replaces a folder that is not empty by a rename.
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
        aside.parent.mkdir(exist_ok=True)
        target.rename(aside)

    try:
        folder.rename(target)
    except OSError:
        if aside.exists():
            _restore(aside, target)
        raise
    # A rename is on the disk when the folder that holds the name is.
    flush(target.parent, tree=False)
    delete_replaced(aside, folder)


def copy_files_of_user(source: Path, checkpoint: Path) -> None:
    """
    Copy what somebody, such as a callback, had put into the folder that a checkpoint replaces.

    Args:
        source: The folder, if there is one: an older checkpoint of the same step, or a user's alone.
        checkpoint: The new one, whose files win. Its manifest does not list the copies: a user may change them.
    """
    of_checkpoint: set[str] = set()
    if not is_of_user(source):
        # Of a damaged checkpoint nothing tells what is a user's.
        try:
            of_checkpoint = {MANIFEST, *read_manifest(source)["files"]}
        except (OSError, ValueError, KeyError, TypeError):
            return

    for path in source.rglob("*"):
        name = path.relative_to(source)
        # No manifest lists cards.
        is_of_checkpoint = str(name) in of_checkpoint or (of_checkpoint and path.name == CARD)
        if path.is_file() and not is_of_checkpoint and not (checkpoint / name).exists():
            (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, checkpoint / name)


def delete_replaced(aside: Path, scratch: Path) -> None:
    """
    Delete a checkpoint that another has replaced, if there was one.

    Args:
        aside: Where it is.
        scratch: Where it goes first. So a kill leaves nothing half deleted in `_replaced/`, from where the next start
            moves folders back.
    """
    # The new checkpoint is complete, whatever comes of the old one. Others may wait beside it.
    with suppress(OSError):
        scratch.parent.mkdir(exist_ok=True)
        aside.rename(scratch)
        _delete(scratch)
        aside.parent.rmdir()


def is_of_user(folder: Path) -> bool:
    """Whether a folder with the name of a checkpoint is a user's alone: the trainer wrote none of its files."""
    from transformers.trainer import TRAINER_STATE_NAME  # late: seconds of a dry run, which commits nothing

    return not any((folder / name).exists() for name in (MANIFEST, TRAINER_STATE_NAME))


def _restore(aside: Path, target: Path) -> None:
    """Put a checkpoint back to where another should have replaced it. `OSError` with its place if that fails."""
    try:
        aside.rename(target)
    except OSError as error:
        raise OSError(
            f"{error}; the earlier {target.name} is in {aside}: move it back, or resume, which does"
        ) from error


def _file_sizes(folder: Path) -> dict[str, int]:
    """Bytes of all files in a folder but cards, which users edit and peft rewrites, by their relative paths."""
    sizes: dict[str, int] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != CARD:
            sizes[str(path.relative_to(folder))] = path.stat().st_size
    return sizes


def _next_number(output_dir: Path) -> int:
    """The number of the next checkpoint. Steps do not tell the order: a run may go back to an earlier one."""
    complete = finished(output_dir)
    if not complete:
        return 1
    return 1 + read_manifest(complete[-1])["number"]


def checkpoint_folders(output_dir: Path) -> list[Path]:
    """
    Find all folders that have the name of a checkpoint of the trainer, complete or not.

    Args:
        output_dir: The run's output folder.

    Returns:
        Folders in no particular order. One that a user renamed, such as `checkpoint-6-keep`, is not among them.
    """
    named = output_dir.glob("checkpoint-*")
    return [path for path in named if re.fullmatch(r"checkpoint-\d+", path.name)]


def damage(folder: Path) -> str | None:
    """
    Find out why no run can resume from a checkpoint.

    Args:
        folder: A checkpoint of the trainer.

    Returns:
        What is missing or cut off, in words, or `None` for a checkpoint that has all that a resume reads.

    Raises:
        OSError: if it cannot be read now. That does not make it damaged.
    """
    try:
        manifest = read_manifest(folder)
        int(manifest["number"])
        needed = dict(manifest["files"])
        needed = {name: size for name, size in needed.items() if _is_for_a_resume(name)}
        present = {name: (folder / name).stat().st_size for name in needed}
    except (FileNotFoundError, NotADirectoryError) as error:
        return f"{error.filename} is missing"
    except (ValueError, KeyError, TypeError):
        return f"its {MANIFEST} is cut off"

    for name, size in needed.items():
        if present[name] != size:
            return f"{name} has {present[name]} bytes, needs {size}"
    return None


def _is_for_a_resume(name: str) -> bool:
    """Whether a resume may read a file that a manifest lists, by its relative path."""
    # Earlier versions listed cards.
    return Path(name).name != CARD and not _NOT_FOR_A_RESUME.fullmatch(name)


def read_manifest(folder: Path) -> dict[str, Any]:
    """
    Read the manifest of a checkpoint.

    Args:
        folder: The checkpoint.

    Returns:
        `number`, `files` (bytes by relative path), and the facts that identify the run.

    Raises:
        OSError: if it is missing or cannot be read.
        ValueError: if it is cut off.
    """
    return json.loads((folder / MANIFEST).read_text())


def finished(output_dir: Path) -> list[Path]:
    """
    Find the complete checkpoints of the trainer.

    Args:
        output_dir: The run's output folder.

    Returns:
        Their folders in the order in which they were written.
    """
    numbered = []
    for folder in checkpoint_folders(output_dir):
        # One that cannot be read now does not count: a rotation must not delete it, nor keep it in place of another.
        with suppress(OSError):
            if damage(folder) is None:
                numbered.append((read_manifest(folder)["number"], folder))
    return [folder for _, folder in sorted(numbered)]


def rotate(output_dir: Path, limit: int | None) -> None:
    """
    Delete the oldest complete checkpoints.

    Args:
        output_dir: The run's output folder.
        limit: Number of checkpoints that remain; `None` or 0 deletes none.

    Raises:
        OSError: if one cannot be moved away. It stays complete.
    """
    if not limit or limit < 0:
        return

    for folder in finished(output_dir)[:-limit]:
        # Moved away first, so that an interrupted deletion leaves no damaged checkpoint.
        try:
            moved = folder.rename(output_dir / INCOMING / folder.name)
        except OSError as error:
            raise OSError(f"{folder} could not be deleted (save_total_limit={limit}): {error}.") from error
        _delete(moved)


def _delete(folder: Path) -> None:
    """Delete a checkpoint in `_incoming/`, from where a start moves a complete one back after a kill."""
    # First, because it makes a complete checkpoint also of one that has lost its low-bit model.
    with suppress(OSError):
        (folder / MANIFEST).unlink()
    shutil.rmtree(folder, ignore_errors=True)
