"""The folder from which a colocated engine loads the adapter of a frozen base.

It is in shared memory where it fits, so it takes memory of the machine and must not outlive its process.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any


SHARED_MEMORY = "/dev/shm"
PREFIX = "qarl_adapter_"
_LOCK = "lock"


def adapter_place(model: Any) -> str | None:
    """
    Where to put the folder of the adapter of a `PeftModel`: in shared memory, or `None` for a folder on disk.

    Shared memory must hold two bfloat16 adapters of each process of this machine; Docker gives it only 64 MB.
    """
    if not os.path.isdir(SHARED_MEMORY):
        return None

    factors = sum(param.numel() for name, param in model.named_parameters() if ".lora_" in name)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    needed = 2 * 2 * factors * processes  # bytes
    if shutil.disk_usage(SHARED_MEMORY).free <= needed:
        return None
    return SHARED_MEMORY


class AdapterFolder:
    """
    A temporary folder that its process holds locked, so that a later run finds and removes what a killed one left.

    Args:
        place: The folder to make it in; `None`: the system's folder for temporary files.

    Attributes:
        path: The folder.
    """

    def __init__(self, place: str | None) -> None:
        parent = place or tempfile.gettempdir()
        remove_leftovers(Path(parent))

        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent)
        self.path = Path(self._folder.name)
        # The kernel releases the lock when the process ends, also by a kill. A process number would not do: processes
        # in other containers share /dev/shm, but not the numbers.
        self._lock = _lock(self.path)


def remove_leftovers(parent: Path) -> None:
    """
    Delete the folders of this user's processes that have ended.

    Args:
        parent: Where [`AdapterFolder`] made them.
    """
    for folder in parent.glob(f"{PREFIX}*"):
        # One that cannot be locked is in use; one without the file is not locked yet.
        with suppress(OSError):
            if folder.stat().st_uid != os.getuid():
                continue
            descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(descriptor)


def _lock(folder: Path) -> int | None:
    """Lock a folder for the life of this process; `None` on a file system without locks. Returns the open file."""
    new = folder / "new_lock"
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        # Without the file nobody takes the folder for a leftover.
        os.close(descriptor)
        new.unlink()
        return None

    # It gets its name only now, locked.
    new.rename(folder / _LOCK)
    return descriptor
