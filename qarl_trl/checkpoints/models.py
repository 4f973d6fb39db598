"""The facts of the models of a run, in files, on the Hub and in memory: digests and commits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer, PretrainedConfig
from transformers.utils.hub import cached_file, extract_commit_hash

from ..export.files import digest
from ..quant.digest import with_low_bits
from ..quant.names import OF_THE_HUB, base_model, computed_by


# The files of a model's folder that determine its tokens, weights and outputs.
_MODEL = ("config.json", "tokenizer*", "vocab*", "chat_template*", "*.safetensors")
# transformers reads these where there is no safetensors.
_PICKLES = "pytorch_model*.bin"
# About so many numbers of each loaded weight are compared.
_SAMPLES = 256


def facts_beside(args: Any, trainer_arguments: Mapping[str, Any]) -> dict[str, Any]:
    """
    The facts of the models beside the policy, which no checkpoint has: reference, teacher and reward models.

    Args:
        args: Settings of the run.
        trainer_arguments: All arguments of the trainer by name.
    """
    facts: dict[str, Any] = {}
    # A name is a setting of the run, or that of the model.
    reference = trainer_arguments.get("ref_model")
    facts["reference"] = _weights_beside(reference) if isinstance(reference, nn.Module) else "not loaded by the script"

    teacher = trainer_arguments.get("teacher_model")
    if isinstance(teacher, nn.Module):
        facts["loaded_teacher"] = _weights_beside(teacher)
    # Its name is a setting. Another model may have that since.
    name = getattr(args, "teacher_model_name_or_path", None) or ""
    loading = {"revision": getattr(args, "teacher_model_revision", None)}
    loading |= getattr(args, "teacher_model_init_kwargs", None) or {}
    if folder_of(name, loading) is not None:
        facts["teacher_files"] = weights_fact(name, loading)
    commit = commit_of(name, loading)
    if commit is not None:
        facts["teacher_commit"] = commit

    functions = trainer_arguments.get("reward_funcs")
    reward_models = _reward_models(functions)
    if reward_models:
        facts["reward_models"] = reward_models
    commits = _commits_of_rewards(functions)
    # Without a connection nothing tells.
    if commits and None not in commits:
        facts["reward_commits"] = commits
    return facts


def folder_of(name: str, loading: Mapping[str, Any] | None) -> Path | None:
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
    folder = folder_of(name, loading)
    if folder is None:
        return f"{name}@{(loading or {}).get('revision') or 'main'}"

    files: list[Path] = []
    for pattern in _MODEL:
        files.extend(folder.glob(pattern))
    return digest(sorted(files))


def commit_of(model: str | nn.Module, loading: Mapping[str, Any] | None) -> str | None:
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
    return [commit_of(name, None) for name in names]


def pickles_in(folder: Path | None) -> list[Path]:
    """
    Find the weights of a model that has no safetensors.

    Args:
        folder: The model's folder, if it has one.

    Returns:
        The files; none for any other model.
    """
    if folder is None or any(folder.glob("*.safetensors")):
        return []
    return sorted(folder.glob(_PICKLES))


def end_tokens_in(folder: Path | None) -> list[int] | None:
    """
    Read the tokens that end an answer of a local model.

    The other fields of `generation_config.json` do not count: TRL samples by its own settings, and a user may change
    them to serve the model.

    Args:
        folder: The model's folder; `None` for one of the Hub.

    Returns:
        Their ids in order; `None` without a folder, or without a file that says them.
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


def end_tokens_of(model: nn.Module, args: Any, processing_class: Any) -> list[int]:
    """
    Find the tokens that end an answer of a loaded model for TRL: its own, and that of the tokenizer.

    Args:
        model: The model.
        args: Settings of the run.
        processing_class: The trainer's tokenizer or processor; without one that of the model's name is read.

    Returns:
        Their ids in order.
    """
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


def config_fact(config: PretrainedConfig) -> dict[str, Any]:
    """
    Find what a loaded model computes by, without what an earlier trainer of the script has changed.

    Args:
        config: Its config.

    Returns:
        Entries by name, as JSON stores them.
    """
    attention = config._attn_implementation or ""
    # In place of sdpa alone.
    if attention.startswith("qarl_"):
        attention = "sdpa"
    entries = computed_by(config.to_dict()) | {"attention": attention}
    return json.loads(json.dumps(entries, default=str, sort_keys=True))


def loaded_base_fact(model: nn.Module) -> str:
    """
    Compute a digest of the weights below the adapters of a loaded model, which no checkpoint has.

    Their file is not enough: a script may have merged an adapter of an earlier stage into them.

    Args:
        model: The model, which may be a `PeftModel`.
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
    # For most matrices only the first column (see `quant.samples.sample`). Another choice would change the digests of
    # earlier checkpoints.
    values = tensor.flatten()
    sample = values[:: max(1, len(values) // _SAMPLES)].float().cpu()
    return sample.numpy().tobytes()
