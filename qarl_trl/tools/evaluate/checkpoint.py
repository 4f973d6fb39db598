"""The checkpoint under evaluation: found, described and refused before an engine starts."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from compressed_tensors.quantization import QuantizationConfig
from huggingface_hub import snapshot_download
from transformers import PretrainedConfig

from ...export.files import READ_BY_ENGINE, tensor_names
from ...quant.scheme import describe_scheme, support_of
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


def check_complete(folder: Path) -> None:
    """Refuse (`ValueError`) files that are missing or cut off: of a low-bit checkpoint vLLM loads what is there, and answers garbage."""
    index, names = folder / "model.safetensors.index.json", tensor_names(folder)
    listed = json.loads(index.read_text())["weight_map"] if index.is_file() else {}
    if missing := sorted(listed.keys() - set(names)):
        raise ValueError(
            f"{folder} lacks {len(missing)} tensors of {index.name} (first: {missing[0]}). Download it again."
        )


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
