"""Quantization on a CPU in one pass over the weight, by kernels that numba compiles: extremes, scales and codes row by row.

The functions are those of `reference`. They take float32 weights too, without a bfloat16 copy of them.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from compressed_tensors.quantization import QuantizationScheme, QuantizationType
from compressed_tensors.quantization.utils import calculate_range
from torch import Tensor

from ..reference import FP8, width_of_scales
from . import cpu_kernels as kernels


# Half a millisecond of work, a few times what starting a thread costs.
_WEIGHTS_PER_THREAD = 1 << 20


def extremes(weight: Tensor, scheme: QuantizationScheme) -> tuple[Tensor, Tensor]:
    """As [`reference.extremes`]."""
    words = _words(weight, scheme)
    low, high = (torch.empty(words.shape[0], words.shape[2], dtype=torch.bfloat16) for _ in range(2))
    _over_rows(kernels.extremes, words, _memory(low, np.uint16), _memory(high, np.uint16), scheme.weights.symmetric)
    return low, high


def quantize(
    weight: Tensor, scheme: QuantizationScheme, global_scale: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As [`reference.quantize`]."""
    words, args = _words(weight, scheme), scheme.weights
    scale = torch.empty(words.shape[0], words.shape[2], dtype=args.scale_dtype or torch.bfloat16)
    zero_point = None if args.symmetric else torch.empty(scale.shape, dtype=torch.int8)
    low, high = (limit.item() for limit in calculate_range(args, weight.device))
    steps = (high - low) / (2 if args.symmetric else 1)
    return _encode(weight, words, scale, zero_point, scheme, global_scale, steps), scale, zero_point


def encode(
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    scheme: QuantizationScheme,
    global_scale: Tensor | None = None,
) -> Tensor:
    """As [`reference.encode`]."""
    zero_point = None if zero_point is None else zero_point.contiguous()
    return _encode(weight, _words(weight, scheme), scale.contiguous(), zero_point, scheme, global_scale, kernels.GIVEN)


def pack_zero_points(zero_point: Tensor) -> Tensor:
    """As [`reference.pack_zero_points`], in a fraction of its time."""
    zero_point = zero_point.contiguous()
    out = torch.empty(-(-zero_point.shape[0] // 8), zero_point.shape[1], dtype=torch.int32)
    kernels.words_of_rows(_memory(zero_point, np.int8), _memory(out, np.uint32))
    return out


def _encode(
    weight: Tensor,
    words: np.ndarray,
    scale: Tensor,
    zero_point: Tensor | None,
    scheme: QuantizationScheme,
    global_scale: Tensor | None,
    steps: float,
) -> Tensor:
    """Codes of a weight, which is given as [`_words`] too; writes `scale` and `zero_point` unless `steps` is `kernels.GIVEN`."""
    bits, packed, steps = scheme.weights.num_bits, scheme.format == "pack-quantized", np.float32(steps)
    scales = _memory(scale, np.uint16 if global_scale is None else np.uint8)
    if global_scale is not None:
        out = torch.empty(weight.shape[0], weight.shape[1] // 2, dtype=torch.uint8)
        codes, global_number = _memory(out, np.uint8, words.shape), np.float32(global_scale.item())
        _over_rows(kernels.float4, words, scales, codes, steps, global_number)
    elif scheme.weights.type == QuantizationType.FLOAT:
        out = torch.empty(weight.shape, dtype=FP8)
        _over_rows(kernels.float8, words, scales, _memory(out, np.uint16, words.shape), steps)
    elif packed and bits == 4:
        out = torch.empty(weight.shape[0], weight.shape[1] // 8, dtype=torch.int32)
        codes = _memory(out, np.uint8, words.shape)
        if zero_point is None:
            _over_rows(kernels.packed_int4, words, scales, codes, steps)
        else:
            _over_rows(kernels.packed_int4_asymmetric, words, scales, _memory(zero_point, np.int8), codes, steps)
    else:
        out = torch.empty(weight.shape, dtype=torch.int8)
        # In a packed word a code has 128 added, which is its two's complement with the highest bit turned.
        half, flip = np.float32(1 << (bits - 1)), np.uint32(0x8080 if packed else 0)
        _over_rows(kernels.int8, words, scales, _memory(out, np.uint16, words.shape), steps, -half, half - 1, flip)
        out = out.view(torch.int32) if packed else out
    return out


def _words(weight: Tensor, scheme: QuantizationScheme) -> np.ndarray:
    """Two numbers a word: `(rows of scales, rows of each, scales in a row, words of each)`."""
    width, blocks = width_of_scales(weight, scheme), scheme.weights.block_structure
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
    # Started for this call only: threads that wait for work do not survive a fork.
    count = max(1, min(torch.get_num_threads(), rows, 2 * args[0].size // _WEIGHTS_PER_THREAD))
    bounds = [rows * i // count for i in range(count + 1)]
    first, *others = (
        [a[start:end] if isinstance(a, np.ndarray) else a for a in args] for start, end in itertools.pairwise(bounds)
    )
    failures: list[BaseException] = []

    def run(part: list[Any]) -> None:
        try:
            kernel(*part)
        except BaseException as error:  # a thread would only print it, and the rest of the codes would be old memory
            failures.append(error)

    threads = [threading.Thread(target=run, args=(part,)) for part in others]
    for thread in threads:
        thread.start()
    run(first)
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
