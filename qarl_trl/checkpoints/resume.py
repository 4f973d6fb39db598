"""Choose and check the checkpoint to resume from, before a model loads."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.logging import get_logger
from compressed_tensors.quantization import QuantizationConfig
from torch import nn

from ..export.files import digest
from ..guards import on_first
from ..quant.names import base_model
from ..quant.scheme import describe_scheme
from .folder import INCOMING, damage, finished, read_manifest, steps
from .lock import holding


if TYPE_CHECKING:
    pass

# The files of a model's folder that determine its tokens, weights and outputs.
_MODEL = ("config.json", "tokenizer*", "vocab*", "chat_template*", "*.safetensors")
# Settings that change the meaning of a rollout or an update; and those that divide a rollout batch into micro-batches.
_MEANING = ("quantize_learner", "lora_base", "loss_type", "optim_muon", "world_size")
_ADAPTER = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "target_modules")
BATCH = ("steps_per_generation", "num_iterations", "per_device_train_batch_size")

logger = get_logger(__name__)


def resume_path(wish: str | bool | None, args: Any, identity: Mapping[str, Any] | None = None) -> str | None:
    """
    Return the checked checkpoint to resume from; the first process decides for all.

    `wish`: `True` or `"true"` means the newest complete one of `args.output_dir`; `"auto"` the same, or `None` if there is no
    checkpoint at all; a path means that checkpoint; `None` or `False` no checkpoint. It must match `identity` (see [`identity_of`]),
    if given. `ValueError` or `OSError` if it is missing, damaged, of another run, or cannot be resumed.
    """
    return on_first(args, lambda: _checked(_find(str(wish or "false"), Path(args.output_dir)), args, identity or {}))


def _find(wish: str, output_dir: Path) -> str | None:
    if wish.lower() == "false":
        return None
    if wish.lower() not in ("true", "auto"):
        if why := damage(Path(wish)):
            raise ValueError(f"resume_from_checkpoint={wish!r} is not a complete checkpoint of this trainer: {why}.")
        return wish
    _put_back(output_dir)
    bad = [f"{folder} ({why})" for folder in sorted(steps(output_dir)) if (why := damage(folder))]
    for found in bad:
        logger.warning("Skipped a damaged checkpoint, which stays where it is: %s.", found)
    if done := finished(output_dir):
        return str(done[-1])
    if bad:
        # A start from the beginning would overwrite checkpoints that a user may still repair.
        raise ValueError(f"{output_dir} has only damaged checkpoints. To start over, move them: {'; '.join(bad)}.")
    if wish.lower() == "true":
        raise ValueError(f"resume_from_checkpoint={wish} found no checkpoint in {output_dir}. Give a path, or 'auto'.")
    return None


def _put_back(output_dir: Path) -> None:
    """Restore a complete checkpoint that a kill left between the two renames of `commit`, unless a run is writing there."""
    for folder in output_dir.glob(f"{INCOMING}/checkpoint-*"):
        with suppress(ValueError), holding(output_dir):
            if not (output_dir / folder.name).exists() and damage(folder) is None:
                folder.rename(output_dir / folder.name)


def _checked(found: str | None, args: Any, identity: Mapping[str, Any]) -> str | None:
    if found is None:
        return None
    if args.sync_ref_model:
        raise ValueError("sync_ref_model=True cannot be resumed: its reference is in no checkpoint. Set it to False.")
    stored = read_manifest(Path(found))
    if "scheduler.pt" not in stored["files"] and args.deepspeed_plugin is None:
        raise ValueError(f"{found} has weights without the optimizer (save_only_model). Give it as the model.")
    for name, value in identity.items():
        if name != "model" and stored.get(name, value) != value:
            raise ValueError(
                f"{found} is a checkpoint of another run: {name} was {stored[name]!r} with the model {stored['model']!r}, and is "
                f"{value!r} with {identity['model']!r}. Start with what it was made from, or use another output_dir."
            )
    return found


def identity_of(
    model: str | nn.Module, args: Any, plan: QuantizationConfig | None, given: Mapping[str, Any]
) -> dict[str, Any]:
    """
    Facts that identify a run in its manifests, found before anything loads.

    `weights` is a digest of the model's files, because a folder may move, and another model may have its name and shapes. For a Hub
    model it is id and revision. With an adapter these are the base's. `given` are the trainer's arguments.
    """
    module = None if isinstance(model, str) else base_model(model)
    adapters = [given.get("peft_config"), *(getattr(model, "peft_config", None) or {}).values()]
    name: Any = model if module is None else module.config._name_or_path
    loading = args.model_init_kwargs or {}
    folder = Path(name, loading.get("subfolder") or "")
    weights = f"{name}@{loading.get('revision') or 'main'}"
    if name and folder.is_dir():
        weights = digest(sorted(path for kind in _MODEL for path in folder.glob(kind)))
    tokenizer = getattr(given.get("processing_class"), "tokenizer", given.get("processing_class"))
    tokens = tokenizer and [sorted(tokenizer.get_vocab().items()), tokenizer.eos_token, tokenizer.chat_template]
    layers = plan and {describe_scheme(group): group.targets for group in plan.config_groups.values()}
    return {
        "model": name,
        "weights": weights,
        "tokenizer": hashlib.sha256(repr(tokens).encode()).hexdigest()[:16] if tokens else "the model's",
        "scheme": f"{layers} without {plan.ignore}" if plan else "none",
        "adapter": [_adapter_facts(config) for config in adapters if config],
        **{field: getattr(args, field) for field in (*_MEANING, *BATCH)},
    }


def _adapter_facts(config: Any) -> dict[str, Any]:
    facts = ((name, getattr(config, name, None)) for name in _ADAPTER)
    return {name: sorted(value) if isinstance(value, set | tuple | list) else value for name, value in facts}
