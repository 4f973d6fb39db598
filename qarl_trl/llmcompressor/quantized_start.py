"""High-precision masters from a quantized checkpoint, and the scales to keep.

Invariant: masters are compressed-tensors' own decompression, every tensor of the checkpoint is accounted for before one
is read, and the model that comes out has no trace of quantization: `model.config.quantization_config` is gone, and its
parameters are those of the unquantized architecture (paper Sec. 3.1: masters in high precision).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, QuantizationStrategy
from compressed_tensors.utils import match_targets
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from ..quant.plan import MINMAX


QParams = tuple[Tensor, Tensor | None]

# Local names of a compressed layer beside its codes; `weight` alone says nothing.
_MARKS = ("weight_packed", "weight_scale")
_INDEX = "model.safetensors.index.json"
_HIGH_PRECISION = ("BF16", "F16", "F32", "F64")
_KEPT = {"weights", "input_activations", "output_activations", "targets"}


@dataclass(frozen=True)
class QuantizedSource:
    """
    A compressed-tensors checkpoint on disk.

    Attributes:
        name (`str`): As the user wrote it.
        folder (`Path`): Where its files are.
        config (`QuantizationConfig`): What its `config.json` says.
    """

    name: str
    folder: Path
    config: QuantizationConfig

    @cached_property
    def tensors(self) -> dict[str, tuple[Path, tuple[int, ...], str]]:
        """File, shape and dtype of every tensor, from the headers of the files."""
        found: dict[str, tuple[Path, tuple[int, ...], str]] = {}
        for file in self._files():
            try:
                with safe_open(file, framework="pt") as content:
                    for name in content.keys():  # noqa: SIM118 (not a mapping)
                        header = content.get_slice(name)
                        found[name] = (file, tuple(header.get_shape()), header.get_dtype())
            except (OSError, SafetensorError) as error:
                raise self._broken(f"{file.name} cannot be read ({error})") from error
        return found

    @cached_property
    def layers(self) -> dict[str, QuantizationScheme]:
        """The layers stored in low bits, with their schemes, after a check of all that they need."""
        schemes = {target: group for group in self.config.config_groups.values() for target in group.targets}
        linear, found = nn.Linear(1, 1, device="meta"), {}
        for name in sorted({n.rpartition(".")[0] for n in self.tensors if n.endswith(_MARKS)}):
            targets = match_targets(name, linear, list(schemes))
            if not targets:
                raise self._broken(f"{name!r} is stored in low bits, but no group of quantization_config has it")
            scheme = schemes[targets[0]].model_copy(deep=True)
            scheme.format = CompressionFormat(scheme.format or infer_module_format(nn.Linear, scheme))
            self._check_layer(name, scheme)
            found[name] = scheme
        self._check_rest(found)
        if not found:
            raise self._broken("config.json has a quantization_config, but no tensor is in low bits")
        return found

    def plan(self) -> QuantizationConfig:
        """
        `config` as the learner carries it out: round-to-nearest, whatever method made the codes.

        How a code was found (GPTQ's activation order, an observer) is of no meaning once it is found.
        """
        groups = {}
        for name, group in self.config.config_groups.items():
            group = QuantizationScheme(**{k: v for k, v in group.model_copy(deep=True) if k in _KEPT})
            if group.weights is not None:
                group.weights.actorder, group.weights.observer = None, MINMAX
            groups[name] = group
        return QuantizationConfig(
            config_groups=groups, ignore=list(self.config.ignore or []), kv_cache_scheme=self.config.kv_cache_scheme
        )

    def dense(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the unquantized model, layers decompressed by compressed-tensors, in the stored dtype."""
        for name, scheme in self.layers.items():
            compressor = BaseCompressor.get_value_from_registry(scheme.format.value)
            state = compressor.decompress(self._layer(name), scheme)
            if not torch.isfinite(state["weight"]).all():
                raise self._broken(f"{name!r} decompresses to NaN or infinity")
            yield f"{name}.weight", state["weight"]
        for name in self._rest(self.layers):
            yield name, self._read(name)

    def qparams(self) -> dict[str, QParams]:
        """
        Scale, bfloat16 `(out, groups)`, and zero point, int8 of that shape or `None`, of every low-bit layer.

        Raises:
            ValueError: for scales that cannot be kept: reordered columns (`g_idx`), or another dtype than bfloat16.
        """
        return {name: self._qparams(name, scheme) for name, scheme in self.layers.items()}

    def codes(self, layer: str) -> Tensor:
        """The stored codes of a layer: `weight_packed`, or the float8 or int8 `weight`."""
        return self._read(f"{layer}.weight_packed" if "weight_packed" in self._locals(layer) else f"{layer}.weight")

    def _qparams(self, name: str, scheme: QuantizationScheme) -> QParams:
        state = self._layer(name)
        if "weight_g_idx" in state:
            raise ValueError(
                f"{self.name}: layer {name!r} was made with actorder='group': its columns are in another order "
                "(weight_g_idx), so a scale belongs to no block of neighbouring columns and cannot be frozen. Use "
                "quant_freeze_scales=False, or a checkpoint made with actorder='weight' or none."
            )
        scale, zero_point = state["weight_scale"], state.get("weight_zero_point")
        if scale.dtype != torch.bfloat16:
            raise ValueError(
                f"{self.name}: the scales of {name!r} are {scale.dtype}, and learner and engine compute with bfloat16 "
                "ones, so freezing them would not keep the checkpoint's numbers. Use quant_freeze_scales=False, or "
                "quantize the model from bfloat16."
            )
        if scheme.weights.symmetric:
            zero_point = None
        elif scheme.format == CompressionFormat.pack_quantized:
            zero_point = unpack_from_int32(zero_point, scheme.weights.num_bits, scale.shape, packed_dim=0)
        return scale, zero_point

    def _check_layer(self, name: str, scheme: QuantizationScheme) -> None:
        compressor = BaseCompressor.get_value_from_registry(scheme.format.value)
        needed, present = set(compressor.compression_param_names(scheme)), self._locals(name)
        missing = sorted(needed - present)
        if missing:
            raise self._broken(f"{name!r} lacks {missing}; it has {sorted(present)}")
        shapes = {local: self.tensors[f"{name}.{local}"][1] for local in present}
        if scheme.format == CompressionFormat.pack_quantized:
            rows, columns = (int(n) for n in self._read(f"{name}.weight_shape"))
            words = (rows, math.ceil(columns * scheme.weights.num_bits / 32))
            if shapes["weight_packed"] != words:
                raise self._broken(f"{name}.weight_packed has shape {shapes['weight_packed']}, and {words} was needed")
        else:
            rows, columns = shapes.get("weight", shapes.get("weight_packed"))
        if scheme.weights.strategy in (QuantizationStrategy.CHANNEL, QuantizationStrategy.GROUP):
            size = scheme.weights.group_size if scheme.weights.strategy == QuantizationStrategy.GROUP else columns
            scales = (rows, math.ceil(columns / size))
            if shapes["weight_scale"] != scales:
                raise self._broken(f"{name}.weight_scale has shape {shapes['weight_scale']}, and {scales} was needed")

    def _rest(self, layers: Iterable[str]) -> list[str]:
        """The tensors that no low-bit layer consists of: embeddings, norms, biases, ignored layers."""
        layers = set(layers)
        return [n for n in self.tensors if n.rpartition(".")[0] not in layers or n.endswith(".bias")]

    def _check_rest(self, layers: Iterable[str]) -> None:
        # Codes whose scale is lost would otherwise load as if they were the weights.
        for name in self._rest(layers):
            if name.endswith("weight") and self.tensors[name][2] not in _HIGH_PRECISION:
                raise self._broken(f"{name} is {self.tensors[name][2]} and has no weight_scale beside it")

    def _locals(self, layer: str) -> set[str]:
        return self._by_layer.get(layer, set())

    @cached_property
    def _by_layer(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for name in self.tensors:
            layer, _, local = name.rpartition(".")
            found.setdefault(layer, set()).add(local)
        return found

    def _layer(self, name: str) -> dict[str, Tensor]:
        return {local: self._read(f"{name}.{local}") for local in self._locals(name) if local != "bias"}

    def _read(self, name: str) -> Tensor:
        file = self.tensors[name][0]
        try:
            with safe_open(file, framework="pt") as content:
                return content.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise self._broken(f"{name} cannot be read from {file.name} ({error})") from error

    def _files(self) -> list[Path]:
        index = self.folder / _INDEX
        if index.is_file():
            files = [self.folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        else:
            files = sorted(self.folder.glob("*.safetensors"))
        missing = [file.name for file in files if not file.is_file()]
        if missing or not files:
            raise self._broken(f"the files {missing or '*.safetensors'} are missing")
        return files

    def _broken(self, what: str) -> ValueError:
        return ValueError(
            f"The quantized checkpoint {self.name} is incomplete or corrupt: {what}. Nothing was trained. Download or "
            "save it again."
        )


def quantized_source(
    name: str, revision: str | None = None, trust_remote_code: bool = False
) -> QuantizedSource | None:
    """
    The checkpoint `name` if it is quantized, otherwise `None`. Reads `config.json` alone (from the Hub: all files).

    Raises:
        ValueError: when it is quantized by something else than compressed-tensors, or in a way that has no masters.
    """
    config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    raw = getattr(config, "quantization_config", None)
    if raw is None:
        return None
    raw = raw if isinstance(raw, dict) else raw.to_dict()
    method = raw.get("quant_method")
    if method != "compressed-tensors":
        raise ValueError(
            f"{name} is quantized by {method!r}, and masters can only be made from compressed-tensors checkpoints. "
            "Start from the unquantized model, or quantize it with llm-compressor."
        )
    if raw.get("transform_config"):
        raise ValueError(
            f"{name} has a transform_config: rotations that the engine applies while it runs, which the learner does "
            "not. Use a model whose transforms are folded into the weights (`qarl-trl precondition`)."
        )
    try:
        parsed = QuantizationConfig.model_validate(raw)
    except ValueError as error:
        raise ValueError(f"{name} has a quantization_config that cannot be used: {error}") from error
    folder = Path(name)
    if not folder.is_dir():
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=["*.safetensors", "*.json"]))
    return QuantizedSource(name, folder, parsed)


def load_masters(
    name: str,
    *,
    dtype: torch.dtype | str = "float32",
    architecture: type | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    **kwargs: Any,
) -> PreTrainedModel:
    """
    Load a compressed-tensors checkpoint as an unquantized model.

    Args:
        name (`str`): Folder or Hub id of the quantized checkpoint.
        dtype (`torch.dtype` or `str`, *optional*, defaults to `"float32"`, as TRL's): Of the masters; `"auto"` is the
            checkpoint's.
        architecture (`type`, *optional*): Model class; by default the one in `config.json`.
        revision (`str`, *optional*): Of a Hub id.
        trust_remote_code (`bool`, *optional*): As in transformers.
        kwargs: Fields of the model's config, and arguments of `from_pretrained`.

    Returns:
        `PreTrainedModel`: On the CPU, with the decompressed weights.

    Raises:
        ValueError: when the checkpoint is not quantized, is incomplete, or has tensors that the model does not.
    """
    source = quantized_source(name, revision, trust_remote_code)
    if source is None:
        raise ValueError(f"{name} is not quantized. Use from_pretrained.")
    config, kwargs = AutoConfig.from_pretrained(
        name, revision=revision, trust_remote_code=trust_remote_code, return_unused_kwargs=True, **kwargs
    )
    del config.quantization_config
    if architecture is None:
        architecture = getattr(transformers, (config.architectures or [""])[0], transformers.AutoModelForCausalLM)
    model, report = architecture.from_pretrained(
        None,
        config=config,
        state_dict=dict(source.dense()),
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # reported below, with the name of the checkpoint
        **kwargs,
    )
    problems = {kind: report.get(kind) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    wrong = [f"{kind.replace('_', ' ')} {sorted(map(str, found))[:3]}" for kind, found in problems.items() if found]
    if wrong:
        raise source._broken(f"its tensors are not those of {type(model).__name__}: {'; '.join(wrong)}")
    model.config._name_or_path = model.name_or_path = name
    if model.can_generate():
        with suppress(OSError):  # it has none: the defaults stay
            model.generation_config = GenerationConfig.from_pretrained(name, revision=revision)
    return model
