"""A checkpoint as a folder: written beside its place, listed in a manifest, renamed; and which ones may be deleted."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..export.files import flush, share


MANIFEST = "manifest.json"
# Where a checkpoint is written. Uploads of the output folder leave out what begins with an underscore.
INCOMING = "_incoming"


def commit(folder: Path, target: Path, **facts: Any) -> None:
    """
    Make a written checkpoint `folder` the complete one at `target`, in one rename on the same file system.

    Its manifest has the size of every file, a number that grows from checkpoint to checkpoint, and `facts`. What was at `target` goes.
    """
    share(folder)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in files}
    flush(folder)  # before the manifest that vouches for it
    last = finished(target.parent)[-1:]
    content = {"number": 1 + (read_manifest(last[0])["number"] if last else 0), **facts, "files": sizes}
    (folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n")
    flush(folder)
    if target.exists():
        target.rename(folder.with_name("replaced"))
    folder.rename(target)
    flush(target.parent, tree=False)


def steps(output_dir: Path) -> list[Path]:
    """All folders that are named as the trainer names its checkpoints: not a user's `checkpoint-6-keep`."""
    return [path for path in output_dir.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]


def damage(folder: Path) -> str | None:
    """What keeps a checkpoint from being whole, or `None`. `OSError` when that cannot be read now, which is no damage."""
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
    """The manifest of a checkpoint; `OSError` or `ValueError` when it has none that can be read."""
    return json.loads((folder / MANIFEST).read_text())


def finished(output_dir: Path) -> list[Path]:
    """Checkpoints that the trainer wrote and that are whole, the one written last at the end."""
    numbered = []
    for folder in steps(output_dir):
        with suppress(OSError):  # not readable now: it cannot be counted on
            if damage(folder) is None:
                numbered.append((read_manifest(folder)["number"], folder))
    return [folder for _, folder in sorted(numbered)]


def rotate(output_dir: Path, limit: int | None) -> None:
    """Delete the oldest `finished` checkpoints beyond `limit` (unset or 0: none); others are not counted."""
    for folder in finished(output_dir)[:-limit] if limit and limit > 0 else ():
        # Out of sight first: a deletion that is cut off must not leave a damaged checkpoint.
        shutil.rmtree(folder.rename(output_dir / INCOMING / folder.name), ignore_errors=True)
