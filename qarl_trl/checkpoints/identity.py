"""The facts by which a checkpoint is known as one of the same run: digests and names, as JSON stores them."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from compressed_tensors.quantization import QuantizationConfig
from torch import nn

from .._compat.sharding import sharding_of
from ..export.files import digest
from ..quant.names import adapter_configs, base_model
from ..quant.scheme import ROUTERS, describe_scheme
from .changes import compared_settings
from .models import (
    commit_of,
    config_fact,
    end_tokens_in,
    end_tokens_of,
    facts_beside,
    folder_of,
    loaded_base_fact,
    pickles_in,
    weights_fact,
)


# Settings of a LoRA adapter that change what its tensors mean.
_ADAPTER = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "target_modules")
# And those that choose among its layers. Most adapters have none.
_CHOICE_OF_LAYERS = ("layers_to_transform", "layers_pattern", "exclude_modules", "modules_to_save")
# And those that only a run without quantization may have. An initialization such as PiSSA's changes the base.
_WITHOUT_QUANTIZATION = (
    "init_lora_weights",
    "use_dora",
    "bias",
    "lora_bias",
    "lora_dropout",
    "alora_invocation_tokens",
)

# Patterns of routers in the default `quant_ignore` of earlier versions.
_EARLIER_ROUTERS = (
    r"re:.*mlp\.gate$",
    r"re:.*\.router$",
    r"re:.*mlp\.gate(\.wg)?$",
    r"re:.*\.router(\.gate)?$",
    r"re:.*\.router\.layer$",
)

# The entry of what a loaded model computes by.
CONFIG = "config_of_model"
# The entry of the weights below the adapters of a loaded model.
BASE = "loaded_base"
# The entry of the commit of a model of the Hub.
COMMIT = "commit"
# The entry of the workers that read a stream.
WORKERS = "workers_of_stream"
# The entry of the processes that make rows of several others, by packing or pairing them.
PACKERS = "processes_of_rows"
# Configs of TRL (1.16) without packing whose trainers make each row of one row.
_SINGLY = ("DPOConfig", "CPOConfig", "ORPOConfig", "RewardConfig")
# The entry of the tokenizer that a script gave.
TOKENIZER = "tokenizer"
# The entry of the training set that a script has put in place of that of the arguments, known in `train`.
REPLACED_DATA = "replaced_data"
# The entry of the settings of the run, by name.
SETTINGS = "settings"
# The entry of the reward functions among them. It is in no config.
REWARDS = "reward_funcs"
# Arguments of a trainer with rewards that decide what the policy is asked and answers. They are in no config, either.
_OF_ROLLOUTS = ("rollout_func", "tools", "environment_factory")
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
        TOKENIZER: _tokenizer_fact(trainer_arguments.get("processing_class"), args),
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
    commit = commit_of(model, args.model_init_kwargs)
    if commit is not None:
        facts[COMMIT] = commit
    template = Path(getattr(args, "chat_template_path", None) or "")
    if template.is_file():
        # The name of the file is a setting.
        facts["chat_template"] = digest([template])
    if not has_rewards and _is_stream(trainer_arguments.get("train_dataset")):
        # Each worker reads shards of its own. TRL's trainers with rewards take none for a stream.
        facts[WORKERS] = args.dataloader_num_workers
    elif hasattr(args, "dataset_num_proc") and not _makes_rows_singly(args):
        # Each takes a part of the data.
        facts[PACKERS] = args.dataset_num_proc or 1
    pickles = pickles_in(folder_of(name, args.model_init_kwargs))
    if pickles:
        facts["pickled_weights"] = digest(pickles)
    if not isinstance(model, str):
        # What a script has changed since it loaded the model is in no file of its start.
        facts[CONFIG] = config_fact(base_model(model).config)
        if has_rewards:
            facts["end_tokens_of_model"] = end_tokens_of(model, args, trainer_arguments.get("processing_class"))
    end_tokens = end_tokens_in(folder_of(name, args.model_init_kwargs))
    # A trainer without rewards is given its answers.
    if has_rewards and end_tokens is not None:
        facts["end_tokens"] = end_tokens
    if trainer is not None:
        facts["trainer"] = trainer
    if adapters and not isinstance(model, str):
        facts[BASE] = loaded_base_fact(model)
    facts["quantization_config"] = _quantization_fact(trainer_arguments.get("quantization_config"))
    return facts | facts_beside(args, trainer_arguments)


def facts_of_loaded(model: nn.Module, facts: Mapping[str, Any]) -> dict[str, Any]:
    """
    The facts of a model that a trainer has loaded by its name. A script may load the same one, and change it.

    Args:
        model: The model, as it was loaded.
        facts: Those of [`identity_of`].

    Returns:
        Facts by name, which a run with a loaded model has from the start.
    """
    loaded: dict[str, Any] = {CONFIG: config_fact(base_model(model).config)}
    # ZeRO-3 divides weights while they load.
    is_divided = any(hasattr(parameter, "ds_id") for parameter in model.parameters())
    if facts["adapter"] and not is_divided:
        loaded[BASE] = loaded_base_fact(model)
    return loaded


def _quantization_fact(config: Any) -> str:
    """How bitsandbytes or another library quantizes the model of a name, in words."""
    if config is None:
        return "none"
    settings = config.to_dict() if hasattr(config, "to_dict") else config
    return json.dumps(settings, default=str, sort_keys=True)


def _makes_rows_singly(args: Any) -> bool:
    """Whether a trainer surely makes each row of its data of one row, whatever the number of processes."""
    if hasattr(args, "packing"):
        return not args.packing
    return any(config.__name__ in _SINGLY for config in type(args).__mro__)


def _is_stream(data: Any) -> bool:
    """Whether a training set is read as a stream."""
    from datasets import IterableDataset  # takes a second, and `--dry_run` needs none of it

    return isinstance(data, IterableDataset)


def _tokenizer_fact(processing_class: Any, args: Any) -> str:
    """
    A digest of the tokenizer among the trainer's arguments, if there is one.

    TRL writes what the settings say into it, where a second trainer of a script finds it. The settings are compared by
    themselves.
    """
    # A processor for images has a tokenizer inside.
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if not tokenizer:
        return "the model's"

    vocabulary = tokenizer.get_vocab()
    end_token = getattr(args, "eos_token", None) or tokenizer.eos_token
    template = tokenizer.chat_template
    path = getattr(args, "chat_template_path", None)
    if path:
        template = None
    if path and not Path(path).is_file():
        # Of another model, whose end token and added tokens come with its template.
        end_token = None
        added = tokenizer.get_added_vocab()
        vocabulary = {token: index for token, index in vocabulary.items() if token not in added}

    content = [sorted(vocabulary.items()), end_token, template]
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


def replaced_data_fact(data: Any) -> str:
    """What identifies a training set that a script has put in place of that of the trainer's arguments."""
    return f"{_data_fact(data)}, shown through {_transform_fact(data)}"


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
    from datasets import Dataset  # late, as elsewhere in this module

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


def same_scheme(fact: str, other: str) -> bool:
    """
    Whether two facts of [`scheme_fact`] are one. Patterns of routers do not count: routers stay in high precision, and
    earlier versions had other patterns for them.
    """
    return _without_routers(fact) == _without_routers(other)


def _without_routers(fact: str) -> str:
    layers, separator, ignored = fact.rpartition(" without ")
    if not separator or ignored == "None":
        return fact
    others = [pattern for pattern in ast.literal_eval(ignored) if pattern not in (*ROUTERS, *_EARLIER_ROUTERS)]
    return f"{layers}{separator}{others}"


def _facts_of_adapter(config: Any) -> dict[str, Any]:
    """The settings of an adapter that change what its tensors mean."""
    facts: dict[str, Any] = {}
    for name in (*_ADAPTER, *_CHOICE_OF_LAYERS, *_WITHOUT_QUANTIZATION):
        value = getattr(config, name, None)
        # peft keeps names of modules in a set, whose order changes from process to process.
        if isinstance(value, set | tuple | list):
            value = sorted(value)
        # Only if it is set: 0 is the first layer.
        if name in _ADAPTER or value not in (None, []):
            facts[name] = value
    return facts
