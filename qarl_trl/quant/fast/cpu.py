"""Quantization on a CPU in one pass over the weight, by kernels that numba compiles: extremes, scales and quantized values row by row.

The functions are those of `reference`. They take float32 weights too, without a bfloat16 copy of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from compressed_tensors.quantization import QuantizationScheme, QuantizationType
from compressed_tensors.quantization.utils import calculate_range
from torch import Tensor

from ..reference import FP8, QParams, width_of_scales
from . import cpu_kernels as kernels


# Two quantized values, by the bits of one.
_PAIRS = {4: np.uint8, 8: np.uint16}
# Half a millisecond of work, a few times what starting a thread costs.
_WEIGHTS_PER_THREAD = 1 << 20


def extremes(weight: Tensor, scheme: QuantizationScheme) -> tuple[Tensor, Tensor]:
    """As [`reference.extremes`]."""
    words = _words(weight, scheme)
    low, high = (torch.empty(words.shape[0], words.shape[2], dtype=torch.bfloat16) for _ in range(2))
    _over_rows(kernels.extremes, words, _memory(low, np.uint16), _memory(high, np.uint16), scheme.weights.symmetric)
    return low, high


def quantize(weight: Tensor, scheme: QuantizationScheme, global_scale: Tensor | None = None) -> tuple[Tensor, QParams]:
    """As [`reference.quantize`]."""
    rows, _, groups, _ = _words(weight, scheme).shape
    args = scheme.weights
    scale = torch.empty(rows, groups, dtype=args.scale_dtype or torch.bfloat16)
    zero_point = None if args.symmetric else torch.empty(scale.shape, dtype=torch.int8)
    low, high = (limit.item() for limit in calculate_range(args, weight.device))
    steps = (high - low) / (2 if args.symmetric else 1)
    return _encode(weight, (scale, zero_point), scheme, global_scale, steps), (scale, zero_point)


def encode(weight: Tensor, qparams: QParams, scheme: QuantizationScheme, global_scale: Tensor | None = None) -> Tensor:
    """As [`reference.encode`]."""
    return _encode(weight, qparams, scheme, global_scale, kernels.GIVEN)


def pack_zero_points(zero_point: Tensor) -> Tensor:
    """As [`reference.pack_zero_points`], in a fraction of its time."""
    zero_point = zero_point.contiguous()
    out = torch.empty(-(-zero_point.shape[0] // 8), zero_point.shape[1], dtype=torch.int32)
    kernels.words_of_rows(_memory(zero_point, np.int8), _memory(out, np.uint32))
    return out


def _encode(
    weight: Tensor, qparams: QParams, scheme: QuantizationScheme, global_scale: Tensor | None, steps: float
) -> Tensor:
    """Quantized values of a weight; writes scale and zero point, contiguous, unless `steps` is `kernels.GIVEN`."""
    words, steps, (scale, zero_point) = _words(weight, scheme), np.float32(steps), qparams
    scales = _memory(scale.contiguous(), np.uint16 if global_scale is None else np.uint8)
    if global_scale is not None:
        out = torch.empty(weight.shape[0], weight.shape[1] // 2, dtype=torch.uint8)
        quantized, global_number = _memory(out, np.uint8, words.shape), np.float32(global_scale.item())
        _over_rows(kernels.float4, words, scales, quantized, steps, global_number)
        return out
    args, (size, signs) = scheme.weights, _layout(scheme)
    low = high = None
    if args.type == QuantizationType.INT:
        low, high = (np.float32(limit.item()) for limit in calculate_range(args, "cpu"))
    zeros = None if zero_point is None else _memory(zero_point.contiguous(), np.int8)
    out = torch.empty(weight.shape[0], weight.shape[1] * size // 8, dtype=torch.uint8)
    # Integers in packed words are above zero, which turns the highest bit of their two's complement.
    flip = _PAIRS[size](signs if scheme.format == "pack-quantized" else 0)
    quantized = _memory(out, _PAIRS[size], words.shape)
    _over_rows(kernels.encode, words, scales, zeros, quantized, steps, low, high, flip)
    packed = torch.int32 if scheme.format == "pack-quantized" else torch.int8
    return out.view(FP8 if args.type == QuantizationType.FLOAT else packed)


def decode(
    quantized: Tensor,
    qparams: QParams,
    scheme: QuantizationScheme,
    columns: int,
    dtype: torch.dtype,
    global_scale: Tensor | None = None,
) -> Tensor:
    """As [`reference.decode`]."""
    (scale, zero_point), out = qparams, torch.empty(quantized.shape[0], columns, dtype=dtype)
    numbers = _words(out, scheme)
    if global_scale is not None:
        pairs, scales = _memory(quantized.contiguous(), np.uint8, numbers.shape), _memory(scale.contiguous(), np.uint8)
        _over_rows(kernels.decode_float4, pairs, scales, numbers, np.float32(global_scale.item()))
        return out
    size, signs = _layout(scheme)
    pairs = _memory(quantized.contiguous(), _PAIRS[size], numbers.shape)
    zeros = None if zero_point is None else _memory(zero_point.contiguous(), np.int8)
    flip = _PAIRS[size](0 if scheme.format == "pack-quantized" else signs)
    offset = None if scheme.weights.type == QuantizationType.FLOAT else np.float32(1 << (size - 1))
    _over_rows(kernels.decode, pairs, _memory(scale.contiguous(), np.uint16), zeros, numbers, flip, offset)
    return out


def quantize_activations(
    plain: Callable[..., Any], x: Tensor, width: int, dtype: torch.dtype, divided: bool, *limits: float
) -> tuple[Tensor, Tensor]:
    """As `plain` of contiguous `x`; the rest is what [`fast.RULES`] says of it."""
    quantized = x.new_empty(x.shape, dtype=dtype)
    scale = x.new_empty((*x.shape[:-1], x.shape[-1] // width), dtype=torch.float32)
    shape = x.numel() // x.shape[-1], 1, scale.shape[-1], width // 2
    words = _memory(x, np.uint32 if x.dtype == torch.bfloat16 else np.uint64, shape)
    pairs = _memory(quantized, np.uint32 if dtype == torch.int16 else np.uint16, shape)
    scales = _memory(scale, np.float32, (shape[0], shape[2]))
    if dtype == torch.int16:
        _over_rows(kernels.asymmetric_activations, words, scales, pairs)
    else:  # `None` compiles the kernel anew
        _over_rows(
            kernels.activations, words, scales, pairs, *map(np.float32, limits), divided or None, dtype == FP8 or None
        )
    if not np.isfinite(scales).all():  # what becomes of NaN no kernel follows
        rows = torch.from_numpy(~np.isfinite(scales).all(1)).view(x.shape[:-1])
        quantized[rows], scale[rows] = plain(x[rows])
    return quantized, scale


def dequantize_activations(quantized: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """As [`activations.dequantize_activations`] of contiguous tensors."""
    out, groups = torch.empty(quantized.shape, dtype=dtype), scale.shape[-1]
    shape = scale.numel() // groups, 1, groups, quantized.shape[-1] // groups // 2
    pairs, scales = _memory(quantized, np.uint16, shape), _memory(scale, np.float32, (shape[0], groups))
    numbers = _memory(out, np.uint32 if dtype == torch.bfloat16 else np.uint64, shape)
    offset = None if quantized.dtype == FP8 else np.float32(128)
    _over_rows(kernels.decode, pairs, scales, None, numbers, np.uint16(0x8080), offset)
    return out


def _layout(scheme: QuantizationScheme) -> tuple[int, int]:
    """Bits that a code takes, and the highest one of two of them."""
    return (4, 0x88) if scheme.format == "pack-quantized" and scheme.weights.num_bits == 4 else (8, 0x8080)


def _words(weight: Tensor, scheme: QuantizationScheme) -> np.ndarray:
    """Two numbers a word: `(rows of scales, rows of each, scales in a row, words of each)`."""
    width, blocks = width_of_scales(weight.shape[1], scheme), scheme.weights.block_structure
    shape = -1, 1 if blocks is None else blocks[0], weight.shape[1] // width, width // 2
    return _memory(weight, np.uint32 if weight.dtype == torch.bfloat16 else np.uint64, shape)


def _memory(tensor: Tensor, dtype: type[np.generic], shape: tuple[int, ...] | None = None) -> np.ndarray:
    """The memory of a contiguous tensor as numbers of `dtype`."""
    # Not `tensor.numpy()`: that fixes the size of the storage for good, and FSDP frees a gathered weight by resizing it.
    count = tensor.numel() * tensor.element_size() // np.dtype(dtype).itemsize
    memory = (np.ctypeslib.as_ctypes_type(dtype) * count).from_address(tensor.data_ptr())
    memory.tensor = tensor  # which lives as long as the array
    return np.ctypeslib.as_array(memory).reshape(tensor.shape if shape is None else shape)


def _over_rows(kernel: Callable[..., None], *args: Any) -> None:
    """Call a kernel on parts of the rows, each in a thread; what is no array goes to every part."""
    rows = len(args[0])
    count = max(1, min(torch.get_num_threads(), rows, 2 * args[0].size // _WEIGHTS_PER_THREAD))
    bounds = [rows * i // count for i in range(count + 1)]
    first, *others = (
        [a[start:end] if isinstance(a, np.ndarray) else a for a in args] for start, end in itertools.pairwise(bounds)
    )
    with ThreadPoolExecutor(count) as pool:  # for this call only: threads that wait for work do not survive a fork
        futures = [pool.submit(kernel, *part) for part in others]
        kernel(*first)
    for future in futures:
        future.result()  # raises what the kernel raised; its part of the quantized values would be old memory
