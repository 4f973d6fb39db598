"""The low-bit checkpoint, in the compressed-tensors format that `vllm serve` and `from_pretrained` load.

Invariant: the file holds the tensors of `iter_low_bit_weights`, byte for byte, and a folder is either complete or has
no `config.json`, so nothing half-written can be loaded (paper Sec. 3.1, step 3).
"""

from __future__ import annotations

import copy
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import compressed_tensors
import torch
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, QuantizationStatus
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.dynamic_module_utils import custom_object_save

from .._compat.sharding import unsharded_class
from ..quant.layers.experts import QuantExperts, expert_modules
from ..quant.layers.layer import LowBitLayer, quantized_modules
from ..quant.match import names_for_patterns
from ..quant.names import base_model, checkpoint_modules, config_wrongly_ties_head, untie
from ..quant.scheme import MINMAX
from ..quant.sharding.shards import shape_of
from ..quant.source import INDEX
from ..quant.store import iter_low_bit_weights
from .files import (
    ADAPTER_CONFIG,
    RECIPE,
    apply_umask,
    flush,
    is_llmcompressor_recipe,
    modules_here,
    shapes_in,
    weight_files,
)


logger = logging.getLogger(__name__)

# Router classes, named as in compressed-tensors (`get_vllm_module_type`): "MixtralTopKRouter", "GraniteMoeTopKGating".
_ROUTER_CLASS = re.compile(r"Router|Gating|Gate(?![a-z])")
SCRATCH = ".incoming-"
# The files of weights that transformers and vLLM read. Others are the user's ("model-backup.safetensors"), and stay.
_MODEL_OR_INDEX = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
# What transformers and engines read of a tokenizer.
TOKENIZER_FILES = (
    *("tokenizer.*", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("tekken.json", "*.model", "*.tiktoken", "emoji.json", "chat_template.*", "additional_chat_templates/*.jinja"),
)
TRAINING_FILES = ("optimizer.pt", "optimizer.bin", "scheduler.pt")


def quantization_config(model: nn.Module) -> dict[str, Any] | None:
    """
    The `quantization_config` of a quantized model's `config.json`, in llm-compressor's layout; `None` for another
    model.
    """
    groups: list[QuantizationScheme] = []
    for _, layer in quantized_modules(model):  # in module order, as llm-compressor numbers them
        if layer.scheme not in groups:
            groups.append(layer.scheme)
    if not groups:
        return None

    # Copies: the layers keep their own schemes.
    groups = [group.model_copy(deep=True) for group in groups]
    for group in groups:
        group.weights.observer = group.weights.observer or MINMAX

    formats = {group.format for group in groups}
    stored_as = formats.pop() if len(formats) == 1 else CompressionFormat.mixed_precision
    config = QuantizationConfig(
        config_groups={f"group_{number}": group for number, group in enumerate(groups)},
        format=stored_as.value,
        ignore=_ignored(model),
        quantization_status=QuantizationStatus.COMPRESSED,
    )
    return {
        "version": compressed_tensors.__version__,
        "quant_method": "compressed-tensors",
        "sparsity_config": {},
        "transform_config": {},
        **config.model_dump(mode="json", exclude=["quant_method"]),
    }


def _ignored(model: nn.Module) -> list[str]:
    """
    Checkpoint names of the layers that stay in high precision, in llm-compressor's order.

    Routers are listed too: transformers has its own classes for them, but an engine makes them linear layers. A layer
    that has another name in the model than in its files comes last by that of the model, which transformers looks for.
    """
    experts: dict[str, Any] = dict(expert_modules(model))
    names_of = names_for_patterns(model)
    names: list[str] = []
    names_in_model: list[str] = []
    for name, module in checkpoint_modules(model):
        if name in experts and not isinstance(module, QuantExperts):
            names += _ignored_experts(name, module)
        # Before the question for linear layers, which most of these are, too.
        elif isinstance(module, LowBitLayer):
            continue
        elif isinstance(module, nn.Linear) or _ROUTER_CLASS.search(type(module).__name__):
            names.append(name)
            # It has classes of its own for routers, and they match no target.
            if isinstance(module, nn.Linear) and len(names_of(name)) > 1:
                names_in_model.append(name)

    # The last is that in the files.
    return [names_of(name)[-1] for name in names] + names_in_model


def _ignored_experts(name: str, module: nn.Module) -> list[str]:
    """
    The linear layers that a checkpoint has in place of a module of experts, in llm-compressor's order within an
    expert.
    """
    number = shape_of(module.get_parameter("down_proj"))[0]
    projections = ("up_proj", "gate_proj", "down_proj")
    return [f"{name}.{expert}.{projection}" for expert in range(number) for projection in projections]


def save_low_bit(
    model: nn.Module, tokenizer: Any, path: str | os.PathLike, *, weights: Iterable[tuple[str, Tensor]] | None = None
) -> Path:
    """
    Write the low-bit checkpoint of `model`, as its master weights are now. They do not change.

    Args:
        model: A quantized model. For a `PeftModel` this writes the base with the active adapter merged.
        tokenizer: Is saved too, unless it is `None`.
        path: The folder. Weights in it are replaced, other files stay.
        weights: The checkpoint's tensors, for a model of which this process holds only shards: gathering them is
            collective, and only one process writes.

    Returns:
        The folder.

    Raises:
        ValueError: if the model is not quantized, or if `path` holds high-precision weights.
    """
    path = Path(path)
    quant_config = quantization_config(model)
    if quant_config is None:
        raise ValueError("The model has no quantized layer. Call apply_quantization(model, scheme) before saving.")
    check_target(path)

    if weights is None:
        weights = iter_low_bit_weights(model)
    # Copies: safetensors refuses tensors that share a storage, as the experts of a layer do.
    state_dict = {name: tensor.to("cpu", copy=True) for name, tensor in weights}

    path.mkdir(parents=True, exist_ok=True)
    for leftover in path.glob(f"{SCRATCH}*"):  # of a killed process
        shutil.rmtree(leftover)

    # The scratch folder lies inside `path`: `path` may be a mount, and a rename cannot cross mounts.
    with tempfile.TemporaryDirectory(dir=path, prefix=SCRATCH) as scratch:
        folder = Path(scratch)
        save_torch_state_dict(state_dict, folder, max_shard_size="5GB", metadata={"format": "pt"})
        _save_configs(base_model(model), tokenizer, quant_config, folder)
        apply_umask(folder)
        flush(folder)
        new_files = {str(file.relative_to(folder)) for file in folder.rglob("*")}
        _move_into_place(folder, path)

    if tokenizer is not None:
        _say_what_other_tokenizers_left(path, new_files)
    # A model of llm-compressor was here before. The new one has no recipe, unless a user put it there for it.
    if is_llmcompressor_recipe(path / RECIPE):
        logger.warning(
            "%s also holds %s of llm-compressor, which says how another model was quantized, and which a push would "
            "share with this one. Delete it.",
            path,
            RECIPE,
        )
    others = _other_weights(path)
    if others:
        logger.warning(
            "%s also holds %s, which an engine would read as weights of the model, and keep what it reads last. Move "
            "them to another folder.",
            path,
            ", ".join(others),
        )
    return path


def _say_what_other_tokenizers_left(path: Path, new_files: Collection[str]) -> None:
    """Warn of files of a tokenizer that was saved in a folder before, if this one has not written them anew."""
    present: set[str] = set()
    for pattern in TOKENIZER_FILES:
        present |= {str(file.relative_to(path)) for file in path.glob(pattern)}

    leftovers = sorted(present - set(new_files))
    if leftovers:
        logger.warning(
            "%s also holds %s of another tokenizer, with which this model would be loaded and pushed: its own does "
            "not have them. Delete them.",
            path,
            ", ".join(leftovers),
        )


def _other_weights(path: Path) -> list[str]:
    """Files beside a saved model that an engine reads as its weights: without an index it reads all safetensors."""
    if (path / INDEX).is_file():
        return []
    names = {file.name for file in path.glob("*.safetensors")}
    return sorted(names - {file.name for file in weight_files(path)})


def holds_low_bit(model: nn.Module, path: Path, weights: Iterable[tuple[str, Tensor]]) -> bool:
    """
    Find out whether a folder holds the low-bit checkpoint of a model, so that it need not be written again.

    Args:
        model: The quantized model.
        path: The folder; it may be missing or incomplete.
        weights: The model's tensors by their names in a checkpoint. Those after the first difference are not read.
    """
    config = path / "config.json"
    if not config.is_file():
        return False
    # Through JSON, as the file went: tuples become lists.
    expected_config = json.loads(json.dumps(quantization_config(model)))
    stored_config = json.loads(config.read_text()).get("quantization_config") or {}
    # That of compressed-tensors, which may have been installed anew since.
    if stored_config | {"version": None} != expected_config | {"version": None}:
        return False

    with ExitStack() as stack:
        stored: dict[str, Any] = {}
        for file in weight_files(path):
            try:
                opened = stack.enter_context(safe_open(file, "pt"))
            except SafetensorError:  # cut off
                return False
            stored |= dict.fromkeys(opened.keys(), opened)

        for name, tensor in weights:
            file_of_tensor = stored.pop(name, None)
            if file_of_tensor is None or not _same_bytes(file_of_tensor.get_tensor(name), tensor):
                return False
        return not stored


def _same_bytes(stored: Tensor, tensor: Tensor) -> bool:
    """Whether two tensors have one dtype, one shape and the same bytes."""
    if stored.dtype != tensor.dtype or stored.shape != tensor.shape:
        return False
    # As bytes: torch compares no float8, and NaN is not equal to itself.
    there = stored.flatten().view(torch.uint8)
    here = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return torch.equal(there, here)


def check_target(path: str | os.PathLike) -> None:
    """
    Refuse (`ValueError`) a folder with a training checkpoint or an unquantized model, which the low-bit model would
    overwrite, one with a damaged config, which could be of such a model, and one with an adapter.
    """
    path = Path(path)
    check_no_adapter_in(path)
    precious = [name for name in TRAINING_FILES if (path / name).exists()]

    config = path / "config.json"
    try:
        is_unquantized = config.exists() and "quantization_config" not in json.loads(config.read_text())
    except ValueError as error:
        raise ValueError(f"{config} is damaged: {error}. Delete it, or use another folder.") from error
    if is_unquantized:
        for pattern in ("*.safetensors", "pytorch_model*.bin"):
            precious += [file.name for file in sorted(path.glob(pattern))]
    # A low-bit model may lack its config, which is moved last. Other loops save weights alone.
    if not config.exists():
        weights = [file for file in weight_files(path) if _MODEL_OR_INDEX.fullmatch(file.name)]
        if not _are_in_low_bits(weights):
            precious += [file.name for file in weights]

    if precious:
        raise ValueError(
            f"{path} holds a training checkpoint or an unquantized model ({precious[:3]}), which would be "
            "overwritten. Use another, or move these files away."
        )


def _are_in_low_bits(weights: list[Path]) -> bool:
    """Whether files are those of a low-bit model, which has scales. A file that is cut off is worth nothing."""
    try:
        return any(name.endswith((".weight_scale", ".weight_packed")) for name in shapes_in(weights))
    except ValueError:
        return True


def check_no_adapter_in(path: str | os.PathLike) -> None:
    """Refuse (`ValueError`) a folder with an adapter: transformers would load it in place of the model beside it."""
    if Path(path, ADAPTER_CONFIG).exists():
        raise ValueError(
            f"{path} holds a LoRA adapter ({ADAPTER_CONFIG}), which transformers would load in place of the model, "
            "and which a push would share with it. Use another."
        )


def check_adapter_target(path: str | os.PathLike) -> None:
    """
    Refuse (`ValueError`) a folder with a model or a training checkpoint: the adapter would lie beside it, as if that
    model were its base, and a push of the adapter would share both.
    """
    path = Path(path)
    models = [name for name in TRAINING_FILES if (path / name).exists()]
    models += [file.name for file in weight_files(path) if not file.name.startswith("adapter_model")]
    if models:
        raise ValueError(
            f"{path} holds a model or a training checkpoint ({models[0]}), which the adapter of this run would be "
            "taken to belong to. Use another."
        )


def _save_configs(model: Any, tokenizer: Any | None, quant_config: dict[str, Any], folder: Path) -> None:
    """Write what belongs beside the weights: configs and tokenizer."""
    config = copy.deepcopy(model.config)
    # Of the tensors that lie beside it, whatever dtype the master weights have.
    config.dtype = torch.bfloat16
    # transformers' `save_pretrained` of a model would write the class; that of a config does not know it.
    model_class = unsharded_class(model)
    config.architectures = [model_class.__name__]
    config.quantization_config = quant_config
    if config_wrongly_ties_head(model):
        untie(config)
    # The code of a model with `trust_remote_code` from a folder; that of its config comes with the config.
    if getattr(model_class, "_auto_class", None) is not None:
        # It asks for the class and its module, which are not those of a sharded model.
        custom_object_save(model_class.__new__(model_class), folder, config=config)
    config.save_pretrained(folder)

    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    # Last, because a tokenizer may bring code, too.
    _forget_other_code(folder / "config.json")


def _forget_other_code(file: Path) -> None:
    """
    Take out of a config what names code that does not lie beside it.

    TRL loads a family that transformers knows by transformers' own class, whatever code its folder has, and the config
    would still name that code: nobody could load the model with `trust_remote_code`.
    """
    content = json.loads(file.read_text())
    auto_map = content.pop("auto_map", None)
    if not auto_map:
        return

    kept: dict[str, Any] = {}
    # What is no mapping names nothing, and transformers does not read it either.
    for name, classes in auto_map.items() if isinstance(auto_map, dict) else ():
        if all((file.parent / module).is_file() for module in modules_here(classes)):
            kept[name] = classes
    if kept == auto_map:
        return
    if kept:
        content["auto_map"] = kept
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _move_into_place(scratch: Path, path: Path) -> None:
    """Delete the old `config.json` first and move the new one last: a folder without it cannot be loaded."""
    (path / "config.json").unlink(missing_ok=True)

    new_files = {file.name for file in scratch.iterdir()}
    for file in path.iterdir():
        if _MODEL_OR_INDEX.fullmatch(file.name) and file.name not in new_files:  # a shard of the old model
            file.unlink()

    config_last = sorted(scratch.iterdir(), key=lambda file: file.name == "config.json")
    for file in config_last:
        if file.is_dir():
            shutil.copytree(file, path / file.name, dirs_exist_ok=True)
        else:
            os.replace(file, path / file.name)
