"""A compressed-tensors checkpoint on disk: its plan, its low-bit tensors as stored, and its weights decompressed."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig

from .patterns import check_patterns, patterns_of
from .quantize import LowBitWeight, compressor_of, meta_tensors, quantize_weight
from .scheme import MASTER_CAST_DTYPE, scheme_for


# Arguments that both `from_pretrained` and `snapshot_download` take.
_HUB_ARGUMENTS = ("revision", "token", "cache_dir", "force_download", "local_files_only")


# Says which file of several holds a tensor.
INDEX = "model.safetensors.index.json"


def weight_map(index: Path) -> dict[str, str]:
    """
    The file of each tensor, as an index of several files says.

    Args:
        index: A `model.safetensors.index.json`.

    Raises:
        ValueError: if it is not an index, or names a file of another folder.
    """
    try:
        content = json.loads(index.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{index} cannot be read: {error}") from error

    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not all(_is_file_name(name) for name in files.values()):
        raise ValueError(f"{index} must have weight_map, with the name of a file beside it for each tensor")
    return files


def check_index(folder: Path) -> None:
    """
    Refuse an index of weights that is none, or whose files are not all there.

    Args:
        folder: A model's folder, with an index or without.

    Raises:
        ValueError: as [`weight_map`] does, or for missing files.
    """
    index = folder / INDEX
    if not index.is_file():
        return

    files = set(weight_map(index).values())
    missing = sorted(name for name in files if not (folder / name).is_file())
    # transformers takes one file before an index.
    if missing and not (folder / "model.safetensors").is_file():
        raise ValueError(f"{index} names {missing}, which are not there. Download the model again.")


def check_one_index(folder: Path) -> None:
    """
    Refuse an index beside `model.safetensors` that does not list it: transformers reads the file, vLLM the index.

    Args:
        folder: A model's folder, with an index or without.

    Raises:
        ValueError: as [`weight_map`] does, or for such a folder.
    """
    index = folder / INDEX
    one = folder / "model.safetensors"
    if index.is_file() and one.is_file() and one.name not in weight_map(index).values():
        raise ValueError(
            f"{folder} must hold the weights of one model, got {one.name} beside {INDEX}, which lists other files: "
            "transformers reads the one, vLLM the others. Move what is not the model out of the folder."
        )


def _is_file_name(name: Any) -> bool:
    """Whether a value is the name of a file, without a folder."""
    return isinstance(name, str) and Path(name).name == name


@dataclass(frozen=True)
class CheckpointSource:
    """
    A checkpoint on disk to start from: in compressed-tensors' format, or an unquantized one to freeze.

    Attributes:
        name: Its name as the user wrote it.
        folder: Where its files are.
        config: What its `config.json` says of the quantization; of an unquantized one the plan.
    """

    name: str
    folder: Path
    config: QuantizationConfig

    @cached_property
    def files(self) -> dict[str, Any]:
        """The names of all tensors, each with the open file that holds it."""
        files: dict[str, Any] = {}
        for path in self._paths():
            try:
                # Reads the header alone; values are read one tensor at a time.
                file = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise self.broken(f"{path.name} cannot be read ({error})") from error
            files |= dict.fromkeys(file.keys(), file)
        return files

    def _paths(self) -> list[Path]:
        """
        The files that hold the weights: those of the index, or one. Others in the folder are backups, or of another
        model.
        """
        index = self.folder / INDEX
        one = self.folder / "model.safetensors"
        if not index.exists() and not one.exists():
            others = sorted(file.name for file in self.folder.glob("pytorch_model*.bin"))
            raise ValueError(
                f"{self.name} must have {one.name} or {index.name}, got {', '.join(others) or 'neither'}. Only "
                "safetensors are read here. Download what is missing, or write them from a pytorch_model.bin: "
                f"AutoModelForCausalLM.from_pretrained({self.name!r}, dtype='float32').save_pretrained(FOLDER), and "
                "the tokenizer beside them."
            )
        if not index.exists():
            return [one]
        if one.exists():
            raise self.broken("it has model.safetensors beside an index of several files, which may be of two models")

        try:
            names = set(weight_map(index).values())
        except ValueError as error:
            raise self.broken(f"{index.name} cannot be used ({error})") from error
        return [self.folder / name for name in sorted(names)]

    @cached_property
    def layers(self) -> dict[str, QuantizationScheme]:
        """The layers stored in low bits, with their schemes."""
        low_bit = set()
        for name in self.files:
            layer, _, local = name.rpartition(".")
            if local in ("weight_packed", "weight_scale"):
                low_bit.add(layer)

        # Only linear layers are stored in low bits, and targets may name the class.
        linear = nn.Linear(1, 1, device="meta")
        check_patterns(patterns_of(self.config), low_bit)
        schemes = {layer: scheme_for(layer, linear, self.config) for layer in sorted(low_bit)}
        if not all(schemes.values()):
            raise self.broken("it has layers in low bits, or without weights, that quantization_config does not have")
        return schemes

    def plan(self) -> QuantizationConfig:
        """
        `config` for the learner, which rounds to nearest, whatever method found the checkpoint's quantized values.
        """
        plan = self.config.model_copy(deep=True)
        # Both say how somebody found the quantized values; `resolve_config` refuses other ways than the learner's.
        for group in plan.config_groups.values():
            group.weights.actorder = None
            group.weights.observer = None
        return plan

    def dense(self, without: Collection[str] = ()) -> Iterator[tuple[str, Tensor]]:
        """
        The tensors of the unquantized model, in the stored dtype: low bits are decompressed.

        Args:
            without: Layers whose weights are left out; their biases are not.
        """
        for layer in self.layers.keys() - without:
            scheme = self.layers[layer]
            stored, _ = self._stored(layer)
            yield f"{layer}.weight", compressor_of(scheme).decompress(stored, scheme)["weight"]

        for name in self._names_of_plain(without):
            yield name, self._read(name)

    def dense_without_values(self, without: Collection[str] = ()) -> Iterator[tuple[str, Tensor]]:
        """
        The tensors of [`dense`], with its names and shapes, on the meta device. It refuses the same checkpoints.

        Args:
            without: As there.
        """
        for layer in self.layers.keys() - without:
            _, shape = self._stored(layer)
            yield f"{layer}.weight", torch.empty(shape, dtype=MASTER_CAST_DTYPE, device="meta")

        for name in self._names_of_plain(without):
            # A tensor of a file takes no memory until its values are read.
            yield name, self._read(name).to("meta")

    def _names_of_plain(self, without: Collection[str]) -> Iterator[str]:
        """The names of the tensors that [`dense`] takes as they are stored."""
        # Of a layer in low bits only the bias is left: its other tensors became the weight, or are not wanted.
        not_plain = {*self.layers, *without}
        for name in self.files:
            layer, _, local = name.rpartition(".")
            if layer not in not_plain or local == "bias":
                yield name

    def low_bit_weight(self, layer: str, empty: LowBitWeight) -> LowBitWeight:
        """
        A layer's low-bit tensors as stored. In an unquantized checkpoint, the layer's weight is quantized.

        Args:
            layer: Its name.
            empty: The weight on the meta device, with the scheme and the names of the tensors.
        """
        if not self.layers:
            return quantize_weight(self._read(f"{layer}.weight"), empty.scheme)

        data = {local: self._read(f"{layer}.{local}") for local in empty.data}
        return LowBitWeight(data, empty.scheme)

    def check_stored(self, layer: str, empty: LowBitWeight) -> None:
        """
        Refuse (`ValueError`) a layer whose stored tensors differ from `empty` in dtype or shape, or have a group
        order.
        """
        if not self.layers:
            return

        stored = {}
        for local in empty.data:
            # The slice knows its shape from the file's header, and `[:0]` reads no values.
            tensor = self._file(f"{layer}.{local}").get_slice(f"{layer}.{local}")
            stored[local] = (tensor[:0].dtype, *tensor.get_shape())
        needed = {local: (tensor.dtype, *tensor.shape) for local, tensor in empty.data.items()}

        if stored != needed or f"{layer}.weight_g_idx" in self.files:
            raise ValueError(
                f"lora_base='frozen' needs {layer!r} in {self.name} stored as {needed}, "
                f"got {stored}, or actorder: group. "
                "Use 'merged', or quantize it again (dtype bfloat16, actorder: static)."
            )

    def _stored(self, layer: str) -> tuple[dict[str, Tensor], tuple[int, ...]]:
        """The tensors of a layer that compressed-tensors decompresses, and the shape of its weight."""
        scheme = self.layers[layer]
        compressor = compressor_of(scheme)
        # By the compressor's own list of names, without a bias.
        stored = {local: self._read(f"{layer}.{local}") for local in compressor.compression_param_names(scheme)}

        if "weight_shape" in stored:
            shape = tuple(stored["weight_shape"].tolist())
        else:
            shape = LowBitWeight(stored, scheme).shape
        # Decompression would silently broadcast some wrong shapes.
        for local, needed in meta_tensors(scheme, *shape).items():
            if local in stored and stored[local].shape != needed.shape:
                raise self.broken(
                    f"{layer}.{local} must have shape {tuple(needed.shape)}, got {tuple(stored[local].shape)}"
                )
        return stored, shape

    def _read(self, name: str) -> Tensor:
        return self._file(name).get_tensor(name)

    def _file(self, name: str) -> Any:
        if name not in self.files:
            raise self.broken(f"{name} is missing")
        return self.files[name]

    def broken(self, what: str) -> ValueError:
        """The error to raise for a checkpoint in which something is wrong."""
        return ValueError(f"The checkpoint {self.name} is incomplete or damaged: {what}. Download it again.")


def quantized_source(name: str, plan: QuantizationConfig | None = None, **kwargs: Any) -> CheckpointSource | None:
    """
    The checkpoint `name` if it is quantized, otherwise `None`. Reads only `config.json` (from the Hub: downloads all
    files).

    Args:
        name: A folder or a Hub id.
        plan: With a plan this also returns an unquantized checkpoint.
        kwargs: Those of `from_pretrained`.

    Raises:
        ValueError: if it is quantized by another method, or has a transform_config.
    """
    # The plan stands in for a missing `quantization_config`, so that an unquantized checkpoint can be frozen, too.
    quantization = getattr(AutoConfig.from_pretrained(name, **kwargs), "quantization_config", plan)
    if quantization is None:
        return None
    if not isinstance(quantization, dict):
        quantization = quantization.to_dict()

    if quantization.get("quant_method") != "compressed-tensors" or quantization.get("transform_config"):
        raise ValueError(
            f"{name} must be quantized by compressed-tensors without a transform_config "
            f"(rotations that only the engine would apply), got quantization_config={quantization}. "
            "Start from the unquantized model, or see examples/llmcompressor."
        )

    folder = Path(name)
    subfolder = kwargs.get("subfolder") or ""
    if not folder.is_dir():
        hub_arguments = {key: value for key, value in kwargs.items() if key in _HUB_ARGUMENTS}
        # No code, and no second copy of the weights in another format.
        patterns = [str(Path(subfolder, kind)) for kind in ("*.safetensors", "*.json")]
        folder = Path(snapshot_download(name, allow_patterns=patterns, **hub_arguments))
    return CheckpointSource(name, folder / subfolder, QuantizationConfig.model_validate(quantization))
