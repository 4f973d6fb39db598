"""Choose and check the checkpoint to resume from, before a model loads."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from compressed_tensors.quantization import QuantizationConfig
from torch import nn

from ..export.files import digest
from ..guards import on_first
from ..quant.names import adapter_configs, base_model
from ..quant.scheme import describe_scheme
from .changes import Change, changes, compared_settings, refuses
from .folder import INCOMING, REPLACED, checkpoint_folders, damage, finished, read_manifest
from .lock import holding


# The files of a model's folder that determine its tokens, weights and outputs.
_MODEL = ("config.json", "tokenizer*", "vocab*", "chat_template*", "*.safetensors")
# Settings of a LoRA adapter that change what its tensors mean.
_ADAPTER = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "target_modules")
# And those that choose among its layers. Most adapters have none.
_CHOICE_OF_LAYERS = ("layers_to_transform", "layers_pattern", "exclude_modules", "modules_to_save")

# Entries of a manifest: the settings of its run by name, and whether it was saved within a rollout batch.
SETTINGS = "settings"
WITHIN_BATCH = "within_rollout_batch"
# The parameters that the optimizer trains, known only when the run has one.
TRAINED = "trained"
# What the optimizer began with.
MADE = "optimizer_began_with"
# The entry of the reward functions among the settings. It is in no config.
REWARDS = "reward_funcs"
# Entries of the loaded models beside the policy, with which it is compared: digests of their weights.
_BESIDE = ("reference", "loaded_teacher")
# About so many numbers of each loaded weight are compared.
_SAMPLES = 256
# Rows of a data set that are read at once.
_ROWS = 1000

logger = get_logger(__name__)


def resume_path(wish: str | bool | None, args: Any, identity: Mapping[str, Any] | None = None) -> str | None:
    """
    Choose the checkpoint to resume from, and check it. The first process decides for all.

    Args:
        wish: `True` or `"true"`: the newest complete checkpoint of `args.output_dir`. `"auto"`: the same, or none if
            there is no checkpoint at all. A path: that checkpoint. `None` or `False`: none.
        args: Settings of the run.
        identity: Facts that the checkpoint must match, from [`identity_of`]; `None` compares nothing.

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
        goes_on = checkpoint is not None and Path(checkpoint).resolve().parent == output_dir.resolve()
        if not present or goes_on:
            return

        if checkpoint is None:
            continues = "resume_from_checkpoint: auto continues that run"
        else:
            continues = f"resume_from_checkpoint: {output_dir / present[-1]} continues that run"
        raise ValueError(
            f"output_dir={str(output_dir)!r} holds checkpoints of an earlier run ({', '.join(present[:3])}), which "
            f"this one would overwrite or delete: {continues}; another output_dir, or moving them, starts a new one."
        )

    on_first(args, check)


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
    """Move a complete checkpoint to its place, if a kill or an error came between the two renames of `commit`."""
    # The new one first. The one that it replaces returns only if nothing has its place.
    for place_of_others in (INCOMING, REPLACED):
        for folder in output_dir.glob(f"{place_of_others}/checkpoint-*"):
            place = output_dir / folder.name
            # `holding` raises `ValueError` while another run holds the output folder. The checkpoint is then that
            # run's.
            with suppress(ValueError), holding(output_dir):
                if not place.exists() and damage(folder) is None:
                    folder.rename(place)


def _damaged(output_dir: Path) -> list[str]:
    """Damaged checkpoints of an output folder, each with the reason."""
    reasons = {folder: damage(folder) for folder in sorted(checkpoint_folders(output_dir))}
    return [f"{folder} ({reason})" for folder, reason in reasons.items() if reason]


def _check(checkpoint: str, args: Any, identity: Mapping[str, Any]) -> None:
    """Refuse (`ValueError`) a checkpoint of another run, and one that no run can continue exactly."""
    # Not every trainer of TRL has a reference model that follows the policy.
    if getattr(args, "sync_ref_model", False):
        raise ValueError("sync_ref_model=True cannot be resumed: its reference is in no checkpoint. Set it to False.")
    # transformers saves a dummy in place of an optimizer for each layer, and AdaLomo keeps its moments to itself.
    optimizer = getattr(args.optim, "value", args.optim)
    if optimizer.endswith("_layerwise") or optimizer == "adalomo":
        raise ValueError(
            f"optim={optimizer!r} cannot be resumed: its state is in no checkpoint. Start a new run with the "
            "checkpoint as the model, or use another optimizer."
        )

    stored = read_manifest(Path(checkpoint))
    # DeepSpeed keeps the scheduler in files of its own.
    if "scheduler.pt" not in stored["files"] and args.deepspeed_plugin is None:
        raise ValueError(f"{checkpoint} has weights without the optimizer (save_only_model). Give it as the model.")

    for name in identity:
        # The name may differ, because a model's folder may move. The digest of its weights is compared instead.
        if name not in ("model", SETTINGS, *_BESIDE):
            _check_fact(name, checkpoint, stored, identity)

    for change in changed_settings(checkpoint, identity):
        reason = refuses(change, stored.get(WITHIN_BATCH, False), args.deepspeed_plugin is not None)
        if reason is not None:
            raise ValueError(
                f"{checkpoint} is a checkpoint of another run: {change.name} was {change.before!r} there, and is "
                f"{change.now!r}. {reason} Set it back, or start a new run with the checkpoint as the model."
            )
    # Last: the name of a teacher is a setting, and says more than its digest.
    for name in _BESIDE:
        if name in identity:
            _check_fact(name, checkpoint, stored, identity)


def _check_fact(name: str, checkpoint: str, stored: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Refuse (`ValueError`) a checkpoint whose run had another value of a fact. Earlier versions wrote fewer facts."""
    value = identity[name]
    # They left this choice out of the adapter, also where there was one.
    if name == "adapter" and TRAINED not in stored:
        value = [_without_choice_of_layers(facts) for facts in value]
    if stored.get(name, value) != value:
        raise ValueError(
            f"{checkpoint} is a checkpoint of another run: "
            f"{name} was {stored[name]!r} with the model {stored['model']!r}, "
            f"and is {value!r} with {identity['model']!r}. "
            "Start with what it was made from, or use another output_dir."
        )


def changed_settings(checkpoint: str | Path, identity: Mapping[str, Any]) -> list[Change]:
    """
    The settings that differ between a checkpoint and a run.

    Args:
        checkpoint: The checkpoint's folder.
        identity: Facts of the run, from [`identity_of`].
    """
    stored = read_manifest(Path(checkpoint))
    return list(changes(stored.get(SETTINGS, {}), identity.get(SETTINGS, {})))


def identity_of(
    model: str | nn.Module,
    args: Any,
    plan: QuantizationConfig | None,
    trainer_arguments: Mapping[str, Any],
    trainer: str | None = None,
) -> dict[str, Any]:
    """
    Collect the facts that identify a run in its manifests, before anything loads.

    Args:
        model: The trainer's model, or its name. For a `PeftModel` the name is that of its base, and its adapters are
            further facts.
        args: Settings of the run.
        plan: Which layers are quantized, and how; `None` without quantization.
        trainer_arguments: All arguments of the trainer by name.
        trainer: The name of TRL's trainer, which decides the loss.

    Returns:
        Facts by name, as JSON stores them. Among them are the settings of the run, see [`compared_settings`].
    """
    name: Any = model if isinstance(model, str) else base_model(model).config._name_or_path
    adapters = adapter_configs(model, trainer_arguments.get("peft_config"))
    settings = compared_settings(args)
    if not isinstance(model, str) and "model_init_kwargs" in settings:
        # It was loaded before, with a dtype that the settings do not say.
        settings["model_init_kwargs"]["dtype"] = str(next(model.parameters()).dtype).removeprefix("torch.")
    if trainer_arguments.get("reward_funcs") is not None:
        settings[REWARDS] = _names_of_rewards(trainer_arguments["reward_funcs"])

    facts = {
        "model": name,
        "weights": _weights_fact(name, args),
        "tokenizer": _tokenizer_fact(trainer_arguments.get("processing_class")),
        "scheme": _scheme_fact(plan),
        "adapter": [_facts_of_adapter(config) for config in adapters],
        "data": _data_fact(trainer_arguments.get("train_dataset")),
        "world_size": args.world_size,
        SETTINGS: settings,
    }
    if trainer is not None:
        facts["trainer"] = trainer
    if adapters and not isinstance(model, str):
        facts["loaded_base"] = _loaded_base_fact(model)
    # No checkpoint has what the policy is compared with. A name is a setting of the run, or that of the model.
    reference = trainer_arguments.get("ref_model")
    facts["reference"] = _weights_beside(reference) if isinstance(reference, nn.Module) else "not loaded by the script"
    teacher = trainer_arguments.get("teacher_model")
    if isinstance(teacher, nn.Module):
        facts["loaded_teacher"] = _weights_beside(teacher)
    return facts


def _weights_fact(name: str, args: Any) -> str:
    """
    A digest of the files of a local model; for a Hub model its id and revision.

    The name alone is not enough: another model may have it, and the same shapes.
    """
    loading = args.model_init_kwargs or {}
    folder = Path(name, loading.get("subfolder") or "")
    if not (name and folder.is_dir()):
        return f"{name}@{loading.get('revision') or 'main'}"

    files: list[Path] = []
    for pattern in _MODEL:
        files.extend(folder.glob(pattern))
    return digest(sorted(files))


def _loaded_base_fact(model: nn.Module) -> str:
    """
    A digest of the weights below the adapters of a loaded model, which no checkpoint has.

    Their file is not enough: a script may have merged an adapter of an earlier stage into them.
    """
    # Those of the adapters, and copies that are trained in place of a module, are in the checkpoint.
    return _weights_of(base_model(model), without=("lora_", "modules_to_save."))


def _weights_of(model: nn.Module, without: tuple[str, ...] = ()) -> str:
    """
    A digest of the weights of a loaded model.

    Args:
        model: The model.
        without: Parts of the names of parameters that do not count.
    """
    content = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if any(part in name for part in without):
            continue
        for tensor in _plain_tensors(parameter.detach()):
            content.update(_sample(tensor))
    return content.hexdigest()[:16]


def _weights_beside(model: nn.Module) -> str:
    """A digest of a loaded model beside the policy. Quantized by GPTQ or AWQ, its weights are buffers."""
    content = _weights_of(model)
    buffers = dict(model.named_buffers())
    # Others are computed, such as the angles of positions.
    stored = [tensor for name, tensor in model.state_dict().items() if name in buffers]
    if not stored:
        return content
    return hashlib.sha256(content.encode() + b"".join(map(_sample, stored))).hexdigest()[:16]


def _plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """What a tensor is made of: of a shard this process's part, of a tensor of torchao numbers and scales."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    parts: list[torch.Tensor] = []
    for part in [getattr(tensor, name) for name in names]:
        # A shard also has its mesh.
        if isinstance(part, torch.Tensor):
            parts.extend(_plain_tensors(part))
    return parts


def _sample(tensor: torch.Tensor) -> bytes:
    """Some numbers of a tensor: any training changes them."""
    # accelerate keeps it on the disk, or in a place of its own in the CPU's memory (`device_map`).
    if tensor.is_meta:
        return repr(tuple(tensor.shape)).encode()
    values = tensor.flatten()
    sample = values[:: max(1, len(values) // _SAMPLES)].float().cpu()
    return sample.numpy().tobytes()


def _tokenizer_fact(processing_class: Any) -> str:
    """A digest of the tokenizer among the trainer's arguments, if there is one."""
    # A processor for images has a tokenizer inside.
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if not tokenizer:
        return "the model's"

    content = [sorted(tokenizer.get_vocab().items()), tokenizer.eos_token, tokenizer.chat_template]
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


def _names_of_rewards(rewards: Any) -> list[str]:
    """
    The names of reward functions, in their order.

    Args:
        rewards: One or several functions, reward models or their names.
    """
    several = rewards if isinstance(rewards, list | tuple) else [rewards]
    return [_name_of_reward(reward) for reward in several]


def _name_of_reward(reward: Any) -> str:
    """Module and qualified name of a function; the name of a reward model."""
    if isinstance(reward, nn.Module):
        config: Any = reward.config
        reward = config._name_or_path
    if isinstance(reward, str):
        # A folder may move.
        return Path(reward).name if Path(reward).is_dir() else reward

    while isinstance(reward, partial):
        reward = reward.func
    # An object that can be called has the name of its class.
    named = reward if hasattr(reward, "__qualname__") else type(reward)
    return f"{named.__module__}.{named.__qualname__}"


def _data_fact(data: Any) -> str:
    """A digest of the rows of the training set. A streamed one can be read only once, so its rows are not compared."""
    from datasets import Dataset  # takes a second, and `--dry_run` needs none of it

    if not isinstance(data, Dataset):
        return type(data).__name__

    content = hashlib.sha256()
    # As arrow has them: images are not decoded.
    for rows in data.with_format("arrow").iter(_ROWS):
        content.update(repr(rows.to_pylist()).encode())
    return f"{len(data)} rows, {content.hexdigest()[:16]}"


def _scheme_fact(plan: QuantizationConfig | None) -> str:
    """The schemes in words, with the layers of each, and the layers that stay in high precision."""
    if not plan:
        return "none"
    layers = {describe_scheme(group): group.targets for group in plan.config_groups.values()}
    return f"{layers} without {plan.ignore}"


def _facts_of_adapter(config: Any) -> dict[str, Any]:
    """The settings of an adapter that change what its tensors mean."""
    facts: dict[str, Any] = {}
    for name in (*_ADAPTER, *_CHOICE_OF_LAYERS):
        value = getattr(config, name, None)
        # peft keeps names of modules in a set, whose order changes from process to process.
        if isinstance(value, set | tuple | list):
            value = sorted(value)
        # Only if it is set: 0 is the first layer.
        if name in _ADAPTER or value not in (None, []):
            facts[name] = value
    return facts


def _without_choice_of_layers(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of an adapter, as earlier versions wrote them."""
    return {name: value for name, value in facts.items() if name in _ADAPTER}
