"""The checkpoint under evaluation: found, described and refused before an engine starts."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import torch
import transformers
from compressed_tensors.quantization import QuantizationConfig
from huggingface_hub import snapshot_download
from transformers import PretrainedConfig

from ...export.files import READ_BY_ENGINE
from ...quant.checkpoint import QuantizedSource
from ...quant.scheme import describe_scheme, support_of
from ...rollout._vllm_cpu import is_cpu_engine
from ...rollout.cpu import check_engine_cpu
from ...rollout.support import missing_in_engine


def find_checkpoint(name_or_path: str) -> Path:
    """The folder of a checkpoint, downloaded if `name_or_path` is a Hub id; `FileNotFoundError` if it holds no model."""
    folder = Path(name_or_path).expanduser()
    if not folder.is_dir():
        folder = Path(snapshot_download(name_or_path, allow_patterns=list(READ_BY_ENGINE)))
    for needed in (
        "config.json",
        "*.safetensors",
        "tokenizer*",
    ):  # without the last transformers makes an empty tokenizer
        if not any(folder.glob(needed)):
            raise FileNotFoundError(
                f"{folder} is no model folder: it has no {needed}. Of an adapter evaluate the folder low_bit, or what "
                "`qarl-trl export` writes."
            )
    return folder


def quantization_of(config: PretrainedConfig) -> QuantizationConfig | str | None:
    """How a model is quantized: by compressed-tensors, by another method, which is named, or not at all."""
    stored = getattr(config, "quantization_config", None)
    if stored is None or stored.get("quant_method") == "compressed-tensors":
        return stored and QuantizationConfig.model_validate(stored)
    return str(stored.get("quant_method"))


def check_complete(folder: Path, config: PretrainedConfig) -> None:
    """
    Refuse (`ValueError`) a compressed-tensors checkpoint that lacks a tensor: vLLM loads it all the same, and answers garbage.

    A plain one vLLM refuses itself. An architecture that transformers does not have is checked layer by layer, but not for
    whole layers that are missing.
    """
    quantization = quantization_of(config)
    if not isinstance(quantization, QuantizationConfig):
        return
    source = QuantizedSource(str(folder), folder, quantization)
    shapes = {_of_transformers(name): shape for name, shape in source.shapes().items()}
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    architecture = getattr(transformers, (config.architectures or [""])[0], None)
    if architecture is None:
        return
    plain = copy.deepcopy(config)
    del plain.quantization_config
    settings = {"device_map": "meta", "output_loading_info": True, "ignore_mismatched_sizes": True}
    try:  # transformers' own loader knows the names of every family; without values it reads and allocates nothing
        _, report = architecture.from_pretrained(None, config=plain, state_dict=tensors, **settings)
    except RuntimeError as error:  # one of the experts that it would stack is missing
        raise source.broken(f"its tensors are not those of {architecture.__name__}") from error
    if wrong := [*report["missing_keys"], *report["mismatched_keys"]]:
        raise source.broken(f"{architecture.__name__} lacks {sorted(map(str, wrong))[:3]}")


def _of_transformers(name: str) -> str:
    """Mixtral's experts as transformers stores them: llm-compressor, and so our export, names their layers otherwise."""
    stored = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    expert = re.compile(r"(?<=\.block_sparse_moe\.experts\.)(\d+)\.(\w+)")
    return expert.sub(lambda match: f"{match[1]}.{stored.get(match[2], match[2])}", name)


def precision(config: PretrainedConfig) -> str:
    """The precision of the quantized layers in words; `ValueError` if vLLM has no kernel for a scheme on this machine."""
    device = torch.device("cpu" if is_cpu_engine() else "cuda")
    check_engine_cpu(device.type)
    quantization = quantization_of(config)
    if not isinstance(quantization, QuantizationConfig):
        return quantization or "not quantized"
    parts = []
    for group in quantization.config_groups.values():
        parts.append(describe_scheme(group))
        try:
            row = support_of(group)
        except ValueError:  # not one of ours; vLLM itself says whether it runs
            continue
        if missing := missing_in_engine(row, device):
            raise ValueError(f"vLLM cannot run {row.name} on device {device.type!r}: {missing}.")
        parts[-1] = f"{row.name} ({parts[-1]})"
    return ", ".join(parts)
