"""The one quantizer: a weight to the tensors that are computed with, synced and saved; and the matrix that they stand for.

Invariant: every low-bit tensor in this package comes out of `quantize_weight`, from the bfloat16 cast of the master
weight, as compressed-tensors would round it (paper Sec. 3.1, `W_low-bit = Quant(theta)`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.utils import generate_gparam
from torch import Tensor

from . import reference
from .reference import QParams
from .scheme import MASTER_CAST_DTYPE, has_global_scale


@dataclass(frozen=True)
class LowBitWeight:
    """
    A quantized weight in checkpoint format.

    Attributes:
        tensors (`dict[str, Tensor]`): What a compressed-tensors checkpoint stores for the layer, by local name, sorted.
            Packed schemes (W4A16, W8A16): `weight_packed` int32 `(out, in * bits / 32)`, `weight_scale` bfloat16 `(out,
            groups)`, `weight_shape` int64 `(2,)`, and with asymmetric quantized values `weight_zero_point` int32 `(out / 8,
            groups)`. The others: `weight` float8_e4m3fn or int8 `(out, in)`, `weight_scale` bfloat16 `(out, groups)`,
            or `(out / 128, in / 128)` for blocks. NVFP4A16: `weight_packed` uint8 `(out, in / 2)`, `weight_scale`
            float8_e4m3fn `(out, in / 16)`, `weight_global_scale` float32 `(1,)`.
        scheme (`QuantizationScheme`): How they were made.
        prepared (`dict[str, Any]`): Where a kernel keeps a repacked form for as long as these quantized values live.
    """

    tensors: dict[str, Tensor]
    scheme: QuantizationScheme
    prepared: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def quantized(self) -> Tensor:
        """The tensor that holds the quantized values: `weight_packed` (words of several) or `weight` (one each)."""
        return self.tensors["weight_packed"] if "weight_packed" in self.tensors else self.tensors["weight"]

    @property
    def scale(self) -> Tensor:
        return self.tensors["weight_scale"]

    @property
    def shape(self) -> tuple[int, int]:
        """`(out, in)` of the weight."""
        if "weight_shape" in self.tensors:
            return tuple(self.tensors["weight_shape"].tolist())
        rows, columns = self.quantized.shape
        return rows, columns * (2 if has_global_scale(self.scheme) else 1)

    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    def split(self, rows: int) -> list[LowBitWeight]:
        """
        The weights of `rows` rows each, as if each had been quantized by itself; views, but for `weight_shape`.

        `ValueError` when rows of two of them share a scale (blocks), a word of zero points (of 8) or a global scale.
        """
        out_features, in_features = self.shape
        if out_features % rows or rows % rows_together(self.scheme) or has_global_scale(self.scheme):
            raise ValueError(f"{out_features} rows in the scheme {self.scheme} cannot be split into {rows} each.")
        count = out_features // rows
        parts = {name: tensor.chunk(count) for name, tensor in self.tensors.items()}
        if "weight_shape" in parts:
            parts["weight_shape"] = [torch.tensor((rows, in_features)) for _ in range(count)]
        return [LowBitWeight({name: parts[name][i] for name in parts}, self.scheme) for i in range(count)]


def rows_together(scheme: QuantizationScheme) -> int:
    """Rows that share a scale (blocks) or a word of zero points, without a global scale."""
    blocks = scheme.weights.block_structure
    return blocks[0] if blocks is not None else 1 if scheme.weights.symmetric else 8


@torch.no_grad()
def quantize_weight(
    weight: Tensor,
    scheme: QuantizationScheme,
    qparams: QParams | None = None,
    largest: Tensor | None = None,
) -> LowBitWeight:
    """
    Quantize a weight matrix by round-to-nearest with min-max scales, or with given ones.

    Args:
        weight: Master weight `(out, in)`, any float dtype; it is cast to bfloat16 first, and never aliased.
        scheme: A scheme of `qarl_trl.quant.scheme`, with `format` set.
        qparams: Frozen scale, bfloat16, and zero point, int8 (`None` for symmetric schemes), `(out, groups)` or as blocks
            have it. Quantized values beyond the range saturate.
        largest: For schemes with a global scale, the largest magnitude of all weights that share it, bfloat16 scalar: an
            engine that merges layers (q, k, v) has one global scale for them. Default: of `weight`.

    Raises:
        ValueError: when the weight is not a matrix, holds a NaN or an infinity, or does not fit `qparams`.
    """
    if weight.ndim != 2:
        raise ValueError(f"The weight must be a matrix (out, in), got shape {tuple(weight.shape)}.")
    if qparams is not None and has_global_scale(scheme):
        raise ValueError("Frozen scales of a scheme with a global scale (NVFP4A16) are not supported. Leave them out.")
    weight, tensors, global_scale = _cast(weight), {}, None
    low, high = reference.extremes(weight, scheme)
    ranges = high if scheme.weights.symmetric else high - low
    if has_global_scale(scheme):
        own = high.max() if high.numel() else high.new_zeros(())
        largest = ranges = (own if largest is None else torch.maximum(own, largest)).reshape(1)
        global_scale = tensors["weight_global_scale"] = generate_gparam(-largest, largest)
    _check_finite(ranges, weight.shape)
    if qparams is None:
        qparams = reference.qparams_of(low, high, scheme, global_scale)
    else:
        _check_frozen(qparams, high.shape, scheme)
    tensors["weight_scale"], zero_point = qparams
    encoded = reference.encode(weight, qparams, scheme, global_scale)
    tensors["weight_packed" if "pack" in scheme.format else "weight"] = encoded
    if scheme.format == "pack-quantized":
        tensors["weight_shape"] = torch.tensor(weight.shape)
    if zero_point is not None:
        tensors["weight_zero_point"] = reference.pack_zero_points(zero_point)
    return LowBitWeight({name: tensor.contiguous() for name, tensor in sorted(tensors.items())}, scheme)


@torch.no_grad()
def dequantize(weight: LowBitWeight, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """
    The matrix `(out, in)` that the low-bit tensors stand for, bit for bit as compressed-tensors decompresses it.

    Quantized values (minus the zero point) times scale, multiplied and rounded in the scale's dtype (bfloat16) and only then cast to
    `dtype`.
    """
    (rows, columns), tensors, zero_point = weight.shape, weight.tensors, None
    if "weight_zero_point" in tensors:
        zero_point = reference.unpack_zero_points(tensors["weight_zero_point"], rows)
    qparams, global_scale = (weight.scale, zero_point), tensors.get("weight_global_scale")
    return reference.decode(weight.quantized, qparams, weight.scheme, columns, dtype, global_scale)


def largest_magnitude(weight: Tensor, scheme: QuantizationScheme) -> Tensor:
    """Largest magnitude of the bfloat16 cast of `weight`, a bfloat16 scalar; `scheme` has symmetric quantized values."""
    return reference.extremes(_cast(weight), scheme)[1].max()


def _cast(weight: Tensor) -> Tensor:
    """What is quantized: the same rounding on every path, or quantized values flip."""
    return weight.detach().to(MASTER_CAST_DTYPE).contiguous()


def _check_finite(extremes: Tensor, shape: torch.Size) -> None:
    if extremes.numel() and not math.isfinite(extremes.max().item()):  # which is NaN if one of them is
        raise ValueError(
            f"A weight of shape {tuple(shape)} holds NaN or infinity, so it has no scale. The update "
            "that produced it diverged: lower the learning rate or max_grad_norm, and resume from the last checkpoint."
        )


def _check_frozen(qparams: QParams, shape: torch.Size, scheme: QuantizationScheme) -> None:
    """Refuse scales and zero points without the `shape` and the dtypes of the scheme's own."""
    scale, zero_point = qparams
    for name, tensor, dtype, needed in (
        ("scale", scale, torch.bfloat16, True),
        ("zero point", zero_point, torch.int8, not scheme.weights.symmetric),
    ):
        came = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
        if came != ((tuple(shape), dtype) if needed else None):
            raise ValueError(
                f"Frozen {name} {came} does not fit a weight with {tuple(shape)} scales; needed: "
                f"{dtype if needed else 'none, the scheme is symmetric'}. The scales belong to another layer or scheme."
            )
    if not (torch.isfinite(scale) & (scale > 0)).all():
        raise ValueError(
            f"Frozen scales must be finite and above zero, got {scale.min().item()} to {scale.max().item()}. The checkpoint "
            "they are from is damaged."
        )
