"""Allow only one run at a time in an `output_dir`: two would delete each other's checkpoints."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate.logging import get_logger
from filelock import FileLock, Timeout


LOCK = "_lock"
# What the kernel says on file systems without locks: none implemented, or (NFS) no service that keeps them.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)

logger = get_logger(__name__)


@contextmanager
def holding(output_dir: Path) -> Iterator[None]:
    """
    Create `output_dir` and hold its lock while the block runs. A process may nest such blocks.

    The kernel releases the lock when the process ends, even if it is killed. Forks that live longer do not keep the
    lock, because filelock closes the lock's file in them.

    Args:
        output_dir: The run's output folder.

    Raises:
        ValueError: if another process has the lock, with its id and machine.
        OSError: if the folder cannot be created or locked.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    file = output_dir / LOCK
    # A singleton counts how often this process has taken the lock, so that blocks can nest. A soft lock is a mere
    # file, which would outlive a killed run.
    lock = FileLock(file, timeout=0, thread_local=False, is_singleton=True, fallback_to_soft=False)

    try:
        lock.acquire()
    except Timeout:
        holder = file.read_text() or "another run"
        raise ValueError(f"output_dir={str(output_dir)!r} is in use by {holder}. Wait, or choose another.") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logger.warning("%s is on a file system without locks, so a second run in it would not be noticed.", output_dir)

    # For the message of a second run.
    if lock.is_locked:
        file.write_text(f"process {os.getpid()} on {socket.gethostname()}")
    try:
        yield
    finally:
        lock.release()
