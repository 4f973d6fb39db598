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
from compressed_tensors.compressors import BaseCompressor, compress_module
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationScheme, initialize_module_for_quantization
from compressed_tensors.quantization.utils import generate_gparam
from torch import Tensor, nn

from . import cuda_kernels, reference
from .scheme import MASTER_CAST_DTYPE, has_global_scale


# Rows of packed values come in whole words of 32 bits, eight values of 4 bits.
PACKED_TOGETHER = 8


@dataclass(frozen=True)
class LowBitWeight:
    """
    A quantized weight.

    Attributes:
        data (`dict[str, Tensor]`): The tensors that a compressed-tensors checkpoint stores for the layer, by local
            name, without the shape. Packed schemes (W4A16, W8A16): `weight_packed` int32 `(out, in * bits / 32)`,
            `weight_scale` bfloat16 `(out, groups)`, and for asymmetric schemes `weight_zero_point` int32 `(out / 8,
            groups)`. Others: `weight` float8_e4m3fn or int8 `(out, in)`, `weight_scale` bfloat16 `(out, groups)`, or
            `(out / 128, in / 128)` for blocks. NVFP4A16: `weight_packed` uint8 `(out, in / 2)`, `weight_scale`
            float8_e4m3fn `(out, in / 16)`, `weight_global_scale` float32 `(1,)`.
        scheme: The scheme.
        prepared: Kernels keep repacked forms here, for as long as these quantized values live.
    """

    data: dict[str, Tensor]
    scheme: QuantizationScheme
    prepared: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors that a checkpoint stores, sorted: `data`, and for packed schemes `weight_shape` int64 `(2,)`."""
        tensors = dict(self.data)
        if self.scheme.format == "pack-quantized":
            tensors["weight_shape"] = torch.tensor(self.shape)
        return dict(sorted(tensors.items()))

    @property
    def quantized(self) -> Tensor:
        """The tensor with the quantized values: `weight_packed` (several to a word) or `weight`."""
        if "weight_packed" in self.data:
            return self.data["weight_packed"]
        return self.data["weight"]

    @property
    def scale(self) -> Tensor:
        """The scales below a global one, if there is any: `weight_scale`."""
        return self.data["weight_scale"]

    @property
    def shape(self) -> tuple[int, int]:
        """`(out, in)` of the weight."""
        rows, columns = self.quantized.shape
        if "weight_packed" in self.data:
            bits_of_a_word = 8 * self.quantized.itemsize
            columns *= bits_of_a_word // self.scheme.weights.num_bits
        return rows, columns

    def split(self, rows: int) -> list[LowBitWeight]:
        """
        Split into weights of equal size, which equal weights quantized one by one.

        Args:
            rows: Number of rows of each.

        Returns:
            The weights; views.

        Raises:
            ValueError: if two of them would share a scale (blocks), a word of 8 zero points or a global scale.
        """
        self._check_split(rows)
        total, _ = self.shape

        # Scales of blocks and words of zero points have fewer rows than the weight, in the same order.
        chunks = [tensor.chunk(total // rows) for tensor in self.data.values()]
        parts = []
        for tensors in zip(*chunks, strict=True):
            data = dict(zip(self.data, tensors, strict=True))
            parts.append(LowBitWeight(data, self.scheme))
        return parts

    def stacks(self, experts: int, projections: int) -> list[dict[str, Tensor]]:
        """
        The tensors of the weights that [`split`] gives, those of all experts in one.

        Args:
            experts: Number of experts, whose rows follow each other.
            projections: Number of matrices of equal size in the rows of each expert.

        Returns:
            For each projection its tensors by local name, sorted: `(experts, ...)`, views.

        Raises:
            ValueError: as [`split`] does.
        """
        total, columns = self.shape
        rows = total // (experts * projections)
        self._check_split(rows)

        stacks: list[dict[str, Tensor]] = [{} for _ in range(projections)]
        for name, tensor in self.data.items():
            # Rows go expert by expert, and within one projection by projection: a part is `(experts, rows, ...)`.
            parts = tensor.unflatten(0, (experts, projections, -1)).unbind(1)
            for stack, part in zip(stacks, parts, strict=True):
                stack[name] = part

        if self.scheme.format == "pack-quantized":
            shape = torch.tensor((rows, columns))
            for stack in stacks:
                # Of one expert's matrix, as a checkpoint has it for each.
                stack["weight_shape"] = shape.expand(experts, 2)
        return [dict(sorted(stack.items())) for stack in stacks]

    def _check_split(self, rows: int) -> None:
        """Refuse (`ValueError`) parts of `rows` rows that are not weights of their own."""
        total, _ = self.shape
        if total % rows or rows % rows_together(self.scheme) or has_global_scale(self.scheme):
            raise ValueError(f"{total} rows in the scheme {self.scheme} cannot be split into {rows} each.")


# The producer --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def quantize_weight(weight: Tensor, scheme: QuantizationScheme, largest: Tensor | None = None) -> LowBitWeight:
    """
    Quantize a weight matrix by round-to-nearest with min-max scales (paper Sec. 3.1).

    Args:
        weight: Master weight `(out, in)`, any float dtype; it is cast to bfloat16 first; the result shares no memory
            with it.
        scheme: A scheme of `qarl_trl.quant.scheme`, with `format` set.
        largest: For schemes with a global scale, the largest magnitude of all weights that share it (an engine that
            merges q, k, v has one global scale for them), bfloat16 scalar. Default: that of `weight`.

    Raises:
        ValueError: if the weight is not a matrix, does not fill whole words when packed, or holds NaN or infinity.
    """
    if weight.ndim != 2:
        raise ValueError(f"The weight must be a matrix (out, in), got shape {tuple(weight.shape)}. Flatten it first.")
    columns = weight.shape[1]
    if "pack" in scheme.format and columns % PACKED_TOGETHER:
        raise ValueError(
            f"in must be a multiple of {PACKED_TOGETHER} to be packed, got {columns}. Choose a scheme that is not "
            "packed, or leave the layer out (quant_ignore)."
        )
    # Checks of plans and checkpoints run on models without memory.
    if weight.is_meta:
        return _without_values(weight, scheme)

    weight = _cast(weight)
    low, high = reference.extremes(weight, scheme)
    if has_global_scale(scheme):
        return _quantize_nvfp4(weight, scheme, low, high, largest)

    # The range of a scale is NaN or infinite if one of its weights is.
    _check_finite(high if scheme.weights.symmetric else high - low, weight)
    scale, zero_point = reference.qparams_of(low, high, scheme)
    quantized = reference.encode(weight, scale, zero_point, scheme)

    name = "weight_packed" if "pack" in scheme.format else "weight"
    data = {"weight_scale": scale.contiguous(), name: quantized.contiguous()}
    if zero_point is not None:
        data["weight_zero_point"] = _packed_zero_points(zero_point)
    return LowBitWeight(data, scheme)


def _cast(weight: Tensor) -> Tensor:
    """The one cast before quantization: with another rounding on some path, quantized values would flip."""
    return weight.detach().to(MASTER_CAST_DTYPE).contiguous()


def _without_values(weight: Tensor, scheme: QuantizationScheme) -> LowBitWeight:
    """The low-bit weight of a model without weights, on the meta device."""
    tensors = meta_tensors(scheme, *weight.shape)
    tensors.pop("weight_shape", None)
    return LowBitWeight(dict(tensors), scheme)


def _quantize_nvfp4(
    weight: Tensor, scheme: QuantizationScheme, low: Tensor, high: Tensor, largest: Tensor | None
) -> LowBitWeight:
    """4-bit floats with float8 scales below a float32 one; compressed-tensors rounds."""
    # An empty tensor has no maximum.
    largest_here = high.max() if high.numel() else high.new_zeros(())
    if largest is not None:
        largest_here = torch.maximum(largest_here, largest)
    magnitude = largest_here.reshape(1)
    _check_finite(magnitude, weight)

    # Symmetric, so the range is known from the magnitude alone.
    global_scale = generate_gparam(-magnitude, magnitude)
    scale, _ = reference.qparams_of(low, high, scheme, global_scale)
    # compressed-tensors divides by a float32 scale. Its zero point of 0 makes -0.0 a 0.0.
    wide_scale = scale.float()
    tensors = {
        "weight_global_scale": global_scale,
        "weight_scale": wide_scale,
        "weight": weight,
        "weight_zero_point": torch.zeros_like(wide_scale),
    }
    compressed = NVFP4PackedCompressor.compress(tensors, scheme)
    return LowBitWeight({name: tensor.contiguous() for name, tensor in compressed.items()}, scheme)


def _check_finite(ranges: Tensor, weight: Tensor) -> None:
    """Refuse (`ValueError`) a weight whose `ranges`, one for each scale, hold NaN or infinity."""
    # The maximum is NaN if one of them is.
    if ranges.numel() and not math.isfinite(ranges.max().item()):
        raise ValueError(
            f"A weight of shape {tuple(weight.shape)} must be finite, got NaN or infinity. If training made it, "
            "resume from the last checkpoint with a lower learning rate or max_grad_norm. If it was loaded, download "
            "the model again."
        )


def _packed_zero_points(zero_point: Tensor) -> Tensor:
    """Pack 4-bit zero points int8 `(out, groups)` to words int32 `(ceil(out / 8), groups)`."""
    words = pack_to_int32(zero_point, 4, packed_dim=0)
    # They are transposed; with a single column `contiguous` would not copy them.
    return words.clone(memory_format=torch.contiguous_format)


def largest_magnitude(weight: Tensor, scheme: QuantizationScheme) -> Tensor:
    """
    Largest magnitude of the bfloat16 cast of a weight, a bfloat16 scalar.

    Args:
        weight: Master weight `(out, in)`, any float dtype.
        scheme: Its scheme, which must be symmetric.
    """
    _, high = reference.extremes(_cast(weight), scheme)
    return high.max()


# Back to a matrix ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def dequantize(weight: LowBitWeight, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """
    Return the matrix of a low-bit weight, bit for bit as compressed-tensors decompresses it.

    It multiplies the quantized values (minus the zero point) by the scale, rounds in the scale's dtype (bfloat16) and
    casts to `dtype`.

    Args:
        weight: The low-bit weight.
        dtype: Dtype of the matrix.

    Returns:
        `(out, in)`, in new storage.
    """
    zero_point = None
    if "weight_zero_point" in weight.data:
        rows, _ = weight.shape
        zero_point = reference.unpack_zero_points(weight.data["weight_zero_point"], rows)

    arguments = (weight.quantized, weight.scale, zero_point, weight.scheme, dtype)
    if weight.scheme.format == "pack-quantized" and weight.scheme.weights.num_bits == 4:
        return cuda_kernels.decode_int4(*arguments, plain=reference.decode)

    global_scale = weight.data.get("weight_global_scale")
    return reference.decode(*arguments, global_scale)


# What a checkpoint stores --------------------------------------------------------------------------------------------


def rows_together(scheme: QuantizationScheme) -> int:
    """Number of rows that share a scale (blocks) or a word of zero points; ignores a global scale."""
    if scheme.weights.block_structure is not None:
        return scheme.weights.block_structure[0]
    if scheme.weights.symmetric:
        return 1
    return 8


def meta_tensors(scheme: QuantizationScheme, rows: int, columns: int) -> dict[str, Tensor]:
    """
    The tensors that a checkpoint stores for a weight, without values: compressed-tensors compresses an empty layer.

    Args:
        scheme: The scheme, with `format` set.
        rows: `out` of the weight.
        columns: `in` of the weight.

    Returns:
        Tensors on the meta device by local name, `weight_shape` among them.
    """
    layer = nn.Linear(columns, rows, bias=False, dtype=MASTER_CAST_DTYPE, device="meta")
    initialize_module_for_quantization(layer, scheme.model_copy(), force_zero_point=False)
    compress_module(layer)
    tensors = layer.state_dict()

    # compressed-tensors packs zero points only if they have values.
    if "weight_packed" in tensors and "weight_zero_point" in tensors:
        words = math.ceil(rows * scheme.weights.num_bits / 32)
        groups = tensors["weight_scale"].shape[1]
        tensors["weight_zero_point"] = torch.empty((words, groups), dtype=torch.int32, device="meta")
    return tensors


def compressor_of(scheme: QuantizationScheme) -> Any:
    """
    The class of compressed-tensors that compresses and decompresses weights of a scheme.

    Args:
        scheme: A scheme of a checkpoint.
    """
    # Checkpoints of older versions of compressed-tensors have no format in their groups.
    stored_as = CompressionFormat(scheme.format or infer_module_format(nn.Linear, scheme))
    return BaseCompressor.get_value_from_registry(stored_as.value)
