"""Check that a compressed-tensors checkpoint holds the tensors that its `config.json` says.

vLLM looks for missing tensors only in unquantized checkpoints. From a quantized one it loads what is there, leaves the
memory of the rest as it was, and answers garbage.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationScheme
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig

from ..quant.patterns import check_patterns, patterns_of
from ..quant.quantize import compressor_of
from .expected import Layouts, UnknownTensorsError, model_tensors
from .files import tensor_shapes


# A model may be saved in any of these, and so are its scales; an engine casts them to its own dtype.
HIGH_PRECISION = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Local names of tensors that only a layer in low bits has.
LOW_BIT_NAMES = (
    "weight_packed",
    "weight_scale",
    "weight_global_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
)


@dataclass(frozen=True)
class StoredTensor:
    """
    A tensor in a file, without its values.

    Attributes:
        file: The file that holds it.
        shape: Its shape.
        dtype: Its dtype.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


class Checked(Enum):
    """How much of a checkpoint was checked."""

    ALL = "all tensors that the model must have"
    STORED_LAYERS = "layers of which the files hold a part; a whole layer may be missing"
    NOTHING = "nothing, because the format is not known"
    OTHER_METHOD = "nothing: it is not quantized, or not by compressed-tensors"


@dataclass(frozen=True)
class TensorCheck:
    """
    The result of a check that found nothing wrong.

    Attributes:
        checked: How much was checked.
        reason: Why not all, for `STORED_LAYERS` and `NOTHING`; otherwise empty.
    """

    checked: Checked
    reason: str = ""


def check_tensors(folder: str | os.PathLike[str], trust_remote_code: bool = False) -> TensorCheck:
    """
    Refuse a compressed-tensors checkpoint that lacks a tensor, or has one of another shape or dtype.

    It reads the headers of the files, not the weights.

    Args:
        folder: A folder with a `config.json` and `*.safetensors`.
        trust_remote_code: As for `from_pretrained`. Of a model with code of its own, no tensor is known to be missing.

    Returns:
        What was checked.

    Raises:
        ValueError: if a tensor is missing or has another shape or dtype, if a file is damaged, or if a pattern of the
            `config.json` would match endlessly.
    """
    folder = Path(folder)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    raw: dict[str, Any] = getattr(config, "quantization_config", {"quant_method": None})
    if raw["quant_method"] != "compressed-tensors":
        return TensorCheck(Checked.OTHER_METHOD)

    stored = _stored_tensors(folder)
    try:
        layouts = Layouts(raw)
    except UnknownTensorsError as error:
        return TensorCheck(Checked.NOTHING, str(error))
    check_patterns(patterns_of(layouts.config), _modules_of(stored))

    result = TensorCheck(Checked.ALL)
    try:
        expected = model_tensors(config, layouts)
        _check_names(expected, stored)
    except UnknownTensorsError as error:
        result = TensorCheck(Checked.STORED_LAYERS, str(error))
        expected = {}

    for name, tensor in expected.items():
        _check_tensor(folder, name, tensor, stored)

    # The model of transformers may lack layers of the file, such as those that predict several tokens.
    checked_layers = {_layer_of(name) for name in expected}
    for layer in sorted(_low_bit_layers(stored) - checked_layers):
        _check_layer(folder, layer, layouts, stored)
    return result


def _modules_of(tensors: Iterable[str]) -> set[str]:
    """The names of the modules that hold tensors, and of those around them."""
    modules = set()
    for name in tensors:
        parts = name.split(".")
        for end in range(1, len(parts)):
            modules.add(".".join(parts[:end]))
    return modules


def _stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The headers of all tensors in a folder, by name. `ValueError` if a file is damaged."""
    # It refuses a damaged file, by name.
    shapes = tensor_shapes(folder)

    stored: dict[str, StoredTensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                stored[name] = StoredTensor(path, shapes[name], _dtype(file, name))
    return stored


def _dtype(file: Any, name: str) -> torch.dtype:
    """The dtype of a tensor in an open file."""
    part = file.get_slice(name)
    if part.get_shape():
        return part[:0].dtype  # reads no value
    return file.get_tensor(name).dtype


def _low_bit_layers(tensors: Mapping[str, StoredTensor] | Mapping[str, Tensor]) -> set[str]:
    """The layers with a tensor in low bits."""
    # FP8 and INT8 weights have the name of a plain weight; without their scale only the dtype tells.
    layers = set()
    for name, tensor in tensors.items():
        layer, _, local = name.rpartition(".")
        if local in LOW_BIT_NAMES or (local == "weight" and tensor.dtype not in HIGH_PRECISION):
            layers.add(layer)
    return layers


def _layer_of(name: str) -> str:
    """The layer of a tensor."""
    return name.rpartition(".")[0]


def _check_names(expected: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]) -> None:
    """Give up if all layers have other names: older versions of transformers saved some models so."""
    stored_layers = _low_bit_layers(stored)
    if stored_layers and stored_layers.isdisjoint(_low_bit_layers(expected)):
        raise UnknownTensorsError(f"transformers has other names for layers like {min(stored_layers)}")


def _check_tensor(folder: Path, name: str, expected: Tensor, stored: Mapping[str, StoredTensor]) -> None:
    """Refuse a tensor that is missing, or has another shape or dtype than `expected`."""
    shape = tuple(expected.shape)
    stored_shape = None
    if name in stored:
        stored_shape = stored[name].shape
    # Some write one scale for a whole layer as a scalar.
    is_scalar = stored_shape == () and shape == (1,)
    if stored_shape != shape and not is_scalar:
        raise ValueError(f"{folder} must hold {name} of shape {shape}, got {stored_shape}. Download it again.")

    dtype = stored[name].dtype
    both_high = dtype in HIGH_PRECISION and expected.dtype in HIGH_PRECISION
    if dtype != expected.dtype and not both_high:
        raise ValueError(f"{folder} must hold {name} in {expected.dtype}, got {dtype}. Download it again.")


# A layer by itself --------------------------------------------------------------------------------------------------


def _check_layer(folder: Path, layer: str, layouts: Layouts, stored: Mapping[str, StoredTensor]) -> None:
    """Refuse a layer with some tensors in low bits if others are missing, or if they do not fit each other."""
    scheme = layouts.scheme(layer, nn.Linear(1, 1, device="meta"))
    if scheme is None:  # no engine expects these tensors
        return

    needed = _needed_names(scheme)
    # First their presence: the size of the weight, and so all shapes, comes from them.
    for local in needed:
        if f"{layer}.{local}" not in stored:
            raise ValueError(f"{folder} must hold {layer}.{local}, got None. Download it again.")

    if "weight_shape" in needed:
        rows, columns = _stored_size(folder, layer, stored)
    else:
        rows, columns = _size_of_values(folder, layer, scheme, stored)

    for local, tensor in layouts.tensors(scheme, rows, columns).items():
        _check_tensor(folder, f"{layer}.{local}", tensor, stored)


def _needed_names(scheme: QuantizationScheme) -> tuple[str, ...]:
    """Local names of the tensors without which a layer cannot be decompressed."""
    return compressor_of(scheme).compression_param_names(scheme)


def _stored_size(folder: Path, layer: str, stored: Mapping[str, StoredTensor]) -> tuple[int, int]:
    """`(out, in)` of a layer's weight, which packed formats store."""
    name = f"{layer}.weight_shape"
    # Its own shape first, so that its two numbers can be read.
    _check_tensor(folder, name, torch.empty(2, dtype=torch.int64), stored)

    with safe_open(stored[name].file, framework="pt") as file:
        rows, columns = file.get_tensor(name).tolist()
    return rows, columns


def _size_of_values(
    folder: Path, layer: str, scheme: QuantizationScheme, stored: Mapping[str, StoredTensor]
) -> tuple[int, int]:
    """`(out, in)` of a layer's weight, by the shape of its quantized values."""
    name = f"{layer}.weight"
    packed = f"{layer}.weight_packed" in stored
    if packed:
        name = f"{layer}.weight_packed"

    values = stored[name]
    if len(values.shape) != 2:
        raise ValueError(f"{folder} must hold {name} as a matrix, got shape {values.shape}. Download it again.")

    rows, columns = values.shape
    if packed:
        # Several values share an element.
        columns = columns * 8 * values.dtype.itemsize // scheme.weights.num_bits
    return rows, columns
