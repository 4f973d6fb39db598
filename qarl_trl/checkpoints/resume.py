"""Choose and check the checkpoint to resume from, before a model loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger

from ..export.files import LOW_BIT_FOLDER
from ..export.outputs import outputs_of
from ..guards import on_first
from .folder import (
    INCOMING,
    REPLACED,
    checkpoint_folders,
    copy_files_of_user,
    damage,
    delete_replaced,
    finished,
    is_of_user,
    read_manifest,
)
from .lock import holding
from .same_run import check_same_run


logger = get_logger(__name__)


def resume_path(wish: str | bool | None, args: Any, identity: Mapping[str, Any] | None = None) -> str | None:
    """
    Choose the checkpoint to resume from, and check it. The first process decides for all.

    Args:
        wish: `True` or `"true"`: the newest complete checkpoint of `args.output_dir`. `"auto"`: the same, or none if
            there is no checkpoint at all. A path: that checkpoint. `None` or `False`: none.
        args: Settings of the run.
        identity: Facts that the checkpoint must match, from `identity_of`; `None` compares nothing.

    Returns:
        The checkpoint's folder, or `None` for a start from the beginning.

    Raises:
        ValueError: if it is missing, damaged, of another run, or cannot be resumed.
        OSError: if it cannot be read now. The other processes raise this for every error of the first.
    """

    # Processes may see a network's file system in different states, but all must resume from the same step.
    def decide() -> str | None:
        checkpoint = _find(str(wish or "false"), Path(args.output_dir))
        if checkpoint is not None:
            _check(checkpoint, args, identity or {})
        return checkpoint

    return on_first(args, decide)


def check_start(checkpoint: str | None, args: Any) -> None:
    """
    Refuse to begin another run beside the checkpoints of an earlier one: their numbers would be taken, and
    `save_total_limit` would delete them. Nor may it begin beside a low-bit model that it would not replace, and that
    would be taken for its own. The first process decides for all.

    Args:
        checkpoint: The checkpoint to resume from, from [`resume_path`]. `None`: the run starts from the beginning.
        args: Settings of the run.

    Raises:
        ValueError: if `args.output_dir` holds checkpoints, complete or not, and `checkpoint` does not lie beside them,
            or a low-bit model that the run would not replace. The other processes raise `OSError`.
    """
    output_dir = Path(args.output_dir)
    replaces_low_bit = outputs_of(args, is_adapter=True, in_checkpoint=False).low_bit is not None

    def check() -> None:
        _put_back(output_dir)
        present = sorted((folder.name for folder in checkpoint_folders(output_dir)), key=_step)
        goes_on = checkpoint is not None and _lies_in(Path(checkpoint), output_dir)
        if goes_on:
            return
        low_bit = output_dir / LOW_BIT_FOLDER
        if not replaces_low_bit and (low_bit / "config.json").is_file():
            raise ValueError(
                f"{low_bit} is the low-bit model of an earlier run, and this one does not replace it: move it, or use "
                "another output_dir."
            )
        if not present:
            return

        if checkpoint is None:
            continues = "resume_from_checkpoint: auto continues that run"
        else:
            continues = f"resume_from_checkpoint: {output_dir / present[-1]} continues that run"
        raise ValueError(
            f"output_dir={str(output_dir)!r} holds checkpoints of an earlier run ({', '.join(present[-3:])}), which "
            f"this one would overwrite or delete: {continues}; another output_dir, or moving them, starts a new one."
        )

    on_first(args, check)


def _lies_in(checkpoint: Path, output_dir: Path) -> bool:
    """Whether a checkpoint is one of an output folder, also if only a link to it is there."""
    # A checkpoint may have moved to a larger disk, and the run may name the link or the place.
    is_linked = any(folder.samefile(checkpoint) for folder in checkpoint_folders(output_dir) if folder.exists())
    return is_linked or checkpoint.resolve().parent == output_dir.resolve()


def _step(name: str) -> int:
    """The optimizer step in the name of a checkpoint's folder."""
    return int(name.removeprefix("checkpoint-"))


def _find(wish: str, output_dir: Path) -> str | None:
    """The complete checkpoint that a wish means; `None` if the run should start from the beginning."""
    if wish.lower() == "false":
        return None
    if wish.lower() in ("true", "auto"):
        return _find_newest(wish, output_dir)

    reason = damage(Path(wish))
    if reason:
        raise ValueError(f"resume_from_checkpoint={wish!r} is not a complete checkpoint of this trainer: {reason}.")
    return wish


def _find_newest(wish: str, output_dir: Path) -> str | None:
    """The newest complete checkpoint of an output folder; `None` if it has no checkpoint and the wish is "auto"."""
    _put_back(output_dir)
    damaged = _damaged(output_dir)
    for checkpoint in damaged:
        logger.warning("Skipped a damaged checkpoint, which stays where it is: %s.", checkpoint)

    complete = finished(output_dir)
    if complete:
        return str(complete[-1])

    if damaged:
        # A run from the beginning would overwrite checkpoints that a user may still be able to repair.
        listed = "; ".join(damaged)
        raise ValueError(f"{output_dir} has only damaged checkpoints. To start over, move them: {listed}.")
    if wish.lower() == "true":
        raise ValueError(f"resume_from_checkpoint={wish} found no checkpoint in {output_dir}. Give a path, or 'auto'.")
    return None


def _put_back(output_dir: Path) -> None:
    """
    Move a complete checkpoint, or a user's folder with the name of one, to its place, if a kill or an error came
    between the two renames of `commit`.
    """
    # The new one first. The one that it replaces returns only if nothing has its place.
    for place_of_others in (INCOMING, REPLACED):
        for folder in output_dir.glob(f"{place_of_others}/checkpoint-*"):
            place = output_dir / folder.name
            # `holding` raises `ValueError` while another run holds the output folder. The checkpoint is then that
            # run's.
            with suppress(ValueError), holding(output_dir):
                if not place.exists() and (damage(folder) is None or _waits(folder)):
                    folder.rename(place)
                elif place_of_others == REPLACED and damage(place) is None:
                    copy_files_of_user(folder, place)
                    delete_replaced(folder, output_dir / INCOMING / folder.name)


def _waits(folder: Path) -> bool:
    """Whether a folder is a user's that a checkpoint should have replaced."""
    return folder.parent.name == REPLACED and is_of_user(folder)


def _damaged(output_dir: Path) -> list[str]:
    """Damaged checkpoints of an output folder, each with the reason."""
    reasons = {folder: damage(folder) for folder in sorted(checkpoint_folders(output_dir))}
    return [f"{folder} ({reason})" for folder, reason in reasons.items() if reason]


def why_never_resumed(args: Any) -> str | None:
    """
    Why no checkpoint of a run can be resumed; `None` if all can.

    Args:
        args: The settings of the run.
    """
    # Not every trainer of TRL has a reference model that follows the policy.
    if getattr(args, "sync_ref_model", False):
        return "sync_ref_model=True cannot be resumed: its reference is in no checkpoint. Set it to False."
    if getattr(args, "teacher_model_kind", None) == "ema":
        return (
            "teacher_model_kind='ema' cannot be resumed: its teacher is in no checkpoint. Set it to 'base', or start "
            "a new run."
        )
    # transformers saves a dummy in place of an optimizer for each layer, and AdaLomo keeps its moments to itself.
    # Those of GrokAdamW (0.1.2) lie in its groups under parameters, which are others after a load.
    optimizer = getattr(args.optim, "value", args.optim)
    if optimizer.endswith("_layerwise") or optimizer in ("adalomo", "grokadamw"):
        return (
            f"optim={optimizer!r} cannot be resumed: its state is in no checkpoint. Start a new run, or use "
            "another optimizer."
        )
    return None


def why_callbacks_forget(callbacks: Sequence[Any]) -> str | None:
    """
    Why a run with these callbacks cannot be resumed; `None` if it can.

    Args:
        callbacks: Those of the trainer.
    """
    for callback in callbacks:
        # `BEMACallback` of `trl.experimental.bema_for_ref_model` (TRL 1.16).
        if getattr(callback, "update_ref_model", False) is True:
            return (
                f"A run with {type(callback).__name__}(update_ref_model=True) cannot be resumed: its reference is in "
                "no checkpoint. Leave the callback out, or start a new run."
            )
    return None


def _check(checkpoint: str, args: Any, identity: Mapping[str, Any]) -> None:
    """Refuse (`ValueError`) a checkpoint of another run, and one that no run can continue exactly."""
    reason = why_never_resumed(args)
    if reason is not None:
        raise ValueError(reason)

    uses_deepspeed = args.deepspeed_plugin is not None
    # DeepSpeed keeps the scheduler in files of its own.
    if "scheduler.pt" not in read_manifest(Path(checkpoint))["files"] and not uses_deepspeed:
        raise ValueError(f"{checkpoint} has weights without the optimizer (save_only_model). Give it as the model.")

    check_same_run(checkpoint, identity, uses_deepspeed)
