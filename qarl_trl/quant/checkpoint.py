"""A compressed-tensors checkpoint on disk: every tensor is accounted for before one is read.

transformers' own loader fills in missing tensors and drops those of a wrong shape (dev/log.md, 2026-11-22).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor, compress_module
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, initialize_module_for_quantization
from compressed_tensors.utils import match_targets
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig

from .reference import QParams
from .scheme import MINMAX


# What `from_pretrained` and `snapshot_download` both take.
_HUB_ARGUMENTS = ("revision", "token", "cache_dir", "force_download", "local_files_only")
_INDEX = "model.safetensors.index.json"
_HIGH_PRECISION = ("BF16", "F16", "F32", "F64")


@dataclass(frozen=True)
class QuantizedSource:
    """A compressed-tensors checkpoint on disk: its name as the user wrote it, its folder, and what its `config.json` says."""

    name: str
    folder: Path
    config: QuantizationConfig

    @cached_property
    def tensors(self) -> dict[str, Any]:
        """The names of all tensors, each with the open file that holds it."""
        index, found = self.folder / _INDEX, {}
        if index.is_file():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            if outside := [name for name in names if Path(name).name != name]:
                raise self.broken(f"{_INDEX} names {outside[0]!r}, which is not a file of its folder")
            files = [self.folder / name for name in names]
        else:
            files = sorted(self.folder.glob("*.safetensors"))
        for file in files:
            try:
                content = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise self.broken(f"{file.name} cannot be read ({error})") from error
            found |= dict.fromkeys(content.keys(), content)
        if not files:
            raise self.broken("the files *.safetensors are missing")
        return found

    @cached_property
    def layers(self) -> dict[str, QuantizationScheme]:
        """The layers stored in low bits, with their schemes, after a check of all that they need."""
        schemes, found = {}, {}
        for group in self.config.config_groups.values():
            scheme = group.model_copy(deep=True)
            scheme.format = CompressionFormat(scheme.format or infer_module_format(nn.Linear, scheme))
            schemes |= dict.fromkeys(group.targets, scheme)
        linear = nn.Linear(1, 1, device="meta")
        expected = cache(lambda rows, columns, target: _stored_shapes(rows, columns, schemes[target]))
        for name, present in sorted(self._modules.items()):
            plain = "weight" not in present or self._header(f"{name}.weight")[1] in _HIGH_PRECISION
            if plain and not present & {"weight_packed", "weight_scale"}:
                continue
            target = next(iter(match_targets(name, linear, list(schemes))), None)
            if target is None:
                raise self.broken(f"{name!r} is stored in low bits, but no group of quantization_config has it")
            compressor = BaseCompressor.get_value_from_registry(schemes[target].format.value)
            missing = sorted(set(compressor.compression_param_names(schemes[target])) - present)
            if missing:
                raise self.broken(f"{name!r} lacks {missing}; it has {sorted(present)}")
            for local, shape in expected(*self._matrix_shape(name), target).items():
                if local in present and (got := self._header(f"{name}.{local}")[0]) != shape:
                    raise self.broken(f"{name}.{local} must have shape {shape}, got {got}")
            found[name] = schemes[target]
        if not found:
            raise self.broken("config.json has a quantization_config, but no tensor is in low bits")
        return found

    def plan(self) -> QuantizationConfig:
        """`config` as the learner carries it out: round-to-nearest, whatever method found the quantized values."""
        groups = {}
        for name, group in self.config.config_groups.items():
            groups[name] = group.model_copy(deep=True, update={"format": None})
            if group.weights is not None:
                groups[name].weights.actorder, groups[name].weights.observer = None, MINMAX
        return self.config.model_copy(update={"config_groups": groups})

    def dense(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the unquantized model, layers decompressed by compressed-tensors, in the stored dtype."""
        for layer in self.layers:
            weight = self._decompressed(layer)["weight"]
            if not torch.isfinite(weight).all():
                raise self.broken(f"{layer!r} decompresses to NaN or infinity")
            yield f"{layer}.weight", weight
        for name in self.tensors:
            layer, _, local = name.rpartition(".")
            if layer not in self.layers or local == "bias":
                yield name, self._read(name)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of what [`dense`] yields, from the headers alone."""
        found = {f"{layer}.weight": self._matrix_shape(layer) for layer in self.layers}
        kept = (name for name in self.tensors if name.rpartition(".")[0] not in self.layers or name.endswith(".bias"))
        return found | {name: self._header(name)[0] for name in kept}

    def qparams(self) -> dict[str, QParams]:
        """
        Scale, bfloat16 `(out, groups)`, and zero point, int8 of that shape or `None`, of every low-bit layer.

        `ValueError` for scales that cannot be kept: reordered columns (`g_idx`), or another dtype than bfloat16.
        """
        found = {}
        for name, scheme in self.layers.items():
            if "weight_g_idx" in self._modules[name]:
                raise ValueError(
                    f"{self.name}: layer {name!r} was made with actorder='group': a scale belongs to scattered columns "
                    "(weight_g_idx) and cannot be frozen. Use quant_freeze_scales=False, or actorder='weight' or none."
                )
            scale = self._read(f"{name}.weight_scale")
            if scale.dtype != torch.bfloat16:
                raise ValueError(
                    f"{self.name}: the scales of {name!r} must be bfloat16, got {scale.dtype}. Use "
                    "quant_freeze_scales=False, or quantize the model from bfloat16."
                )
            found[name] = scale, None if scheme.weights.symmetric else self._decompressed(name)["weight_zero_point"]
        return found

    def quantized(self, layer: str) -> Tensor:
        """The stored quantized values of a layer: `weight_packed`, or the float8 or int8 `weight`."""
        return self._read(f"{layer}.weight_packed" if "weight_packed" in self._modules[layer] else f"{layer}.weight")

    @cached_property
    def _modules(self) -> dict[str, set[str]]:
        """The modules that have tensors, with the local names of these."""
        found: dict[str, set[str]] = {}
        for name in self.tensors:
            module, _, local = name.rpartition(".")
            found.setdefault(module, set()).add(local)
        return found

    def _header(self, name: str) -> tuple[tuple[int, ...], str]:
        header = self.tensors[name].get_slice(name)
        return tuple(header.get_shape()), header.get_dtype()

    def _read(self, name: str) -> Tensor:
        return self.tensors[name].get_tensor(name)

    def _decompressed(self, layer: str) -> dict[str, Tensor]:
        scheme = self.layers[layer]
        stored = {local: self._read(f"{layer}.{local}") for local in self._modules[layer] - {"bias"}}
        return BaseCompressor.get_value_from_registry(scheme.format.value).decompress(stored, scheme)

    def _matrix_shape(self, layer: str) -> tuple[int, int]:
        if "weight_shape" in self._modules[layer]:
            return tuple(self._read(f"{layer}.weight_shape").tolist())
        if "weight" in self._modules[layer]:
            return self._header(f"{layer}.weight")[0]
        rows, columns = self._header(f"{layer}.weight_packed")[0]
        return rows, 2 * columns  # two 4-bit floats to a byte

    def broken(self, what: str) -> ValueError:
        """The error that the checkpoint is incomplete or corrupt, because of `what`."""
        problem = f"The quantized checkpoint {self.name} is incomplete or corrupt: {what}."
        return ValueError(f"{problem} Download or save it again.")


def _stored_shapes(rows: int, columns: int, scheme: QuantizationScheme) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a low-bit layer, by compressed-tensors' own compression of a layer without values."""
    layer = nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16, device="meta")
    initialize_module_for_quantization(layer, scheme, force_zero_point=False)
    compress_module(layer)
    # Without values, compressed-tensors 0.19 leaves zero points unpacked.
    return {name: tuple(t.shape) for name, t in layer.state_dict().items() if name != "weight_zero_point"}


def quantized_source(name: str, **kwargs: Any) -> QuantizedSource | None:
    """
    The checkpoint `name` if it is quantized, otherwise `None`; `kwargs` are those of `from_pretrained`.

    Reads `config.json` alone (from the Hub: all files). `ValueError` when it is quantized by something else than
    compressed-tensors, or in a way that has no master weights.
    """
    raw = getattr(AutoConfig.from_pretrained(name, **kwargs), "quantization_config", None)
    if raw is None:
        return None
    raw = raw if isinstance(raw, dict) else raw.to_dict()
    if raw.get("quant_method") != "compressed-tensors":
        raise ValueError(
            f"{name} is quantized by {raw.get('quant_method')!r}, and master weights can only be made from "
            "compressed-tensors. Start from the unquantized model, or quantize it with llm-compressor."
        )
    if raw.get("transform_config"):
        raise ValueError(
            f"{name} has a transform_config: rotations that the engine applies while it runs and the learner does not. Use a "
            "model whose transforms are folded into the weights (examples/llmcompressor/precondition.py)."
        )
    try:
        config = QuantizationConfig.model_validate(raw)
    except ValueError as error:
        raise ValueError(f"{name} has a quantization_config that cannot be used: {error}") from error
    folder, inner = Path(name), kwargs.get("subfolder") or ""
    if not folder.is_dir():
        hub = {key: value for key, value in kwargs.items() if key in _HUB_ARGUMENTS}
        patterns = [str(Path(inner, kind)) for kind in ("*.safetensors", "*.json")]
        folder = Path(snapshot_download(name, allow_patterns=patterns, **hub))
    return QuantizedSource(name, folder / inner, config)
