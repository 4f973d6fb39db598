"""Which checkpoint a run resumes from, decided before a model loads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list

from .folder import INCOMING, MANIFEST, damage, finished, read_manifest


if TYPE_CHECKING:
    from ..config import QaRLConfig

# transformers.trainer calls it TRAINER_STATE_NAME; to import that loads datasets and pandas, a fifth of a dry run.
STATE = "trainer_state.json"

logger = get_logger(__name__)


def resume_path(wish: str | bool | None, args: QaRLConfig) -> str | None:
    """
    The checkpoint to resume from, checked; decided by the first process for all.

    Args:
        wish (`str`, `bool` or `None`): `True` or `"true"`: the newest complete one of `args.output_dir`; `"auto"`: the same, and
            if there is none `None`, a start from the beginning; a path; `None` or `False`: none.

    Raises:
        ValueError: when there is none, when that at the path is damaged, or when it cannot be resumed.
    """
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
