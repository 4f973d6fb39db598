"""Choose and check the checkpoint to resume from, before a model loads."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger

from ..guards import on_first
from .changes import Change, changes, refuses
from .folder import (
    INCOMING,
    MISSES_EPOCH_END,
    REPLACED,
    checkpoint_folders,
    copy_files_of_user,
    damage,
    delete_replaced,
    finished,
    is_of_user,
    read_manifest,
)
from .identity import COMMIT, CONFIG, PACKERS, SETTINGS, TOKENIZER, WORKERS, of_earlier_version, same_scheme
from .lock import holding


# Entries of a manifest beside the facts of its run: whether it was saved within a rollout batch.
WITHIN_BATCH = "within_rollout_batch"
# The parameters that the optimizer trains, known only when the run has one.
TRAINED = "trained"
# The class of the optimizer, which a script may have made.
OPTIMIZER = "optimizer"
# What the optimizer began with.
MADE = "optimizer_began_with"
# What has read the training set, and why its number must stay.
_READERS = {
    WORKERS: ("read its stream with dataloader_num_workers", "reads shards"),
    PACKERS: ("made its rows with dataset_num_proc", "makes rows"),
}
# Entries that are compared last, because a setting that changed with them says more: digests of the models beside the
# policy, and whether a launcher compiles it.
_LAST = (
    "reference",
    "loaded_teacher",
    "teacher_files",
    "teacher_commit",
    "reward_models",
    "reward_commits",
    "compiled",
)

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
    `save_total_limit` would delete them. The first process decides for all.

    Args:
        checkpoint: The checkpoint to resume from, from [`resume_path`]. `None`: the run starts from the beginning.
        args: Settings of the run.

    Raises:
        ValueError: if `args.output_dir` holds checkpoints, complete or not, and `checkpoint` does not lie beside them.
            The other processes raise `OSError`.
    """
    output_dir = Path(args.output_dir)

    def check() -> None:
        _put_back(output_dir)
        present = sorted((folder.name for folder in checkpoint_folders(output_dir)), key=_step)
        goes_on = checkpoint is not None and _lies_in(Path(checkpoint), output_dir)
        if not present or goes_on:
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

    stored = read_manifest(Path(checkpoint))
    # DeepSpeed keeps the scheduler in files of its own.
    if "scheduler.pt" not in stored["files"] and args.deepspeed_plugin is None:
        raise ValueError(f"{checkpoint} has weights without the optimizer (save_only_model). Give it as the model.")

    for name in identity:
        # The name may differ, because a model's folder may move. The digest of its weights is compared instead.
        if name not in ("model", SETTINGS, *_LAST):
            _check_fact(name, checkpoint, stored, identity)

    for change in changed_settings(checkpoint, identity):
        if _is_same_precision(change, stored):
            continue
        reason = refuses(change, stored.get(WITHIN_BATCH, False), args.deepspeed_plugin is not None)
        if reason is not None:
            raise ValueError(
                f"{checkpoint} is a checkpoint of another run: {change.name} was {change.before!r} there, and is "
                f"{change.now!r}. {reason} Set it back, or {_new_run(identity)}."
            )
    for name in _LAST:
        if name in identity:
            _check_fact(name, checkpoint, stored, identity)


def _new_run(identity: Mapping[str, Any]) -> str:
    """What to do in place of a resume. An adapter is no model that a run could start from."""
    if identity.get("adapter"):
        return "start a new run"
    return "start a new run with the checkpoint as the model"


def _is_same_precision(change: Change, stored: Mapping[str, Any]) -> bool:
    """
    Whether a run of an earlier version has only said less: it stored `bf16: false`, and computed in the precision of
    the launcher, as the run does that resumes from it.
    """
    is_of_earlier_version = "compiled" not in stored
    is_said_now = (change.name, change.before, change.now) == ("bf16", False, True)
    return is_of_earlier_version and is_said_now and os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16"


def _check_fact(name: str, checkpoint: str, stored: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Refuse (`ValueError`) a checkpoint whose run had another value of a fact. Earlier versions wrote fewer facts."""
    check = _CHECKS.get(name, _check_equal)
    check(name, checkpoint, stored, identity)


def _check_equal(name: str, checkpoint: str, stored: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """A fact that must be the same."""
    _compare(name, checkpoint, stored, identity, identity[name])


def _compare(name: str, checkpoint: str, stored: Mapping[str, Any], identity: Mapping[str, Any], value: Any) -> None:
    """Refuse (`ValueError`) a checkpoint whose run had another `value` of a fact."""
    if stored.get(name, value) != value:
        raise ValueError(
            f"{checkpoint} is a checkpoint of another run: "
            f"{name} was {stored[name]!r} with the model {stored['model']!r}, "
            f"and is {value!r} with {identity['model']!r}. "
            "Start with what it was made from, or use another output_dir."
        )


def _check_readers(name: str, checkpoint: str, stored: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """The number of processes that read or make the rows of the training set."""
    value = identity[name]
    before = stored.get(name)
    if before is None and name == PACKERS and "dataset_num_proc" in stored.get(SETTINGS, {}):
        # Earlier versions had the number among the settings.
        before = stored[SETTINGS]["dataset_num_proc"] or 1

    if before is not None and before != value:
        reader, does = _READERS[name]
        raise ValueError(
            f"{checkpoint} {reader}={before}, got {value}: each process {does} of its own, so other rows would "
            f"come. Set it back, or {_new_run(identity)}."
        )


def _check_weights(name: str, checkpoint: str, stored: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """The digest of a model's weights; of a model of the Hub the name and the revision that were asked for."""
    # The commit decides.
    if COMMIT in identity and stored.get(COMMIT) == identity[COMMIT]:
        return
    _check_equal(name, checkpoint, stored, identity)


def _check_scheme(name: str, checkpoint: str, stored: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """The scheme of the layers, whose words may differ between versions."""
    value = identity[name]
    before = stored.get(name, value)
    if not same_scheme(before, value):
        _check_equal(name, checkpoint, stored, identity)
    elif before != value and _has_layers_in_routers(checkpoint):
        logger.warning(
            f"The run of {checkpoint} trained layers within routers in low bits. They stay in high precision now."
        )


def _check_tokenizer(name: str, checkpoint: str, stored: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """The digest of the tokenizer."""
    if not _has_digest_without_settings(stored):
        _check_equal(name, checkpoint, stored, identity)


def _check_adapter(name: str, checkpoint: str, stored: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """The settings of the adapters."""
    value = identity[name]
    # Earlier versions stored fewer settings of an adapter.
    if OPTIMIZER not in stored:
        value = [of_earlier_version(facts, has_choice_of_layers=TRAINED in stored) for facts in value]
    _compare(name, checkpoint, stored, identity, value)


def _has_layers_in_routers(checkpoint: str) -> bool:
    """Whether a checkpoint is of a model with linear layers inside its routers. Of an adapter nobody knows here."""
    config = Path(checkpoint) / "config.json"
    if not config.exists():
        return False
    content = json.loads(config.read_text())
    # Gemma-4 has dense models, too.
    text = content.get("text_config", content)
    return content.get("model_type") in ("gemma4", "gemma4_text", "zaya") and text.get("enable_moe_block", True)


def _has_digest_without_settings(stored: Mapping[str, Any]) -> bool:
    """Whether a version wrote the digest of a tokenizer that knew nothing of the settings which TRL writes into it."""
    is_of_earlier_version = MISSES_EPOCH_END not in stored
    settings = stored.get(SETTINGS, {})
    return is_of_earlier_version and any(settings.get(name) for name in ("eos_token", "chat_template_path"))


def _check_commit(name: str, checkpoint: str, stored: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """The commit of a model of the Hub, which may have changed since the checkpoint's run."""
    before = stored.get(COMMIT, identity[COMMIT])
    if before != identity[COMMIT]:
        raise ValueError(
            f"{checkpoint} is a checkpoint of another run: the model {stored['model']!r} was at commit {before} on "
            f"the Hub, and is at {identity[COMMIT]} now. Set model_revision: {before} (in a script "
            f"model_init_kwargs={{'revision': '{before}'}}), or {_new_run(identity)}."
        )


def _check_config(name: str, checkpoint: str, stored: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """The config of a loaded model, which may compute differently from that of the checkpoint's run."""
    before = stored.get(name, {})
    for key, value in identity[name].items():
        # One that only one of the two has is of another version of transformers.
        if key in before and before[key] != value:
            raise ValueError(
                f"{checkpoint} is a checkpoint of another run: {key} in the config of the loaded model was "
                f"{before[key]!r}, and is {value!r}. Load it as that run did, or start a new run."
            )


# Facts with a comparison of their own. Each refuses (`ValueError`) a checkpoint of another run.
_CHECKS = {
    CONFIG: _check_config,
    COMMIT: _check_commit,
    WORKERS: _check_readers,
    PACKERS: _check_readers,
    "weights": _check_weights,
    "scheme": _check_scheme,
    TOKENIZER: _check_tokenizer,
    "adapter": _check_adapter,
}


def changed_settings(checkpoint: str | Path, identity: Mapping[str, Any]) -> list[Change]:
    """
    The settings that differ between a checkpoint and a run.

    Args:
        checkpoint: The checkpoint's folder.
        identity: Facts of the run, from `identity_of`.
    """
    stored = read_manifest(Path(checkpoint))
    return list(changes(stored.get(SETTINGS, {}), identity.get(SETTINGS, {})))
