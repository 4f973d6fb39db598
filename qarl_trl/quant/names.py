"""What a checkpoint calls modules and parameters, which class a config names, which adapters a model has."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import accelerate.utils
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightRenaming


# Entries of a config that say where a model is from, how it is stored, or what its trainer decides. What a model
# computes does not depend on them.
NOT_COMPUTED_BY = {
    *("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "quantization_config"),
    *("use_cache", "output_attentions", "output_hidden_states", "return_dict", "problem_type", "id2label", "label2id"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "output_router_logits", "router_aux_loss_coef"),
}


# Arguments of `from_pretrained` that say where the files of a model are.
OF_THE_HUB = ("revision", "token", "cache_dir", "local_files_only")


def computed_by(values: Mapping[str, Any]) -> dict[str, Any]:
    """
    The entries of a model's config, and of its parts, that change what it computes.

    Args:
        values: The config as a dictionary.
    """
    kept = {}
    for name, value in values.items():
        # `untie` writes the last.
        if name not in NOT_COMPUTED_BY and name != "tie_word_embeddings":
            kept[name] = computed_by(value) if isinstance(value, Mapping) else value
    return kept


def plain_name(name: str) -> str:
    """A parameter's or module's name without the part that activation checkpointing inserts."""
    return name.replace("_checkpoint_wrapped_module.", "")


def is_peft_model(model: nn.Module) -> bool:
    """
    Whether a model is a `PeftModel`, in a wrapper too.

    accelerate's function of this name is asked about wrappers alone: it looks for peft on the disk, which takes
    milliseconds, and every pass asks several times.

    Args:
        model: A transformers model, a `PeftModel`, or one of them in DDP.
    """
    if isinstance(model, PreTrainedModel):
        return False

    # It is optional, and who has a `PeftModel` has loaded it.
    peft = sys.modules.get("peft")
    if peft is None:
        return False
    return isinstance(model, peft.PeftModel) or accelerate.utils.is_peft_model(model)


def adapters_in_use(model: nn.Module) -> frozenset[tuple[Any, ...]]:
    """
    Which adapters the layers of a model add to their outputs: another one, or none, makes another policy of it.

    Args:
        model: A transformers model or a `PeftModel`.

    Returns:
        For each way that a layer has: the names of its adapters, and whether they are switched off. Nothing for a
        model without adapters.
    """
    if not is_peft_model(model):
        return frozenset()

    from peft.tuners.tuners_utils import BaseTunerLayer  # optional, so only here

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    return frozenset((*layer.active_adapters, layer.disable_adapters) for layer in layers)


def base_model(model: PreTrainedModel) -> PreTrainedModel:
    """The transformers model: `model` itself, or what a `PeftModel` wraps."""
    return model.get_base_model() if is_peft_model(model) else model


def check_adapters_of_peft(model: nn.Module) -> None:
    """
    Refuse an adapter that no `PeftModel` has: syncs and files would miss it.

    Args:
        model: A model, or a `PeftModel`.

    Raises:
        ValueError: also for one below a `PeftModel`, which transformers loaded before peft wrapped the model.
    """
    base: Any = base_model(model)
    by_transformers = getattr(base, "_hf_peft_config_loaded", False)
    without_peft = not is_peft_model(model) and any(hasattr(module, "lora_A") for module in model.modules())
    if by_transformers or without_peft:
        raise ValueError(
            "LoRA layers without a PeftModel: a sync would miss them. Load the base alone, and its adapter by "
            "peft.PeftModel.from_pretrained(base, adapter, is_trainable=True)."
        )


def config_wrongly_ties_head(model: PreTrainedModel) -> bool:
    """
    Whether a config says that output layer and embedding share a matrix, and they do not.

    transformers loads both matrices if a checkpoint has two. An engine goes by the config, and reads one.

    Args:
        model: The model, or a `PeftModel`.
    """
    model = base_model(model)
    head = model.get_output_embeddings()
    # Of a model of several parts only the whole or only the text may have the setting (Qwen2.5-VL, GLM-4V).
    parts = (model.config, model.config.get_text_config())
    says_tied = any(getattr(part, "tie_word_embeddings", False) for part in parts)
    if head is None or not says_tied:
        return False
    return head.weight is not model.get_input_embeddings().weight


def untie(config: PretrainedConfig) -> None:
    """Let a config say that the output layer has a matrix of its own. It is changed in place."""
    for part in (config, config.get_text_config()):
        part.tie_word_embeddings = False


def adapter_configs(model: str | nn.Module, peft_config: Any) -> list[Any]:
    """
    The configurations of the adapters that a run has or will have.

    Args:
        model: The trainer's model, or its name. A `PeftModel` has adapters already.
        peft_config: The trainer's argument, by which it adds an adapter; `None` adds none.

    Returns:
        A list of `peft.PeftConfig`, the new adapter first; often empty.
    """
    present: Mapping[str, Any] = getattr(model, "peft_config", None) or {}
    configs = [peft_config, *present.values()]
    return [config for config in configs if config]


def architecture_name(config: PretrainedConfig) -> str:
    """The name of the class that wrote a model's config; empty if the config has none."""
    names = config.architectures or [""]
    return names[0]


def architecture_of(config: PretrainedConfig) -> Any | None:
    """
    The class of transformers that a config names.

    Args:
        config: The model's config.

    Returns:
        The class, or `None` if transformers does not have it: a checkpoint may bring code of its own.
    """
    return getattr(transformers, architecture_name(config), None)


def checkpoint_names(model: nn.Module) -> Callable[[str], str | None]:
    """
    Return a function from names in `model` to names in the base model.

    Args:
        model: A transformers model, or a `PeftModel`.

    Returns:
        The function. It gives the name of the active copy for `modules_to_save`, and `None` for names that the
        checkpoint of the base model lacks.
    """
    if not is_peft_model(model):
        return plain_name
    adapter: Any = model.active_adapter
    return partial(_name_in_base, adapter=adapter)


def _name_in_base(name: str, adapter: str) -> str | None:
    """The name in the base model of a name in a `PeftModel`; `None` if the base model has none."""
    parts = plain_name(name).removeprefix("base_model.model.").split(".")

    # peft keeps the original of a module that it copies, although only the copy is trained and used.
    in_adapter = any(part.startswith("lora_") for part in parts)
    if in_adapter or "original_module" in parts:
        return None

    # A copy that peft trains is `<module>.modules_to_save.<adapter>`; only that of the active adapter counts.
    if "modules_to_save" in parts:
        position = parts.index("modules_to_save")
        copied_for = parts[position + 1 : position + 2]
        if copied_for != [adapter]:
            return None
        del parts[position : position + 2]

    return ".".join(part for part in parts if part != "base_layer")


def checkpoint_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of the (base) model under their checkpoint names; an adapter layer stands for the layer it wraps."""
    name_of = checkpoint_names(model)

    for full_name, module in base_model(model).named_modules():
        name = name_of(full_name)
        inside_adapter = "base_layer" in full_name.split(".")
        # peft's wrapper of a copied module has the name of the copy, which comes later.
        wraps_copies = hasattr(module, "modules_to_save")

        if name is not None and not inside_adapter and not wraps_copies:
            yield name, module


def checkpoint_renaming(model: nn.Module) -> Callable[[str], str]:
    """
    Return a function from a module's or parameter's name to the name that transformers saves it under.

    transformers renames some modules when it loads (Mixtral's `block_sparse_moe` becomes `mlp`) and renames them back
    in `save_pretrained`; llm-compressor's checkpoints and vLLM use the saved names.

    Args:
        model: Any module, or a `PeftModel`. Only transformers models rename.
    """
    model = base_model(model)
    if not isinstance(model, PreTrainedModel):
        return str  # the name itself

    # The way back from the names in the model: each step reversed, the last one first.
    renamings = []
    for conversion in reversed(file_conversions(model)):
        if isinstance(conversion, WeightRenaming):
            renamings.append(conversion.reverse_transform())
    return partial(_renamed, renamings=renamings)


def file_conversions(model: PreTrainedModel) -> list[Any]:
    """
    What transformers does to the names and tensors of a file when it loads a model, and undoes in `save_pretrained`.

    Args:
        model: A transformers model.

    Returns:
        transformers' steps; empty for a model that is stored by its own names, as most are.
    """
    # `from_pretrained` leaves there what it applied.
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is not None:
        return list(conversions)

    # `save_pretrained` does the same for a model that was not loaded from a file.
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    # A change of prefix is of a checkpoint's file, and a model that was built from scratch has none.
    return [conversion for conversion in conversions if not isinstance(conversion, PrefixChange)]


def _renamed(name: str, renamings: list[WeightRenaming]) -> str:
    """A name after some renamings, one after the other."""
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name
