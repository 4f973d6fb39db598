"""Find, check and describe the checkpoint to evaluate, before an engine starts."""

from __future__ import annotations

import json
from pathlib import Path

from compressed_tensors.quantization import QuantizationConfig
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, PretrainedConfig

from ...export import files
from ...export.card import scheme_name
from ...quant.scheme import describe_scheme
from ...quant.start import QuantizedSource
from ...quant.store import iter_low_bit_weights
from ...rollout._vllm_cpu import is_cpu_engine
from ...rollout.cpu import check_engine_cpu
from ..plan.model import read_config, skeleton


def find_checkpoint(name_or_path: str, revision: str | None = None) -> tuple[Path, Path | None]:
    """
    The folder of a checkpoint; for a LoRA adapter, the folders of its base and the adapter. A Hub id is downloaded.

    `FileNotFoundError` if it holds no model, `ValueError` for an adapter without a frozen base or with the wrong base.
    """
    folder = Path(name_or_path).expanduser()
    if not folder.is_dir():
        folder = Path(snapshot_download(name_or_path, revision=revision, allow_patterns=list(files.READ_BY_ENGINE)))
    adapter = (folder / files.ADAPTER_CONFIG).is_file()
    for needed in (files.ADAPTER_CONFIG if adapter else "config.json", "*.safetensors", "tokenizer*"):
        if not any(folder.glob(needed)):  # without a tokenizer transformers makes an empty one
            raise FileNotFoundError(f"{folder} is no model: it has no {needed}.")
    if not adapter:
        return folder, None
    if not (folder / files.BASE_CONFIG).is_file() or (folder / "config.json").is_file():
        raise ValueError(
            f"{folder} must be a model, or an adapter that was trained beside a frozen base, got another adapter. Give its "
            f"{files.LOW_BIT_FOLDER}/ folder, or what `qarl-trl export` makes of it."
        )
    base, _ = find_checkpoint(*files.base_of(folder))
    files.check_base(folder, base)
    return base, folder


def check_complete(folder: Path, config: PretrainedConfig) -> None:
    """
    Refuse (`ValueError`) missing or cut-off files and, for a checkpoint in our schemes, missing tensors and wrong shapes.

    vLLM loads such a checkpoint without an error and generates garbage. It refuses a broken plain checkpoint itself.
    """
    index, found = folder / "model.safetensors.index.json", files.tensor_shapes(folder)
    listed = json.loads(index.read_text())["weight_map"] if index.is_file() else {}
    if missing := sorted(listed.keys() - found):
        raise ValueError(f"{folder} lacks {len(missing)} tensors of {index.name} ({missing[0]}). Download it again.")
    stored = getattr(config, "quantization_config", {"quant_method": None})
    if stored["quant_method"] != "compressed-tensors" or type(config) not in AutoModelForCausalLM._model_mapping:
        return
    plan = QuantizedSource(str(folder), folder, QuantizationConfig.model_validate(stored)).plan()
    try:
        model = skeleton(read_config(str(folder)), "bfloat16", plan=plan)
    except ValueError as error:  # a scheme that is not ours
        print(f"{folder}: its tensors are not checked for missing ones, because {error}")
        return
    for name, tensor in iter_low_bit_weights(model):
        if found.get(name) != (shape := tuple(tensor.shape)):
            raise ValueError(f"{folder} must hold {name} of shape {shape}, got {found.get(name)}. Download it again.")


def precision(config: PretrainedConfig) -> str:
    """The precision of the quantized layers in words; `ValueError` on a CPU that vLLM's engine does not support."""
    stored = getattr(config, "quantization_config", {"quant_method": "not quantized"})
    check_engine_cpu("cpu" if is_cpu_engine() else "cuda", four_bits="pack-quantized" in str(stored))
    if stored["quant_method"] != "compressed-tensors":
        return stored["quant_method"]
    schemes = QuantizationConfig.model_validate(stored).config_groups.values()
    return ", ".join(f"{scheme_name(scheme)} ({describe_scheme(scheme)})" for scheme in schemes)
