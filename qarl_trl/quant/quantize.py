"""The one quantizer: from a weight to the tensors for forward, sync and checkpoint, and back to a matrix.

Invariant: `quantize_weight` makes every low-bit tensor in this package, from the bfloat16 cast of the master
weight, with the rounding of compressed-tensors (paper Sec. 3.1, `W_low-bit = Quant(theta)`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from compressed_tensors.compressors import compress_module
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationScheme, initialize_module_for_quantization
from compressed_tensors.quantization.utils import generate_gparam
from torch import Tensor, nn

from . import reference
from .scheme import MASTER_CAST_DTYPE, has_global_scale


@dataclass(frozen=True)
class LowBitWeight:
    """
    A quantized weight.

    Attributes:
        data (`dict[str, Tensor]`): The tensors that a compressed-tensors checkpoint stores for the layer, by local name, without the
            shape. Packed schemes (W4A16, W8A16): `weight_packed` int32 `(out, in * bits / 32)`, `weight_scale` bfloat16 `(out,
            groups)`, and for asymmetric schemes `weight_zero_point` int32 `(out / 8, groups)`.
            Others: `weight` float8_e4m3fn or int8 `(out, in)`, `weight_scale` bfloat16 `(out, groups)`,
            or `(out / 128, in / 128)` for blocks. NVFP4A16: `weight_packed` uint8 `(out, in / 2)`, `weight_scale`
            float8_e4m3fn `(out, in / 16)`, `weight_global_scale` float32 `(1,)`.
    """

    data: dict[str, Tensor]
    scheme: QuantizationScheme
    # Kernels keep repacked forms here, for as long as these quantized values live.
    prepared: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors that a checkpoint stores, sorted: `data`, and for packed schemes `weight_shape` int64 `(2,)`."""
        shape = {"weight_shape": torch.tensor(self.shape)} if self.scheme.format == "pack-quantized" else {}
        return dict(sorted((self.data | shape).items()))

    @property
    def quantized(self) -> Tensor:
        """The tensor with the quantized values: `weight_packed` (several to a word) or `weight`."""
        return self.data["weight_packed"] if "weight_packed" in self.data else self.data["weight"]

    @property
    def scale(self) -> Tensor:
        return self.data["weight_scale"]

    @property
    def shape(self) -> tuple[int, int]:
        """`(out, in)` of the weight."""
        rows, columns = self.quantized.shape
        packed = "weight_packed" in self.data
        return rows, columns * (8 * self.quantized.itemsize // self.scheme.weights.num_bits if packed else 1)

    def split(self, rows: int) -> list[LowBitWeight]:
        """
        Split into weights of `rows` rows each, equal to weights quantized one by one; views.

        `ValueError` when two of them would share a scale (blocks), a word of 8 zero points or a global scale.
        """
        total = self.shape[0]
        if total % rows or rows % rows_together(self.scheme) or has_global_scale(self.scheme):
            raise ValueError(f"{total} rows in the scheme {self.scheme} cannot be split into {rows} each.")
        parts = zip(*(tensor.chunk(total // rows) for tensor in self.data.values()), strict=True)
        return [LowBitWeight(dict(zip(self.data, part, strict=True)), self.scheme) for part in parts]


def rows_together(scheme: QuantizationScheme) -> int:
    """Number of rows that share a scale (blocks) or a word of zero points; ignores a global scale."""
    blocks = scheme.weights.block_structure
    return blocks[0] if blocks is not None else 1 if scheme.weights.symmetric else 8


def meta_tensors(scheme: QuantizationScheme, rows: int, columns: int) -> dict[str, Tensor]:
    """The tensors that a checkpoint stores for a weight `(rows, columns)`, on the meta device: compressed-tensors compresses an empty layer."""
    layer = nn.Linear(columns, rows, bias=False, dtype=MASTER_CAST_DTYPE, device="meta")
    initialize_module_for_quantization(layer, scheme.model_copy(), force_zero_point=False)
    compress_module(layer)
    tensors = layer.state_dict()
    if "weight_packed" in tensors and "weight_zero_point" in tensors:  # packed only if it has values
        size = math.ceil(rows * scheme.weights.num_bits / 32), tensors["weight_scale"].shape[1]
        tensors["weight_zero_point"] = torch.empty(size, dtype=torch.int32, device="meta")
    return tensors


@torch.no_grad()
def quantize_weight(weight: Tensor, scheme: QuantizationScheme, largest: Tensor | None = None) -> LowBitWeight:
    """
    Quantize a weight matrix by round-to-nearest with min-max scales.

    Args:
        weight: Master weight `(out, in)`, any float dtype; it is cast to bfloat16 first; the result shares no memory with it.
        scheme: A scheme of `qarl_trl.quant.scheme`, with `format` set.
        largest: For schemes with a global scale, the largest magnitude of all weights that share it (an engine that merges
            q, k, v has one global scale for them), bfloat16 scalar. Default: that of `weight`.

    Raises:
        ValueError: if the weight is not a matrix, does not fill whole words when packed, or holds NaN or infinity.
    """
    if weight.ndim != 2 or ("pack" in scheme.format and weight.shape[1] % 8):
        raise ValueError(f"The weight must be a matrix (out, in), in: a multiple of 8, got {tuple(weight.shape)}.")
    if weight.is_meta:  # a model without weights
        stored = meta_tensors(scheme, *weight.shape)
        return LowBitWeight({name: stored[name] for name in stored if name != "weight_shape"}, scheme)
    weight, data, global_scale = _cast(weight), {}, None
    low, high = reference.extremes(weight, scheme)
    ranges = high if scheme.weights.symmetric else high - low
    if has_global_scale(scheme):
        own = high.max() if high.numel() else high.new_zeros(())
        largest = ranges = (own if largest is None else torch.maximum(own, largest)).reshape(1)
        global_scale = data["weight_global_scale"] = generate_gparam(-largest, largest)
    if ranges.numel() and not math.isfinite(ranges.max().item()):  # the maximum is NaN if one of them is
        raise ValueError(
            f"A weight of shape {tuple(weight.shape)} holds NaN or infinity: the update before it diverged. Lower the learning rate or "
            "max_grad_norm, and resume from the last checkpoint."
        )
    data["weight_scale"], zero_point = qparams = reference.qparams_of(low, high, scheme, global_scale)
    if global_scale is None:
        encoded = reference.encode(weight, qparams, scheme)
        data["weight_packed" if "pack" in scheme.format else "weight"] = encoded
    else:  # 4-bit floats: compressed-tensors rounds; the zero point makes -0.0 a 0.0
        scale = qparams[0].float()
        given = {"weight": weight, "weight_scale": scale, "weight_zero_point": torch.zeros_like(scale)}
        data = NVFP4PackedCompressor.compress(data | given, scheme)
    if zero_point is not None:
        words = pack_to_int32(zero_point, 4, packed_dim=0)
        # It is transposed; with a single column `contiguous` would not copy it.
        data["weight_zero_point"] = words.clone(memory_format=torch.contiguous_format)
    return LowBitWeight({name: tensor.contiguous() for name, tensor in data.items()}, scheme)


@torch.no_grad()
def dequantize(weight: LowBitWeight, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """
    Return the matrix `(out, in)` of a low-bit weight, bit for bit as compressed-tensors decompresses it.

    It multiplies the quantized values (minus the zero point) by the scale, rounds in the scale's dtype (bfloat16) and casts to `dtype`.
    """
    data, zero_point = weight.data, None
    if "weight_zero_point" in data:
        zero_point = reference.unpack_zero_points(data["weight_zero_point"], weight.shape[0])
    qparams, global_scale = (weight.scale, zero_point), data.get("weight_global_scale")
    return reference.decode(weight.quantized, qparams, weight.scheme, dtype, global_scale)


def largest_magnitude(weight: Tensor, scheme: QuantizationScheme) -> Tensor:
    """Largest magnitude of the bfloat16 cast of `weight`, a bfloat16 scalar; `scheme` must be symmetric."""
    return reference.extremes(_cast(weight), scheme)[1].max()


def _cast(weight: Tensor) -> Tensor:
    """The one cast before quantization: with another rounding on some path, quantized values would flip."""
    return weight.detach().to(MASTER_CAST_DTYPE).contiguous()
