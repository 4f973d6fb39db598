"""The facts that a card tells of a model and of its training run."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..quant.names import base_model


# Packages that decide what a run computes.
PACKAGES = ("qarl_trl", "trl", "transformers", "torch")
# Tags of a trainer that do not say what it does.
_TAGS_OF_LIBRARIES = ("trl", "qarl")
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def base_facts(name: str) -> dict[str, Any]:
    """
    Facts about the base model for a card.

    Args:
        name: Its Hub id, or its local folder.

    Returns:
        `base_id`: the Hub id, `None` for a local folder. `base`: the name, of a local folder only the last part.
    """
    # A folder here is no model of the Hub, even if its name looks like one.
    is_hub_id = _HUB_ID.fullmatch(name) and not Path(name).exists()
    if is_hub_id:
        return {"base_id": name, "base": name}
    # Of a local path only the last part: the others tell who made the model, and where.
    return {"base_id": None, "base": Path(name).name or "a local model"}


def training_facts(trainer: Any) -> dict[str, Any]:
    """
    Facts about the training run so far, for a card of what it trained.

    Args:
        trainer: A trainer with `LowBitMixin`.

    Returns:
        Those of [`base_facts`], and `rewards` (empty without rewards), `objective`, `trainer` (TRL's name of it),
        `methods` (tags of what the trainer does), `samples` (whether the run had an engine), `aligned` (whether the
        learner ran on low-bit weights), `vision` (whether the model takes images), `kv_cache` (the dtype of the
        engine's keys and values, if the run set one), `steps`, `code` (versions), `cites_qarl`, `citation` (BibTeX of
        the paper of TRL's trainer, if it has one), and `teacher` (of a distillation).
    """
    args = trainer.args
    # TRL's own trainers on low-bit weights have papers of their own.
    is_qarl = trainer._name == "QaRL"
    paper = getattr(trainer, "_paper", None) or {}
    loss_type = getattr(args, "loss_type", None)
    return {
        **base_facts(base_model(trainer._unwrapped).config._name_or_path),
        "rewards": getattr(trainer, "reward_func_names", []),
        "objective": _objective(loss_type, trainer._name),
        "trainer": trainer._name,
        "methods": [tag for tag in trainer._tag_names if tag not in _TAGS_OF_LIBRARIES],
        "samples": args.has_engine,
        "aligned": args.quantize_learner,
        "vision": has_vision(base_model(trainer._unwrapped).config.to_dict()),
        "kv_cache": getattr(args, "kv_cache_dtype", None) if args.has_engine else None,
        "steps": trainer.state.global_step,
        "code": ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES),
        "cites_qarl": is_qarl and (args.quantized or loss_type == "tbpo"),
        "citation": None if is_qarl else paper.get("citation"),
        "teacher": _teacher(trainer),
    }


def has_vision(config: Mapping[str, Any]) -> bool:
    """
    Whether a model takes images.

    Args:
        config: Its config, as `config.json` has it.
    """
    return config.get("vision_config") is not None


def _teacher(trainer: Any) -> str | None:
    """The name of a distillation's teacher, or "itself"; `None` for other trainers."""
    if not hasattr(trainer, "teacher_model"):
        return None
    if getattr(trainer, "learns_from_itself", False):
        return "itself"

    name = base_model(trainer.accelerator.unwrap_model(trainer.teacher_model)).config._name_or_path
    return str(base_facts(name)["base"])


def _objective(loss_type: Any, name: str) -> str:
    """The loss in words: the trainer's name, if the loss has none of its own."""
    if loss_type == "tbpo":
        return "TBPO (trust-band policy optimization)"
    if isinstance(loss_type, list):  # DPO may sum several
        return " + ".join(loss_type)
    return loss_type or name
