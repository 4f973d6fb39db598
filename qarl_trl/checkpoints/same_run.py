"""Compare a run with that of a checkpoint: the one from which it resumes, or the one whose weights it starts from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger

from .changes import Change, changes, refuses
from .folder import read_manifest
from .identity import COMMIT, CONFIG, PACKERS, SETTINGS, WORKERS, same_scheme
from .models import folder_of


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


def check_same_run(checkpoint: str, identity: Mapping[str, Any], uses_deepspeed: bool) -> None:
    """
    Refuse a checkpoint of another run.

    Args:
        checkpoint: The checkpoint's folder.
        identity: Facts of the run that resumes, from `identity_of`. A fact that it lacks is not compared.
        uses_deepspeed: Whether the run has a plugin of DeepSpeed.

    Raises:
        ValueError: if a fact differs, or a setting that must stay.
    """
    stored = read_manifest(Path(checkpoint))

    for name in identity:
        # The name may differ, because a model's folder may move. The digest of its weights is compared instead.
        if name not in ("model", SETTINGS, *_LAST):
            _check_fact(name, checkpoint, stored, identity)

    for change in changed_settings(checkpoint, identity):
        reason = refuses(change, stored.get(WITHIN_BATCH, False), uses_deepspeed)
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


def _has_layers_in_routers(checkpoint: str) -> bool:
    """Whether a checkpoint is of a model with linear layers inside its routers. Of an adapter nobody knows here."""
    config = Path(checkpoint) / "config.json"
    if not config.exists():
        return False
    content = json.loads(config.read_text())
    # Gemma-4 has dense models, too.
    text = content.get("text_config", content)
    return content.get("model_type") in ("gemma4", "gemma4_text", "zaya") and text.get("enable_moe_block", True)


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


def run_of_masters(name: str, loading: Mapping[str, Any] | None) -> dict[str, Any]:
    """
    The manifest of the low-bit run that trained the weights of a model.

    Args:
        name: The model's name.
        loading: The arguments by which it loads.

    Returns:
        Nothing for a model that is no checkpoint, and for one of a run that learned in high precision.
    """
    folder = folder_of(name, loading)
    # Others also call a file so.
    with suppress(OSError, ValueError, AttributeError):
        stored = {} if folder is None else read_manifest(folder)
        # Low bits in rollouts alone leave the weights as they are.
        if stored.get("scheme", "none") != "none" and stored.get(SETTINGS, {}).get("quantize_learner"):
            return stored
    return {}


def warn_of_another_scheme(identity: Mapping[str, Any], loading: Mapping[str, Any] | None) -> None:
    """
    Warn of a run in low bits that starts from weights which a run trained for others.

    Args:
        identity: Facts of the run, from `identity_of`.
        loading: The arguments by which its model loads.
    """
    now = identity["scheme"]
    before = run_of_masters(identity["model"], loading).get("scheme", now)
    if now != "none" and not same_scheme(before, now):
        logger.warning(
            f"{identity['model']} has master weights that a run trained for {before}, and this run rounds them to "
            f"{now}: unless both select the same layers, it starts from another model than that run ended with. Set "
            "quant_scheme, quant_group_size and quant_ignore as there, or quant_recipe."
        )
