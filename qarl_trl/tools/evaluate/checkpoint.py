"""The checkpoint under evaluation: found, described and refused before an engine starts."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from compressed_tensors.quantization import QuantizationConfig
from huggingface_hub import snapshot_download
from safetensors import safe_open
from transformers import PretrainedConfig

from ...export.low_bit import READ_BY_ENGINE
from ...quant.names import checkpoint_renaming
from ...quant.scheme import describe_scheme, support_of
from ...rollout._vllm_cpu import is_cpu_engine
from ...rollout.cpu import check_engine_cpu
from ...rollout.support import missing_in_engine


def find_checkpoint(name_or_path: str) -> Path:
    """
    The folder of a checkpoint, downloaded if `name_or_path` is a Hub id.

    `FileNotFoundError` if there is no such folder or it holds no model, `ConnectionError` if the Hub does not give it,
    `ValueError` if it is an adapter.
    """
    folder = Path(name_or_path).expanduser()
    if not folder.is_dir():
        if name_or_path.startswith((".", "~", "/")) or name_or_path.count("/") > 1:
            raise FileNotFoundError(f"there is no model folder {name_or_path} (seen from {Path.cwd()}).")
        try:
            folder = Path(snapshot_download(name_or_path, allow_patterns=list(READ_BY_ENGINE)))
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConnectionError(
                f"{name_or_path} is no folder (seen from {Path.cwd()}), and the Hub does not give it: {reason}"
            ) from error
    if (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"{folder} is an adapter. Evaluate its folder low_bit, or what `qarl-trl export {folder} OUTPUT` writes."
        )
    for needed in ("config.json", "*.safetensors", "tokenizer*"):  # without it transformers makes an empty tokenizer
        if not any(folder.glob(needed)):
            raise FileNotFoundError(f"{folder} is no model folder: it has no {needed}.")
    return folder


def check_complete(folder: Path, config: PretrainedConfig) -> None:
    """
    Refuse (`ValueError`) a quantized checkpoint without a tensor for a layer: vLLM loads it all the same, and answers garbage.

    A plain one vLLM refuses itself. An architecture that transformers does not have is not checked.
    """
    architecture = getattr(transformers, (config.architectures or [""])[0], None)
    if architecture is None or getattr(config, "quantization_config", None) is None:
        return
    with torch.device("meta"):
        model = architecture(config)
    stored: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            stored.update(name.rpartition(".")[0] for name in list(tensors.keys()))
    # Experts are one module here and many in a file.
    stored |= {name.partition(".experts.")[0] + ".experts" for name in stored if ".experts." in name}
    rename, tied = checkpoint_renaming(model), model.all_tied_weights_keys
    for parameter, _ in model.named_parameters(remove_duplicate=False):
        name = parameter.rpartition(".")[0]
        names = {
            name,
            rename(name),
            rename(parameter).rpartition(".")[0],
            name.removeprefix(f"{model.base_model_prefix}."),
        }
        if parameter not in tied and names.isdisjoint(stored):
            raise ValueError(f"{folder} is not complete: its files hold nothing for {name}.")


def precision(config: PretrainedConfig) -> str:
    """The precision of the quantized layers in words; `ValueError` if vLLM has no kernel for a scheme on this machine."""
    device = torch.device("cpu" if is_cpu_engine() else "cuda")
    check_engine_cpu(device.type)
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        return "not quantized"
    stored = stored if isinstance(stored, dict) else stored.to_dict()
    if stored.get("quant_method") != "compressed-tensors":
        return str(stored.get("quant_method"))
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
