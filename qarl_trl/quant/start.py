"""Start a run from a compressed-tensors checkpoint: from its master weights, or from its low-bit tensors unchanged (paper Sec. 3.1).

transformers' own loader of such a checkpoint leaves scales and replaced forwards in the model, multiplies in float32 where the
master weights are float32, and loads broken checkpoints without an error (dev/log.md, 2026-11-22).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from .convert import apply_quantization, quantized_modules
from .gemm import GemmChoice, plain_gemm
from .quantize import LowBitWeight, meta_tensors, quantize_weight
from .scheme import MASTER_CAST_DTYPE, scheme_for


# Arguments that both `from_pretrained` and `snapshot_download` take.
_HUB_ARGUMENTS = ("revision", "token", "cache_dir", "force_download", "local_files_only")


@dataclass(frozen=True)
class QuantizedSource:
    """A compressed-tensors checkpoint on disk: its name as the user wrote it, its folder, and what its `config.json` says."""

    name: str
    folder: Path
    config: QuantizationConfig

    @cached_property
    def tensors(self) -> dict[str, Any]:
        """The names of all tensors, each with the open file that holds it."""
        found: dict[str, Any] = {}
        for file in sorted(self.folder.glob("model*.safetensors")):
            try:
                content = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise self._broken(f"{file.name} cannot be read ({error})") from error
            found |= dict.fromkeys(content.keys(), content)
        return found

    @cached_property
    def layers(self) -> dict[str, QuantizationScheme]:
        """The layers stored in low bits, with their schemes."""
        linear = nn.Linear(1, 1, device="meta")
        names = (name.rpartition(".") for name in sorted(self.tensors))
        low_bit = {layer for layer, _, local in names if local in ("weight_packed", "weight_scale")}
        found = {layer: scheme_for(layer, linear, self.config) for layer in sorted(low_bit)}
        if not all(found.values()):
            raise self._broken("it has layers in low bits, or without weights, that quantization_config does not have")
        return found

    def plan(self) -> QuantizationConfig:
        """`config` for the learner, which rounds to nearest, whatever method found the checkpoint's quantized values."""
        plan = self.config.model_copy(deep=True)
        for group in plan.config_groups.values():
            group.weights.actorder = group.weights.observer = None
        return plan

    def dense(self, without: Collection[str] = ()) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the unquantized model (low bits decompressed), in the stored dtype; no weights of layers in `without`."""
        for layer in self.layers.keys() - without:
            yield f"{layer}.weight", self._decompressed(layer)["weight"]
        for name in self.tensors:
            layer, _, local = name.rpartition(".")
            if layer not in {*self.layers, *without} or local == "bias":
                yield name, self._read(name)

    def low_bit(self, layer: str, meta: LowBitWeight) -> LowBitWeight:
        """A layer's low-bit tensors as stored. In an unquantized checkpoint, the layer's weight is quantized."""
        if not self.layers:
            return quantize_weight(self._read(f"{layer}.weight"), meta.scheme)
        return LowBitWeight({local: self._read(f"{layer}.{local}") for local in meta.data}, meta.scheme)

    def check_stored(self, layer: str, meta: LowBitWeight) -> None:
        """Refuse (`ValueError`) a layer whose stored tensors differ from `meta` in dtype or shape, or have a group order."""
        if not self.layers:
            return
        parts = {local: self._file(f"{layer}.{local}").get_slice(f"{layer}.{local}") for local in meta.data}
        found = {local: (part[:0].dtype, *part.get_shape()) for local, part in parts.items()}
        needed = {local: (tensor.dtype, *tensor.shape) for local, tensor in meta.data.items()}
        if found != needed or f"{layer}.weight_g_idx" in self.tensors:
            raise ValueError(
                f"lora_base='frozen' needs {layer!r} in {self.name} stored as {needed}, got {found}, or actorder: group. Use 'merged', "
                "or quantize it again (dtype bfloat16, actorder: static)."
            )

    def _decompressed(self, layer: str) -> dict[str, Tensor]:
        scheme = self.layers[layer]
        stored_as = CompressionFormat(scheme.format or infer_module_format(nn.Linear, scheme))
        compressor = BaseCompressor.get_value_from_registry(stored_as.value)
        stored = {local: self._read(f"{layer}.{local}") for local in compressor.compression_param_names(scheme)}
        shape = stored["weight_shape"].tolist() if "weight_shape" in stored else LowBitWeight(stored, scheme).shape
        needed = {local: tuple(tensor.shape) for local, tensor in meta_tensors(scheme, *shape).items()}
        for local in stored.keys() & needed.keys():
            if (found := tuple(stored[local].shape)) != needed[local]:  # decompression would silently broadcast some
                raise self._broken(f"{layer}.{local} must have shape {needed[local]}, got {found}")
        return compressor.decompress(stored, scheme)

    def _read(self, name: str) -> Tensor:
        return self._file(name).get_tensor(name)

    def _file(self, name: str) -> Any:
        if name not in self.tensors:
            raise self._broken(f"{name} is missing")
        return self.tensors[name]

    def _broken(self, what: str) -> ValueError:
        return ValueError(f"The quantized checkpoint {self.name} is incomplete or damaged: {what}. Download it again.")


def quantized_source(name: str, plan: QuantizationConfig | None = None, **kwargs: Any) -> QuantizedSource | None:
    """
    The checkpoint `name` if it is quantized, otherwise `None`; `kwargs` are those of `from_pretrained`.

    With a `plan`, this also returns an unquantized checkpoint. Reads only `config.json` (from the Hub: downloads all files). `ValueError`
    if it is quantized by another method, or has a transform_config.
    """
    raw = getattr(AutoConfig.from_pretrained(name, **kwargs), "quantization_config", plan)
    if raw is None:
        return None
    raw = raw if isinstance(raw, dict) else raw.to_dict()
    if raw.get("quant_method") != "compressed-tensors" or raw.get("transform_config"):
        raise ValueError(
            f"{name} must be quantized by compressed-tensors without a transform_config (rotations that only the engine would "
            f"apply), got quantization_config={raw}. Start from the unquantized model, or see examples/llmcompressor."
        )
    folder, inner = Path(name), kwargs.get("subfolder") or ""
    if not folder.is_dir():
        hub = {key: value for key, value in kwargs.items() if key in _HUB_ARGUMENTS}
        patterns = [str(Path(inner, kind)) for kind in ("*.safetensors", "*.json")]
        folder = Path(snapshot_download(name, allow_patterns=patterns, **hub))
    return QuantizedSource(name, folder / inner, QuantizationConfig.model_validate(raw))


def load_master_weights(
    name: str,
    *,
    dtype: torch.dtype | str = "float32",
    architecture: Any = None,
    freeze: QuantizationConfig | None = None,
    gemm: GemmChoice = plain_gemm,
    **kwargs: Any,
) -> PreTrainedModel:
    """
    Load a compressed-tensors checkpoint, by its folder or Hub id, as an unquantized model on the CPU.

    `dtype` is the master weights' dtype (`"auto"`: the checkpoint's), `architecture` the model class (default: that in `config.json`);
    `kwargs` are arguments of `from_pretrained` (`revision`, `subfolder`, `token`, ...) and fields of the model's config.

    With a plan in `freeze`, its layers become [`~qarl_trl.quant.frozen.FrozenLinear`]s with the stored low-bit tensors (an unquantized
    checkpoint is quantized by layer); all else is bfloat16. `ValueError` if it is not quantized, lacks a tensor, or cannot be frozen.
    """
    source, frozen = quantized_source(name, freeze, **kwargs), set[str]()
    if source is None:
        raise ValueError(f"{name} is not quantized. Use from_pretrained.")
    config, settings = AutoConfig.from_pretrained(name, return_unused_kwargs=True, **kwargs)
    vars(config).pop("quantization_config", None)
    if architecture is None:
        architecture = getattr(transformers, (config.architectures or [""])[0], transformers.AutoModelForCausalLM)
    if freeze is not None:

        class Frozen(architecture):
            def __init__(self, *args: Any, **settings: Any) -> None:
                super().__init__(*args, **settings)
                apply_quantization(self, freeze, gemm=gemm, frozen=True)

        with torch.device("meta"):
            layers: dict[str, Any] = dict(quantized_modules(Frozen(config)))
        for layer_name, layer in layers.items():
            source.check_stored(layer_name, layer.held)
        frozen = set(layers)
    model, report = (Frozen if frozen else architecture).from_pretrained(
        None,
        config=config,
        state_dict=dict(source.dense(without=frozen)),
        dtype=MASTER_CAST_DTYPE if frozen else dtype,
        trust_remote_code=kwargs.get("trust_remote_code", False),
        output_loading_info=True,
        **settings,
    )
    model.__class__ = architecture
    for layer_name, layer in cast(Any, quantized_modules(model)):
        layer.held = source.low_bit(layer_name, layer.held)
    if missing := sorted(map(str, report["missing_keys"])):  # transformers would leave them at random values
        raise source._broken(f"{missing[:3]} are missing")
    model.config._name_or_path = model.name_or_path = name
    if model.can_generate():
        with suppress(OSError):  # no such file: the defaults stay
            model.generation_config = GenerationConfig.from_pretrained(source.folder)
    return model
