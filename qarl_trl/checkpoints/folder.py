"""A checkpoint as a folder: written beside its place, listed in a manifest, renamed; and which ones may be deleted."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..export import flush


MANIFEST = "manifest.json"
# Where a checkpoint is written. Uploads of the output folder leave out what begins with an underscore.
INCOMING = "_incoming"


def commit(folder: Path, target: Path, **facts: Any) -> None:
    """
    Make a written checkpoint `folder` the complete one at `target`, in one rename on the same file system.

    Its manifest has size and CRC-32 of every file, the time, and `facts`. What was at `target` goes.
    """
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    flush(folder)
    with ThreadPoolExecutor() as threads:
        checksums = threads.map(_checksum, files.values())
        listed = {n: [p.stat().st_size, c] for (n, p), c in zip(files.items(), checksums, strict=True)}
    # Later than the others, whatever the clock of this machine says.
    past = [read_manifest(other)["saved"] + 1 for other in finished(target.parent)[-1:]]
    content = {"saved": max([time.time(), *past]), **facts, "files": listed}
    (folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n")
    flush(folder)
    if target.exists():
        target.rename(folder.with_name("replaced"))
    folder.rename(target)
    flush(target.parent, tree=False)


def damage(folder: Path) -> str | None:
    """What keeps a checkpoint from being whole; `None` of one that is as it was written."""
    try:
        listed = read_manifest(folder)["files"]
        found = {name: (folder / name).stat() for name in listed}
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"it is incomplete ({error})"
    for name, (size, _) in listed.items():
        if found[name].st_size != size:
            return f"{name} has {found[name].st_size} bytes, must have {size}"
    seen = tuple((name, checksum, found[name].st_mtime_ns) for name, (_, checksum) in listed.items())
    try:
        changed = _changed(folder.resolve(), seen)
    except OSError as error:
        return f"it cannot be read ({error})"
    return f"{changed} is not what was written" if changed else None


def read_manifest(folder: Path) -> dict[str, Any]:
    """Of a checkpoint; `OSError` or `ValueError` when it has none that can be read."""
    return json.loads((folder / MANIFEST).read_text())


@lru_cache(maxsize=8)
def _changed(folder: Path, files: tuple[tuple[str, int, int], ...]) -> str | None:
    """The first file whose checksum differs. Cached: a recipe's checkpoint is asked for at the start, and again by `train`."""
    with ThreadPoolExecutor() as threads:
        checksums = threads.map(_checksum, [folder / name for name, _, _ in files])
        return next((name for (name, written, _), now in zip(files, checksums, strict=True) if now != written), None)


def _checksum(path: Path) -> int:
    """CRC-32: against accidents, not attackers, and eight times as fast as SHA-256 (3.1 and 0.4 GB/s on a core)."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(2**24):
            value = zlib.crc32(block, value)
    return value


def finished(output_dir: Path) -> list[Path]:
    """Checkpoints with a manifest, the one written last at the end."""
    dated = []
    for folder in output_dir.glob("checkpoint-*"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            dated.append((read_manifest(folder)["saved"], folder))
    return [folder for _, folder in sorted(dated)]


def rotate(output_dir: Path, limit: int | None, best: str | None) -> None:
    """Delete the oldest complete checkpoints beyond `limit`, never the last nor the `best`; others are not counted."""
    done = finished(output_dir)
    kept = {done[-1]} | {folder for folder in done if best and folder.resolve() == Path(best).resolve()}
    if not limit or limit < 0:
        return
    surplus = len(done) - max(limit, len(kept))
    for folder in [folder for folder in done if folder not in kept][: max(surplus, 0)]:
        # Out of sight first: a deletion that is cut off must not leave a damaged checkpoint.
        shutil.rmtree(folder.rename(output_dir / INCOMING / folder.name), ignore_errors=True)
