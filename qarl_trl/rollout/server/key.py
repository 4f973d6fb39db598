"""The key of a server, by which it knows its trainer, and what else it reads from its environment.

A server without a key of the user's makes one, and stores it in a file beside the sync folder, where a trainer that
mounts it finds it. The file may be made and read by this user alone.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path


KEY = "VLLM_API_KEY"
HOSTS = "QARL_SERVER_HOSTS"  # host names that requests may use, separated by commas
# What to do about a file that cannot be trusted.
_OTHER_KEY = f"Remove it, or set {KEY} on both machines."


def make_key(sync_folder: str) -> str:
    """
    Make a new key, print it once, and store it readable only by this user.

    Args:
        sync_folder: The folder of weight syncs. The key is stored beside it.
    """
    key = secrets.token_hex(16)
    path = key_file(sync_folder)
    path.parent.mkdir(parents=True, exist_ok=True)

    # Created with its mode, so that nobody can read it in between. O_EXCL: never into a file that somebody else made.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w") as file:
        file.write(f"{key}\n")

    print(f"Made a key for this server (stored in {path}). On the trainer's machine: export {KEY}={key}", flush=True)
    return key


def key_file(sync_folder: str | Path) -> Path:
    """
    The file in which a server stores its new key, for a trainer that mounts the sync folder.

    Args:
        sync_folder: The folder of weight syncs. The file is beside it.
    """
    folder = Path(sync_folder).resolve()
    return folder.with_name(f"{folder.name}.key")


def find_key(sync_folder: str | Path) -> str:
    """
    The key from the environment, or the one that a server stored; empty if there is none.

    Args:
        sync_folder: The folder of weight syncs.

    Raises:
        PermissionError: if another user may have made or read the stored key.
    """
    # First, because a trainer may mount only the sync folder, and the file is beside it.
    key = os.environ.get(KEY)
    if key:
        return key

    return _read_private(key_file(sync_folder))


def _read_private(file: Path) -> str:
    """The content of a file that this user made for itself alone; empty without one, `PermissionError` otherwise."""
    # One opened file from here on: the name could mean another file a moment later.
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise PermissionError(f"{file} cannot be read as the key of a server: {error}. {_OTHER_KEY}") from error

    with open(descriptor) as opened:
        state = os.fstat(descriptor)
        mode = stat.S_IMODE(state.st_mode)
        # Who can write the file chooses the key, and who can read it has the key.
        if not stat.S_ISREG(state.st_mode) or state.st_uid != os.getuid() or mode & 0o077:
            raise PermissionError(
                f"{file} must be a file of this user (uid {os.getuid()}) that nobody else may read or write, "
                f"got uid {state.st_uid} and mode {mode:04o}. {_OTHER_KEY}"
            )
        return opened.read().strip()
