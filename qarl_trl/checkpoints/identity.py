"""The facts by which a checkpoint is known as one of the same run: digests and names, as JSON stores them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationConfig
from torch import nn
from transformers import AutoTokenizer, PretrainedConfig
from transformers.utils.hub import cached_file, extract_commit_hash

from .._compat.sharding import sharding_of
from ..export.files import digest
from ..quant.digest import with_low_bits
from ..quant.names import OF_THE_HUB, adapter_configs, base_model, computed_by
from ..quant.scheme import describe_scheme
from .changes import compared_settings


# The files of a model's folder that determine its tokens, weights and outputs.
_MODEL = ("config.json", "tokenizer*", "vocab*", "chat_template*", "*.safetensors")
# transformers reads these where there is no safetensors.
_PICKLES = "pytorch_model*.bin"
# Settings of a LoRA adapter that change what its tensors mean.
_ADAPTER = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "target_modules")
# And those that choose among its layers. Most adapters have none.
_CHOICE_OF_LAYERS = ("layers_to_transform", "layers_pattern", "exclude_modules", "modules_to_save")

# The entry of what a loaded model computes by.
CONFIG = "config_of_model"
# The entry of the commit of a model of the Hub.
COMMIT = "commit"
# The entry of the workers that read a stream.
WORKERS = "workers_of_stream"
# The entry of the settings of the run, by name.
SETTINGS = "settings"
# The entry of the reward functions among them. It is in no config.
REWARDS = "reward_funcs"
# Arguments of a trainer with rewards that decide what the policy is asked and answers. They are in no config, either.
_OF_ROLLOUTS = ("rollout_func", "tools", "environment_factory")
# About so many numbers of each loaded weight are compared.
_SAMPLES = 256
# Rows of a data set that are read at once.
_ROWS = 1000


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
    # An environment may bring the reward, and the problems too.
    has_rewards = any(trainer_arguments.get(argument) is not None for argument in (REWARDS, *_OF_ROLLOUTS))
    if has_rewards:
        for argument in (REWARDS, *_OF_ROLLOUTS):
            settings[argument] = _names_of(trainer_arguments.get(argument) or [])

    facts = {
        "model": name,
        "weights": weights_fact(name, args.model_init_kwargs),
        "tokenizer": _tokenizer_fact(trainer_arguments.get("processing_class")),
        "scheme": scheme_fact(plan),
        "adapter": [_facts_of_adapter(config) for config in adapters],
        "data": _data_fact(trainer_arguments.get("train_dataset")),
        "transform": _transform_fact(trainer_arguments.get("train_dataset")),
        # `accelerate launch` compiles without a field.
        "compiled": getattr(args, "compiles", False),
        "world_size": args.world_size,
        "sharding": sharding_of(args),
        SETTINGS: settings,
    }
    commit = _commit_of(model, args.model_init_kwargs)
    if commit is not None:
        facts[COMMIT] = commit
    template = Path(getattr(args, "chat_template_path", None) or "")
    if template.is_file():
        # The name of the file is a setting.
        facts["chat_template"] = digest([template])
    if not has_rewards and not _has_length(trainer_arguments.get("train_dataset")):
        # Each worker reads shards of its own. TRL's trainers with rewards take none for a stream.
        facts[WORKERS] = args.dataloader_num_workers
    pickles = _pickles(_folder(name, args.model_init_kwargs))
    if pickles:
        facts["pickled_weights"] = digest(pickles)
    if not isinstance(model, str):
        # What a script has changed since it loaded the model is in no file of its start.
        facts[CONFIG] = _config_fact(base_model(model).config)
        if has_rewards:
            facts["end_tokens_of_model"] = _end_tokens_of(model, args, trainer_arguments.get("processing_class"))
    end_tokens = _end_tokens(_folder(name, args.model_init_kwargs))
    # A trainer without rewards is given its answers.
    if has_rewards and end_tokens is not None:
        facts["end_tokens"] = end_tokens
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
    # Its name is a setting. Another model may have that since.
    name_of_teacher = getattr(args, "teacher_model_name_or_path", None) or ""
    loading_of_teacher = getattr(args, "teacher_model_init_kwargs", None)
    if _folder(name_of_teacher, loading_of_teacher) is not None:
        facts["teacher_files"] = weights_fact(name_of_teacher, loading_of_teacher)
    elif name_of_teacher:
        revision = {"revision": getattr(args, "teacher_model_revision", None)}
        commit_of_teacher = _commit_of(name_of_teacher, revision | (loading_of_teacher or {}))
        if commit_of_teacher is not None:
            facts["teacher_commit"] = commit_of_teacher
    reward_models = _reward_models(trainer_arguments.get(REWARDS))
    if reward_models:
        facts["reward_models"] = reward_models
    reward_commits = _commits_of_rewards(trainer_arguments.get(REWARDS))
    # Without a connection nothing tells.
    if reward_commits and None not in reward_commits:
        facts["reward_commits"] = reward_commits
    return facts


def _folder(name: str, loading: Mapping[str, Any] | None) -> Path | None:
    """
    The folder of a local model; `None` for one of the Hub and for a model without a name.

    Args:
        name: The model's name.
        loading: The arguments by which it loads.
    """
    folder = Path(name, (loading or {}).get("subfolder") or "")
    return folder if name and folder.is_dir() else None


def weights_fact(name: str, loading: Mapping[str, Any] | None) -> str:
    """
    A digest of the files of a local model; for a Hub model its id and revision.

    The name alone is not enough: another model may have it, and the same shapes.

    Args:
        name: The model's name.
        loading: The arguments by which it loads.
    """
    folder = _folder(name, loading)
    if folder is None:
        return f"{name}@{(loading or {}).get('revision') or 'main'}"

    files: list[Path] = []
    for pattern in _MODEL:
        files.extend(folder.glob(pattern))
    return digest(sorted(files))


def _commit_of(model: str | nn.Module, loading: Mapping[str, Any] | None) -> str | None:
    """
    The commit of a model of the Hub, whose branch may move; `None` for a folder, and where nothing tells.

    Args:
        model: The model, or its name.
        loading: The arguments by which a name loads.
    """
    if isinstance(model, nn.Module):
        return getattr(base_model(model).config, "_commit_hash", None)
    if not model or Path(model).is_dir():
        return None

    places = {name: value for name, value in (loading or {}).items() if name in (*OF_THE_HUB, "subfolder") and value}
    # Loading says what is wrong with it.
    with suppress(OSError, ValueError):
        return extract_commit_hash(cached_file(model, "config.json", **places), None)
    return None


def _has_length(data: Any) -> bool:
    """Whether a training set is no stream."""
    from datasets import IterableDataset  # takes a second, and `--dry_run` needs none of it

    return not isinstance(data, IterableDataset)


def _reward_models(functions: Any) -> list[str]:
    """Digests of the reward models that are folders or were loaded by a script, in their order."""
    several = functions if isinstance(functions, list | tuple) else [functions]
    digests = []
    for function in several:
        if isinstance(function, nn.Module):
            digests.append(_weights_beside(function))
        elif isinstance(function, str) and Path(function).is_dir():
            digests.append(weights_fact(function, None))
    return digests


def _commits_of_rewards(functions: Any) -> list[str | None]:
    """The commits of the reward models of the Hub, in their order."""
    several = functions if isinstance(functions, list | tuple) else [functions]
    names = [name for name in several if isinstance(name, str) and not Path(name).is_dir()]
    return [_commit_of(name, None) for name in names]


def _pickles(folder: Path | None) -> list[Path]:
    """The weights of a model that has no safetensors; empty for any other."""
    if folder is None or any(folder.glob("*.safetensors")):
        return []
    return sorted(folder.glob(_PICKLES))


def _end_tokens(folder: Path | None) -> list[int] | None:
    """
    The tokens that end an answer of a local model; `None` for one of the Hub.

    The other fields of `generation_config.json` do not count: TRL samples by its own settings, and a user may change
    them to serve the model.
    """
    if folder is None:
        return None
    file = folder / "generation_config.json"
    if not file.is_file():
        # From which transformers makes one.
        file = folder / "config.json"
    if not file.is_file():
        return None
    return _as_list(json.loads(file.read_text()).get("eos_token_id"))


def _as_list(tokens: int | Sequence[int] | None) -> list[int]:
    """Token ids in order; transformers has one, several or none."""
    if isinstance(tokens, int):
        return [tokens]
    return sorted(tokens or [])


def _end_tokens_of(model: nn.Module, args: Any, processing_class: Any) -> list[int]:
    """The tokens that end an answer of a loaded model for TRL: its own, and that of the tokenizer."""
    loaded: Any = base_model(model)
    # One that was made and not loaded has none.
    generation = getattr(loaded, "generation_config", None)
    tokens = set(_as_list(getattr(generation, "eos_token_id", None)))

    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    name = loaded.config._name_or_path
    if not tokenizer and name:
        trust = getattr(args, "trust_remote_code", False)
        with suppress(OSError, ValueError):  # TRL says what is wrong with it
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust)
    if tokenizer:
        # The Trainer writes it into the model, where a second trainer of a script would find it.
        tokens.add(tokenizer.eos_token_id)
    return sorted(tokens - {None})


def _config_fact(config: PretrainedConfig) -> dict[str, Any]:
    """What a loaded model computes by, without what an earlier trainer of the script has changed."""
    attention = config._attn_implementation or ""
    # In place of sdpa alone.
    if attention.startswith("qarl_"):
        attention = "sdpa"
    entries = computed_by(config.to_dict()) | {"attention": attention}
    return json.loads(json.dumps(entries, default=str, sort_keys=True))


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
    # A frozen base is in no `state_dict`.
    low_bits = with_low_bits(content, model)
    if low_bits != content:
        return low_bits[:16]
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


def _names_of(functions: Any) -> list[str]:
    """
    The names of functions of a script, in their order.

    Args:
        functions: One or several; reward models or their names, too; TRL takes several environments by name.
    """
    if isinstance(functions, Mapping):
        # Rows choose among them by name, in whatever order they are.
        return [f"{name}: {_name_of(function)}" for name, function in sorted(functions.items())]
    several = functions if isinstance(functions, list | tuple) else [functions]
    return [_name_of(function) for function in several]


def _name_of(function: Any) -> str:
    """Module and qualified name of a function; the name of a reward model."""
    if isinstance(function, nn.Module):
        config: Any = function.config
        function = config._name_or_path
    if isinstance(function, str):
        # A folder may move.
        return Path(function).name if Path(function).is_dir() else function

    while isinstance(function, partial):
        function = function.func
    # An object that can be called has the name of its class.
    named = function if hasattr(function, "__qualname__") else type(function)
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


def _transform_fact(data: Any) -> str:
    """The name of the function through which a training set shows its rows (`set_transform`)."""
    from datasets import Dataset  # as below

    if not isinstance(data, Dataset) or data.format["type"] != "custom":
        return "none"
    return _name_of(data.format["format_kwargs"]["transform"])


def scheme_fact(plan: QuantizationConfig | None) -> str:
    """The schemes in words, with the layers of each, and the layers that stay in high precision."""
    if not plan:
        return "none"
    layers: dict[str, list[str]] = {}
    for group in plan.config_groups.values():
        # Two groups may have one scheme.
        layers.setdefault(describe_scheme(group), []).extend(group.targets)
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


def without_choice_of_layers(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of an adapter, as earlier versions wrote them."""
    return {name: value for name, value in facts.items() if name in _ADAPTER}
