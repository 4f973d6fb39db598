"""Check adapters: learner and engine must both compute what the adapter says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from huggingface_hub import constants
from torch import nn
from transformers import AutoConfig, PretrainedConfig
from transformers.utils import find_adapter_config_file
from trl import DPOConfig, GRPOConfig, KTOConfig, RLOOConfig

from .._compat.versions import check_versions
from ..quant.names import OF_THE_HUB, adapter_configs, base_model, check_adapters_of_peft
from ..quant.sharding.shards import shape_of
from .layers import OTHER_HEADS
from .model import changed_by_loading, loading_arguments
from .types import RunSettings, TrainerArguments


logger = get_logger(__name__)

# vLLM serves no adapter with these settings. It refuses the first, and silently ignores the others, so that the engine
# would sample from another policy.
NOT_SERVED = ("modules_to_save", "rank_pattern", "alpha_pattern")
# Settings of trainers that make the reference of their penalty of the adapter "default".
COPY_AN_ADAPTER = (GRPOConfig, RLOOConfig, DPOConfig, KTOConfig)


def check_adapters(model: str | nn.Module, peft_config: Any, args: RunSettings) -> list[Any]:
    """
    Refuse adapters that a run in low bits cannot have. It needs neither data nor weights.

    Args:
        model: The trainer's model, or its name.
        peft_config: That of the trainer; `None` without one.
        args: Settings of the run.

    Returns:
        The configurations of the adapters that the run has or will have.

    Raises:
        ImportError: if peft is missing, or has an untested version.
        ValueError: for an adapter whose forward the engine would not have, and for a frozen base without an adapter.
    """
    _check_start(model, args)
    if args.frozen and not (isinstance(model, str) and peft_config):
        raise ValueError(
            "lora_base='frozen' needs an adapter (use_peft: true; in a script peft_config), and the name of a model: "
            "its base never loads whole."
        )

    adapters = adapter_configs(model, peft_config)
    if adapters:
        check_versions("peft")
    for adapter in adapters:
        check_adapter(adapter, args)
    return adapters


def _check_start(model: str | nn.Module, args: RunSettings) -> None:
    """Refuse (`ValueError`) a start into whose layers transformers has loaded an adapter, or would load one."""
    if isinstance(model, nn.Module):
        check_adapters_of_peft(model)
        return

    of_hub = {name: value for name, value in loading_arguments(args).items() if name in OF_THE_HUB}
    if find_adapter_config_file(model, **of_hub) is not None:
        raise ValueError(
            f"{model} must be a model, got one with an adapter (adapter_config.json): transformers would load it into "
            "the layers, where syncs miss it. Merge the two (merge_and_unload of peft) and start from that; or move "
            "the file away, if another run left it there."
        )


def check_adapter(config: Any, args: RunSettings) -> None:
    """
    Refuse an adapter without a merged weight that could be quantized, and settings that do not work with adapters.

    Args:
        config: A `peft.PeftConfig`.
        args: Settings of the run.

    Raises:
        ValueError: if the adapter or the settings do not fit.
    """
    from ..quant.layers.lora import check_lora_config  # imports peft, which is optional

    check_lora_config(config)

    # peft reads a text as one regular expression, in which no module's name has a space, and says so after the load.
    modules = config.target_modules
    if isinstance(modules, str) and re.search(r"\s", modules):
        raise ValueError(f"target_modules must be a list of names, or a regular expression, got {modules!r}.")

    if args.frozen:
        _check_served(config)
    # Muon orthogonalizes the step of a whole matrix, which has no counterpart in steps of two factors.
    if getattr(args, "optim_muon", False):
        raise ValueError("optim_muon must be False with LoRA: Muon steps of A and B are no Muon step of W + s B A.")


def check_base_name(model: str, config: PretrainedConfig, args: RunSettings) -> None:
    """
    Refuse a base that is not what its name says: an adapter names its base, and whoever loads or exports the two has
    nothing else. Warn where the low-bit model of the run still says it.

    Args:
        model: The name of the base.
        config: Its config, as the run loads it.
        args: Settings of the run.

    Raises:
        ValueError: for a base in a subfolder, and for a frozen one that was stored before and is loaded with another
            config.
    """
    subfolder = (args.model_init_kwargs or {}).get("subfolder")
    if subfolder:
        where = f"Name {Path(model, subfolder)}" if Path(model).is_dir() else "Download it, and name its folder"
        raise ValueError(
            f"model_init_kwargs={{'subfolder': {subfolder!r}}}: an adapter cannot name a base in a subfolder, and "
            f"would be taken for one of {model} itself. {where} as the model."
        )

    changed = changed_by_loading(model, config, args)
    if not changed:
        return
    lost = f"model_init_kwargs change {', '.join(changed)} of the base, which no file of an adapter says"
    if args.frozen and args.from_checkpoint:
        raise ValueError(f"{lost}: served with its base, it would be another policy. Change the base's config.json.")
    logger.warning(
        "%s: merge it into a base that is loaded so, too, or change the base's config.json before the run. A low-bit "
        "model that the run saves has it.",
        lost,
    )


def check_resized(model: nn.Module, adapters: Sequence[Any], args: RunSettings) -> None:
    """
    Refuse a loaded model of the Hub with a resized embedding while the Hub is off: peft looks there whether an adapter
    needs the embedding, and would leave it out.

    Args:
        model: The trainer's model.
        adapters: The configurations of its adapters. One that is of the embedding has its rows.
        args: Settings of the run.

    Raises:
        ValueError: with both numbers of rows.
    """
    base: Any = base_model(model)
    name = base.config._name_or_path
    if not name or Path(name).is_dir() or not constants.HF_HUB_OFFLINE:
        return
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=args.trust_remote_code)
    except (OSError, ValueError):  # nobody can compare
        return

    embedding = base.get_input_embeddings()
    names = [name for name, module in base.named_modules() if module is embedding]
    for adapter in adapters:
        of_adapter = [*(adapter.modules_to_save or ()), *_as_names(adapter.target_modules)]
        if any(name.endswith(part) for name in names for part in of_adapter):
            return

    rows = shape_of(embedding.weight)[0]
    before = config.get_text_config().vocab_size
    if rows != before:
        raise ValueError(
            f"The embedding has {rows} rows, that of {name} on the Hub {before}, and HF_HUB_OFFLINE=1 hides it from "
            "peft: no file of the adapter would have the new rows. Save the model to a folder, and load it from there."
        )


def _as_names(modules: Any) -> list[str]:
    """The names of the modules that an adapter is on; of a regular expression none."""
    return [] if isinstance(modules, str) else list(modules or ())


def check_reference(model: Any, args: RunSettings, trainer_arguments: TrainerArguments) -> None:
    """
    Refuse a penalty towards the start of another adapter than the one that is trained: TRL copies the one of the name
    "default".

    Args:
        model: The trainer's `PeftModel`.
        args: Settings of the run.
        trainer_arguments: All arguments of the trainer by name.

    Raises:
        ValueError: with the name of the trained adapter.
    """
    # Other trainers copy none, and DPO and KTO do not if they are given a reference.
    copies_one = isinstance(args, COPY_AN_ADAPTER) and trainer_arguments.get("ref_model") is None
    if copies_one and args.beta and model.active_adapter != "default":
        raise ValueError(
            f"beta={args.beta}: the trained adapter of the PeftModel must have the name 'default', got "
            f"{model.active_adapter!r}. TRL takes the adapter of that name as the reference. Load it without "
            "adapter_name."
        )


def check_one_active(model: Any) -> None:
    """
    Refuse a `PeftModel` with several active adapters, or with another one than it names: layers compute with those
    that are active, and the files of a run are of the one that the model names.

    Args:
        model: The trainer's `PeftModel`.

    Raises:
        ValueError: with their names.
    """
    # `model.base_model.set_adapter` takes several, and leaves the name in `model.active_adapter` as it is.
    active = list(model.base_model.active_adapters)
    if active != [model.active_adapter]:
        raise ValueError(
            f"One adapter of the PeftModel must be active, the one that model.active_adapter names, "
            f"{model.active_adapter!r}; got {', '.join(active) or 'none'}. Call model.set_adapter with one name."
        )


def check_saved(model: Any) -> None:
    """
    Refuse a `PeftModel` that trains parameters which peft does not save: a resumed run would begin with their first
    values, and a saved adapter would be another policy than the one that was trained.

    Args:
        model: The trainer's `PeftModel`.

    Raises:
        ValueError: with the name of one.
    """
    # First: under FSDP2 it puts shards in the place of whole parameters that a forward has left.
    state = model.state_dict(keep_vars=True)
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    # All that peft makes, of whichever adapter.
    others = [name for name in trained if "lora_" not in name and ".modules_to_save." not in name]
    if not others:
        return

    from peft import get_peft_model_state_dict  # optional, so only here

    # The parameters themselves are compared, because shards of them have no addresses.
    saved: set[int] = set()
    for adapter in model.peft_config:
        # It has embeddings that were resized, too.
        parameters = get_peft_model_state_dict(model, state, adapter_name=adapter)
        saved.update(map(id, parameters.values()))
    lost = [name for name in others if id(trained[name]) not in saved]
    if lost:
        raise ValueError(
            f"The PeftModel trains {len(lost)} parameters beside its adapter, first {lost[0]!r}, which no file of the "
            "adapter has: a resumed run and whoever loads the adapter would lose them. Name their modules in "
            "modules_to_save of the adapter, or set requires_grad=False."
        )


def _check_served(config: Any) -> None:
    """Refuse (`ValueError`) settings of an adapter that vLLM would not apply on top of a frozen base."""
    for name in NOT_SERVED:
        if getattr(config, name):
            raise ValueError(f"lora_base='frozen': vLLM serves no adapter with {name}. Leave it out, or use 'merged'.")


def check_tied(model: Any, adapter: Any) -> None:
    """
    Refuse an adapter that trains a copy of a weight which the model uses twice.

    The learner would have two matrices then, one of them trained, where the engine and a checkpoint have one. Right
    after the start the two are equal, so the first sync check would not see it.

    Args:
        model: The base model, with weights or without.
        adapter: A `peft.LoraConfig`.

    Raises:
        ValueError: with the names of the module and of its twin, or for a name that no module has.
    """
    for name in adapter.modules_to_save or ():
        # A reward model gets its head when it loads, and `model` is what its config names.
        if name in OTHER_HEADS:
            continue
        # peft takes it in silence.
        if not any(module.endswith(name) for module, _ in model.named_modules()):
            raise ValueError(f"modules_to_save: the model has no module {name!r}.")

    copied = _copied_modules(model, adapter)
    for twin, source in model.all_tied_weights_keys.items():
        pair = [name.rpartition(".")[0] for name in (source, twin)]
        hit = [name for name in pair if _is_inside(name, copied)]
        if hit:
            raise ValueError(
                f"modules_to_save={list(adapter.modules_to_save)} would train a copy of {hit[0]!r}, and {pair[0]!r} "
                f"and {pair[1]!r} share one weight (tie_word_embeddings): the engine has one matrix where the learner "
                "would have two. Leave it out, or train without an adapter."
            )


def _copied_modules(model: nn.Module, adapter: Any) -> list[str]:
    """Names of the modules of which peft makes a copy to train: it compares the ends of names."""
    ends = tuple(adapter.modules_to_save or ())
    return [name for name, _ in model.named_modules() if name.endswith(ends)]


def _is_inside(name: str, modules: list[str]) -> bool:
    """Whether a module is one of `modules` or a part of one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)
