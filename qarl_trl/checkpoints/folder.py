"""A checkpoint's folder: write it elsewhere, list its files in a manifest, rename it; and delete old ones."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..export.files import flush, share


MANIFEST = "manifest.json"
# Folder in which a checkpoint is written. Uploads of the output folder skip names that begin with an underscore.
INCOMING = "_incoming"


def commit(folder: Path, target: Path, **facts: Any) -> None:
    """
    Turn the written `folder` into the complete checkpoint `target`, by one rename on the same file system.

    Its manifest has the size of every file, a number that grows from checkpoint to checkpoint, and `facts`. Replaces `target`.
    """
    share(folder)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in files}
    flush(folder)  # before the manifest, which marks it as complete
    last = finished(target.parent)[-1:]
    content = {"number": 1 + (read_manifest(last[0])["number"] if last else 0), **facts, "files": sizes}
    (folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n")
    flush(folder)
    if target.exists():
        target.rename(folder.with_name("replaced"))
    folder.rename(target)
    flush(target.parent, tree=False)


def steps(output_dir: Path) -> list[Path]:
    """All folders with the names of the trainer's checkpoints; not a user's `checkpoint-6-keep`."""
    return [path for path in output_dir.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]


def damage(folder: Path) -> str | None:
    """Why a checkpoint is incomplete, or `None`. `OSError` if it cannot be read now, which is no damage."""
    try:
        manifest = read_manifest(folder)
        sizes, _ = dict(manifest["files"]), int(manifest["number"])
        found = {name: (folder / name).stat().st_size for name in sizes}
    except (FileNotFoundError, NotADirectoryError) as error:
        return f"{error.filename} is missing"
    except (ValueError, KeyError, TypeError):
        return f"its {MANIFEST} is cut off"
    wrong = [f"{name} has {found[name]} bytes, needs {size}" for name, size in sizes.items() if found[name] != size]
    return wrong[0] if wrong else None


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint; `OSError` or `ValueError` if it cannot be read."""
    return json.loads((folder / MANIFEST).read_text())


def finished(output_dir: Path) -> list[Path]:
    """Complete checkpoints of the trainer, in the order in which they were written."""
    numbered = []
    for folder in steps(output_dir):
        with suppress(OSError):  # not readable now: do not count it
            if damage(folder) is None:
                numbered.append((read_manifest(folder)["number"], folder))
    return [folder for _, folder in sorted(numbered)]


def rotate(output_dir: Path, limit: int | None) -> None:
    """Delete the oldest `finished` checkpoints, so that `limit` remain (unset or 0: delete none)."""
    for folder in finished(output_dir)[:-limit] if limit and limit > 0 else ():
        # Move it away first: an interrupted deletion must not leave a damaged checkpoint.
        shutil.rmtree(folder.rename(output_dir / INCOMING / folder.name), ignore_errors=True)
