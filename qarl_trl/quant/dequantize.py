"""The matrix that the tensors of a low-bit weight stand for, made anew each time or kept for as long as the codes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from torch import Tensor

from . import reference
from .quantize import LowBitWeight, fast
from .scheme import has_global_scale


def dequantize(weight: LowBitWeight, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """
    The matrix `(out, in)` that the low-bit tensors stand for, bit for bit as compressed-tensors decompresses it.

    Codes (minus the zero point) times scale, multiplied and rounded in the scale's dtype (bfloat16) and only then cast to
    `dtype`. With `weight.keep_dequantized` it is made once, kept in bfloat16, and must not be written to.
    """
    if weight.keep_dequantized:
        return kept(weight, "dequantized", lambda: _decoded(weight, torch.bfloat16)).to(dtype)
    return _decoded(weight, dtype)


def kept(weight: LowBitWeight, name: str, make: Callable[[], Any]) -> Any:
    """`make()`, or where the weight keeps what it is multiplied by, what that gave for these codes."""
    if not weight.keep_dequantized:
        return make()
    if name not in weight.prepared:
        weight.prepared[name] = make()
    return weight.prepared[name]


def _decoded(weight: LowBitWeight, dtype: torch.dtype) -> Tensor:
    if has_global_scale(weight.scheme):
        compressor = BaseCompressor.get_value_from_registry(weight.scheme.format.value)
        return compressor.decompress(dict(weight.tensors), weight.scheme)["weight"].to(dtype)
    (rows, columns), tensors, zero_point = weight.shape, weight.tensors, None
    if "weight_zero_point" in tensors:
        zero_point = reference.unpack_zero_points(tensors["weight_zero_point"], rows)
    device = weight.codes.device
    decoder = reference if fast is None else fast.decoder_for((rows, columns), dtype, device, weight.scheme)
    return decoder.decode(weight.codes, weight.scale, zero_point, weight.scheme, columns, dtype)
