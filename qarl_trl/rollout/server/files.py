"""The files of a weight sync to a server: a trainer writes them into a shared folder, workers read them.

They are safetensors of about 2 GiB each, or of one larger tensor, `0.safetensors`, `1.safetensors`, ..., in the order
of the stream.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor


# The trainer holds the tensors of one file in memory.
PART_BYTES = 2 << 30
# How `ServerClient` names the folder of a sync, and what is written into it.
_FOLDER = re.compile(r"[0-9a-f]{8}-\d+")
_FILE = re.compile(r"\d+\.safetensors|adapter_model\.safetensors|adapter_config\.json")


def save_parts(stream: Iterable[tuple[str, Tensor]], folder: Path, limit: int = PART_BYTES) -> int:
    """
    Write the tensors of a stream into `0.safetensors`, `1.safetensors`...

    Args:
        stream: Names and tensors.
        folder: An existing folder inside the sync folder.
        limit: A file ends when it has this many bytes.

    Returns:
        The number of files.

    Raises:
        RuntimeError: if they cannot be written.
    """
    files = 0
    part: dict[str, Tensor] = {}
    size = 0

    for name, tensor in stream:
        # A copy, because safetensors refuses tensors that share storage, and the experts of a layer do.
        part[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += tensor.nbytes

        if size >= limit:
            _save_part(part, _part_path(folder, files))
            files += 1
            part = {}
            size = 0

    if part:
        _save_part(part, _part_path(folder, files))
        files += 1
    return files


def remove_leftovers(root: Path, age: float) -> list[Path]:
    """
    Remove what is left of syncs whose trainer was killed during them: each folder may have the size of the model.

    Args:
        root: The sync folder.
        age: Seconds for which nothing was written. A younger folder may be of another run's sync.

    Returns:
        The folders that were removed.
    """
    removed = []
    for folder in root.glob("*"):
        if not (_FOLDER.fullmatch(folder.name) and folder.is_dir() and not folder.is_symlink()):
            continue
        try:
            files = list(folder.iterdir())
            last_written = max(path.stat().st_mtime for path in [folder, *files])
        except OSError:
            # Another run removes its own just now, or another user has it.
            continue

        is_of_a_sync = all(_FILE.fullmatch(file.name) for file in files)
        if is_of_a_sync and time.time() - last_written > age:
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                removed.append(folder)
    return removed


def folder_of(root: str, folder: str) -> Path:
    """
    The folder of a weight sync.

    Args:
        root: The server's sync folder.
        folder: The name of the sync's folder in it. It comes from a request, so it may be anything.

    Raises:
        ValueError: if there is none in `root`.
    """
    # Resolved, so that neither `..` nor a link leads out of the sync folder.
    shared = Path(root).resolve()
    inside = Path(root, folder).resolve()
    if inside.parent != shared or not inside.is_dir():
        raise ValueError(f"the server has no folder {folder!r} in its sync_folder {root!r}: both must mount the same")
    return inside


def read_parts(root: str, folder: str, files: int) -> Iterator[tuple[str, Tensor]]:
    """
    Read the tensors of a weight sync.

    Args:
        root: The server's sync folder.
        folder: As for [`folder_of`].
        files: The number of files that [`save_parts`] wrote there.

    Returns:
        Names and tensors.

    Raises:
        ValueError: immediately, not during the reload, if the folder is not in `root`, or if a file is missing or
            truncated.
    """
    inside = folder_of(root, folder)

    # To open a file reads its header, which says how long the file must be.
    try:
        parts = [safe_open(_part_path(inside, number), "pt") for number in range(files)]
    except Exception as error:  # OSError, SafetensorError
        raise ValueError(f"the server cannot read all {files} files of {inside}: {error}") from error
    return _tensors(parts)


def _tensors(parts: list[Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of open files, each read when it is asked for."""
    for part in parts:
        for name in part.keys():  # noqa: SIM118  # an open file is no mapping
            yield name, part.get_tensor(name)


def _part_path(folder: Path, number: int) -> Path:
    """Where the file of this number is."""
    return folder / f"{number}.safetensors"


def _save_part(part: dict[str, Tensor], path: Path) -> None:
    """Write a file of a sync with the mode that the umask allows. `RuntimeError` if it cannot be written."""
    try:
        # The mode of a file that was made as usual. (`export/files.py` asks for the umask, because its files exist
        # already. Nothing is shared: neither folder may import the other.)
        path.touch()
        mode = path.stat().st_mode
        save_file(part, path)
        # safetensors 0.8 makes the file private, but the server may run as another user.
        path.chmod(mode)
    except (OSError, SafetensorError) as error:
        sync_folder = str(path.parent.parent)
        raise RuntimeError(
            f"The sync could not be written below sync_folder {sync_folder!r}: {error}. "
            "The server was not touched. Make room, and resume from the last checkpoint."
        ) from error
