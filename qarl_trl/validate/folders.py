"""Try all folders of a run before it does any work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from ..checkpoints.lock import LOCK, holding
from ..export import check_writable
from ..export.files import tensor_shapes


def check_folders(model: str | nn.Module, args: Any) -> None:
    """
    Try all folders that the run will write into or read its weights from.

    Args:
        model: The model or its name. The files of a local folder are read as far as their headers.
        args: Settings of the run.

    Raises:
        OSError: if a folder cannot be written.
        ValueError: if weights are cut off, or another run uses `output_dir`.
    """
    output_dir = Path(args.output_dir)
    check_writable(args.output_dir, "output_dir")
    # A folder without the lock's file was never in use, and this check alone should not make one.
    if (output_dir / LOCK).exists():
        with holding(output_dir):
            pass

    if args.sync_folder is not None:
        check_writable(args.sync_folder, "sync_folder")
    if isinstance(model, str):
        tensor_shapes(model)
