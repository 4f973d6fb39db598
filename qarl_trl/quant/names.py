"""Checkpoint names of modules and parameters, without the parts that activation checkpointing and peft add."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from accelerate.utils import is_peft_model
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightRenaming


def plain_name(name: str) -> str:
    """A parameter's or module's name without the part that activation checkpointing inserts."""
    return name.replace("_checkpoint_wrapped_module.", "")


def base_model(model: PreTrainedModel) -> PreTrainedModel:
    """The transformers model: `model` itself, or what a `PeftModel` wraps."""
    return model.get_base_model() if is_peft_model(model) else model


def checkpoint_names(model: nn.Module) -> Callable[[str], str | None]:
    """Return a function from names in `model` to names in the base model (`modules_to_save`: the active copy), or `None` if its checkpoint lacks them."""
    if not is_peft_model(model):
        return plain_name
    adapter = model.active_adapter

    def name_of(name: str) -> str | None:
        parts = plain_name(name).removeprefix("base_model.model.").split(".")
        if "original_module" in parts or any(part.startswith("lora_") for part in parts):
            return None
        if "modules_to_save" in parts:
            at = parts.index("modules_to_save")
            if parts[at + 1 : at + 2] != [adapter]:
                return None
            del parts[at : at + 2]
        return ".".join(part for part in parts if part != "base_layer")

    return name_of


def checkpoint_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of the (base) model under their checkpoint names; an adapter layer stands for the layer it wraps."""
    name_of = checkpoint_names(model)
    for full_name, module in base_model(model).named_modules():
        name, inside_adapter = name_of(full_name), "base_layer" in full_name.split(".")
        if name is not None and not inside_adapter and not hasattr(module, "modules_to_save"):
            yield name, module


def checkpoint_renaming(model: nn.Module) -> Callable[[str], str]:
    """
    Return a function from a module's or parameter's name to the name that transformers saves it under.

    transformers renames some modules when it loads (Mixtral's `block_sparse_moe` becomes `mlp`) and renames them back in
    `save_pretrained`; llm-compressor's checkpoints and vLLM use the saved names.
    """
    model = base_model(model)
    if not isinstance(model, PreTrainedModel):
        return str
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        # `save_pretrained` does the same for a model that was not loaded from a file.
        conversions = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [conversion for conversion in conversions if not isinstance(conversion, PrefixChange)]
    renamings = [c.reverse_transform() for c in reversed(conversions) if isinstance(c, WeightRenaming)]

    def rename(name: str) -> str:
        for renaming in renamings:
            name, _ = renaming.rename_source_key(name)
        return name

    return rename
