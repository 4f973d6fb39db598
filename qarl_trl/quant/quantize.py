"""The one quantizer: a weight to the tensors that are computed with, published and saved.

Invariant: every low-bit tensor in this package comes out of `quantize_weight`, from the bfloat16 cast of the master
weight, by compressed-tensors' own arithmetic; nothing else rounds a weight (paper Sec. 3.1, `W_low-bit = Quant(theta)`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme, QuantizationStrategy
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor

from .scheme import MASTER_CAST_DTYPE


@dataclass(frozen=True)
class LowBitWeight:
    """
    A quantized weight in checkpoint format.

    Attributes:
        tensors (`dict[str, Tensor]`): What a compressed-tensors checkpoint stores for the layer, by local name.
            W4A16: `weight_packed` int32 `(out, in / 8)`, `weight_scale` bfloat16 `(out, groups)`, `weight_shape`
            int64 `(2,)`. FP8: `weight` float8_e4m3fn `(out, in)`, `weight_scale` bfloat16 `(out, 1)`.
        scheme (`QuantizationScheme`): How they were made.
        prepared (`dict[str, Any]`): Where a kernel keeps a repacked form for as long as these codes live.
    """

    tensors: dict[str, Tensor]
    scheme: QuantizationScheme
    prepared: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def codes(self) -> Tensor:
        """The tensor that holds the codes: `weight_packed` (eight 4-bit codes a word) or the float8 `weight`."""
        return self.tensors["weight_packed"] if "weight_packed" in self.tensors else self.tensors["weight"]

    @property
    def scale(self) -> Tensor:
        return self.tensors["weight_scale"]

    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


@torch.no_grad()
def quantize_weight(weight: Tensor, scheme: QuantizationScheme) -> LowBitWeight:
    """
    Quantize a weight matrix by round-to-nearest with min-max scales.

    Args:
        weight (`Tensor`): Master weight `(out, in)`, any float dtype; it is cast to bfloat16 first.
        scheme (`QuantizationScheme`): A scheme of `qarl_trl.quant.scheme`, with `format` set.

    Returns:
        [`LowBitWeight`]: new storage, never an alias of `weight`.

    Raises:
        ValueError: when the weight is not a matrix or holds a NaN or an infinity.
    """
    if weight.ndim != 2:
        raise ValueError(f"A weight matrix (out, in) was needed, got shape {tuple(weight.shape)}.")
    weight = weight.detach().to(MASTER_CAST_DTYPE)
    low, high = _observe(weight, scheme)
    if not torch.isfinite(high - low).all():
        raise ValueError(
            f"A weight of shape {tuple(weight.shape)} holds NaN or infinity, so it has no scale. The update that "
            "produced it diverged: lower the learning rate or max_grad_norm, and resume from the last checkpoint."
        )
    scale, zero_point = calculate_qparams(low, high, scheme.weights)
    compressor = BaseCompressor.get_value_from_registry(scheme.format.value)
    tensors = compressor.compress({"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point}, scheme)
    return LowBitWeight({name: tensor.contiguous() for name, tensor in sorted(tensors.items())}, scheme)


def _observe(weight: Tensor, scheme: QuantizationScheme) -> tuple[Tensor, Tensor]:
    """Minimum and maximum of each scale's weights, `(out, groups)` or `(out, 1)`."""
    if scheme.weights.strategy == QuantizationStrategy.GROUP:
        weight = weight.unflatten(-1, (-1, scheme.weights.group_size))
    else:
        weight = weight.unsqueeze(-2)
    return weight.amin(-1), weight.amax(-1)  # on CPU together faster than `aminmax`
