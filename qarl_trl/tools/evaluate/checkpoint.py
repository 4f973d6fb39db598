"""The checkpoint under evaluation: found, described and refused before an engine starts."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from compressed_tensors.quantization import QuantizationConfig
from huggingface_hub import snapshot_download
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from ...export.files import READ_BY_ENGINE, tensor_shapes
from ...quant.experts import PROJECTIONS, expert_modules, layer_names
from ...quant.names import checkpoint_renaming
from ...quant.quantize import meta_tensors
from ...quant.scheme import describe_scheme, scheme_for, support_of
from ...rollout._vllm_cpu import is_cpu_engine
from ...rollout.cpu import check_engine_cpu
from ...rollout.support import missing_in_engine


def find_checkpoint(name_or_path: str) -> Path:
    """The folder of a checkpoint, downloaded if `name_or_path` is a Hub id; `FileNotFoundError` if it holds no model."""
    folder = Path(name_or_path).expanduser()
    if not folder.is_dir():
        folder = Path(snapshot_download(name_or_path, allow_patterns=list(READ_BY_ENGINE)))
    for needed in ("config.json", "*.safetensors", "tokenizer*"):  # without the last transformers makes an empty one
        if not any(folder.glob(needed)):
            raise FileNotFoundError(
                f"{folder} is no model folder: it has no {needed}. Of an adapter evaluate the folder low_bit, or what "
                "`qarl-trl export` writes."
            )
    return folder


def check_complete(folder: Path, config: PretrainedConfig) -> None:
    """
    Refuse (`ValueError`) files that are missing or cut off and, of a compressed-tensors checkpoint, tensors missing or of another shape.

    vLLM loads such a checkpoint all the same and answers garbage. A plain one it refuses itself.
    """
    index, found = folder / "model.safetensors.index.json", tensor_shapes(folder)
    listed = json.loads(index.read_text())["weight_map"] if index.is_file() else {}
    if missing := sorted(listed.keys() - found):
        raise ValueError(
            f"{folder} lacks {len(missing)} tensors of {index.name} (first: {missing[0]}). Download it again."
        )
    stored = getattr(config, "quantization_config", {"quant_method": None})
    if stored["quant_method"] == "compressed-tensors" and type(config) in AutoModelForCausalLM._model_mapping:
        for name, shape in expected_shapes(config, QuantizationConfig.model_validate(stored)):
            if found.get(name) != shape:
                raise ValueError(
                    f"{folder} must hold {name} of shape {shape}, got {found.get(name)}. Download it again."
                )


def expected_shapes(config: PretrainedConfig, plan: QuantizationConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors that the checkpoint of a language model has, quantized by `plan`."""
    config = copy.deepcopy(config)
    del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    rename, experts, linear = checkpoint_renaming(model), dict(expert_modules(model)), nn.Linear(1, 1, device="meta")
    for name, param in model.named_parameters():
        owner, _, local = name.rpartition(".")
        module, layers, shape = model.get_submodule(owner), [owner], tuple(param.shape)
        if owner in experts and local in PROJECTIONS:  # stored as a linear layer for each expert and projection
            layers, module = layer_names(owner, module, local), linear
            shape, local = (math.prod(shape[:-1]) // len(layers), shape[-1]), "weight"
        for layer in layers:
            scheme = scheme_for(layer, module, plan) if local == "weight" and len(shape) == 2 else None
            stored = {local: torch.empty(shape, device="meta")} if scheme is None else meta_tensors(scheme, *shape)
            yield from ((rename(f"{layer}.{key}"), tuple(tensor.shape)) for key, tensor in stored.items())


def precision(config: PretrainedConfig) -> str:
    """The precision of the quantized layers in words; `ValueError` if vLLM has no kernel for a scheme on this machine."""
    device = torch.device("cpu" if is_cpu_engine() else "cuda")
    check_engine_cpu(device.type)
    stored = getattr(config, "quantization_config", {"quant_method": "not quantized"})
    if stored["quant_method"] != "compressed-tensors":
        return stored["quant_method"]
    parts = []
    for group in QuantizationConfig.model_validate(stored).config_groups.values():
        parts.append(describe_scheme(group))
        try:
            row = support_of(group)
        except ValueError:  # not one of ours; vLLM itself says whether it runs
            continue
        if missing := missing_in_engine(row, device):
            raise ValueError(f"vLLM cannot run {row.name} on device {device.type!r}: {missing}.")
        parts[-1] = f"{row.name} ({parts[-1]})"
    return ", ".join(parts)
