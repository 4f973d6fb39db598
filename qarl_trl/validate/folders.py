"""Check that a run can read and write its folders."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from ..checkpoints.lock import LOCK, holding
from ..export import check_writable
from ..export.files import check_apart, tensor_shapes
from ..quant.names import base_model
from ..quant.source import check_index
from .types import RunSettings


def check_folders(model: str | nn.Module, args: RunSettings) -> None:
    """
    Try to write into the folders that the run will write into, and to read the headers of its weight files.

    Args:
        model: The model or its name. Only a local folder has files to read.
        args: Settings of the run.

    Raises:
        OSError: if a folder cannot be written.
        ValueError: if weights are cut off, a folder is the model's, or another run uses `output_dir`.
    """
    # Before any folder is made: one with the model's name would be taken for the model.
    name = model if isinstance(model, str) else base_model(model).config._name_or_path
    check_apart(args.output_dir, "output_dir", name)
    if args.sync_folder is not None:
        check_apart(args.sync_folder, "sync_folder", name)

    output_dir = Path(args.output_dir)
    check_writable(args.output_dir, "output_dir")
    # A folder without the lock's file was never in use, and a mere check should not create that file.
    if (output_dir / LOCK).exists():
        with holding(output_dir):
            pass

    if args.sync_folder is not None:
        check_writable(args.sync_folder, "sync_folder")
    if isinstance(model, str):
        tensor_shapes(model)
        check_index(Path(model))
