"""Which checkpoint a run resumes from, and whether every process can save in its folder, decided before a model loads."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, gather_object

from .folder import INCOMING, MANIFEST, damage, finished, read_manifest


if TYPE_CHECKING:
    from ..config import QaRLConfig

# transformers.trainer calls it TRAINER_STATE_NAME; to import that loads datasets and pandas, a fifth of a dry run.
STATE = "trainer_state.json"
# Seconds in which a file must be seen by the other machines.
PATIENCE = 15.0

logger = get_logger(__name__)


def resume_path(wish: str | bool | None, args: QaRLConfig) -> str | None:
    """
    The checkpoint to resume from, checked; decided by the first process for all.

    Args:
        wish (`str`, `bool` or `None`): `True` or `"true"`: the newest complete one of `args.output_dir`; `"auto"`: the same, and
            if there is none `None`, a start from the beginning; a path; `None` or `False`: none.

    Raises:
        ValueError: when there is none, when that at the path is damaged, or when it cannot be resumed; as `check_shared`.
    """
    check_shared(args)
    answer: list[Any] = [None]
    if args.process_index == 0:
        try:
            answer = [_find(str(wish or "false"), Path(args.output_dir))]
            if answer[0]:
                _check_resumable(Path(answer[0]), args)
        except ValueError as error:
            answer = [error]
    found = broadcast_object_list(answer)[0] if args.world_size > 1 else answer[0]
    if isinstance(found, ValueError):
        raise found
    return found


def check_shared(args: QaRLConfig) -> None:
    """
    Of several processes that save checkpoints, each must see what the first writes to `args.output_dir`. Collective.

    Each writes its part of a checkpoint to its own `output_dir`, and the first tells all where to resume. With `save_only_model`
    nothing can be resumed, and `save_on_each_node` is for folders that are not shared.

    Raises:
        ValueError: in every process, when one does not see it within `PATIENCE`, or when the first cannot write there.
    """
    if args.world_size == 1 or args.save_strategy == "no" or args.save_only_model or args.save_on_each_node:
        return
    folder, name, failure = Path(args.output_dir), f"_shared_{uuid4().hex}", None
    if args.process_index == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
        except OSError as error:
            failure = str(error)
    name, failure = broadcast_object_list([name, failure])
    if failure is not None:
        raise ValueError(f"The first process cannot write to output_dir: {failure}.")
    end = time.monotonic() + PATIENCE
    while not (seen := os.path.exists(folder / name)) and time.monotonic() < end:
        time.sleep(0.2)
    blind = [rank for rank, sees in enumerate(gather_object([seen])) if not sees]
    if args.process_index == 0:
        (folder / name).unlink(missing_ok=True)
    if blind:
        raise ValueError(
            f"output_dir={args.output_dir!r} must be on a file system that all processes share: {len(blind)} of {args.world_size} "
            f"(first: {blind[0]}) do not see a file that the first wrote there. Share it, or set save_strategy: 'no'."
        )


def _find(wish: str, output_dir: Path) -> str | None:
    if wish.lower() == "false":
        return None
    if wish.lower() not in ("true", "auto"):
        return _given(Path(wish))
    for folder in output_dir.glob(f"{INCOMING}/checkpoint-*"):  # killed between the two renames of `commit`
        if not (output_dir / folder.name).exists() and damage(folder) is None:
            folder.rename(output_dir / folder.name)
    done, found = finished(output_dir), None
    bad = dict.fromkeys(output_dir.glob(f"{INCOMING}/checkpoint-*"), "it is incomplete")
    bad |= {path: f"it has no {MANIFEST}" for path in output_dir.glob("checkpoint-*") if path not in done}
    for folder in reversed(done):
        why = damage(folder)
        if why is None:
            found = str(folder)
            break
        bad[folder] = why
    for folder, why in bad.items():
        logger.warning("%s is not resumed from and left alone: %s.", folder, why)
    if found is None and wish.lower() == "true":
        raise ValueError(
            f"resume_from_checkpoint={wish} found no complete checkpoint in {output_dir}. Give its path, or 'auto' to start "
            "from the beginning when there is none."
        )
    return found


def _given(folder: Path) -> str:
    if not (folder / STATE).is_file():
        raise ValueError(
            f"resume_from_checkpoint={str(folder)!r} is no training checkpoint. Give 'true', 'auto' or the path of a "
            "checkpoint-N."
        )
    if not (folder / MANIFEST).exists():
        logger.warning("%s has no %s: that it is complete cannot be checked.", folder, MANIFEST)
    elif why := damage(folder):
        raise ValueError(f"{folder} is damaged: {why}. Resume from another one.")
    return str(folder)


def _check_resumable(folder: Path, args: QaRLConfig) -> None:
    if args.sync_ref_model:
        raise ValueError("sync_ref_model=True cannot be resumed: its reference is in no checkpoint. Set it to False.")
    if not (folder / "scheduler.pt").exists() and args.deepspeed_plugin is None:
        raise ValueError(
            f"{folder} holds weights without the optimizer (save_only_model). Give it as the model, and do not resume."
        )
    processes = read_manifest(folder)["processes"] if (folder / MANIFEST).exists() else args.world_size
    if processes != args.world_size:
        logger.warning(
            "%s was written by %d processes, and this run has %d: order of the data and random numbers will differ.",
            folder,
            processes,
            args.world_size,
        )
