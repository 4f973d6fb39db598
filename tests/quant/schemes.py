"""Every scheme of the support table, and what its bytes are by definition and by compressed-tensors."""

from __future__ import annotations

import references
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

from qarl_trl.quant import quantize_weight, resolve_scheme
from qarl_trl.quant.scheme import has_global_scale
from qarl_trl.quant.supported import SUPPORTED


# Its global scale belongs to several layers: tests/quant/test_nvfp4.py.
NVFP4 = "NVFP4A16"
# Each with the group size of its preset.
NAMES = [name for name in SUPPORTED if name != NVFP4]


def with_every_group_size(names):
    """Names and group sizes; `None` for a scheme without groups."""
    pairs = []
    for name in names:
        for size in SUPPORTED[name].group_sizes or (None,):
            pairs.append((name, size))
    return pairs


SCHEMES = with_every_group_size(NAMES)
ALL_SCHEMES = [*SCHEMES, (NVFP4, None)]
# Those whose layers multiply inputs as they are.
WEIGHT_ONLY = [name for name in NAMES if SUPPORTED[name].activations == "none"]


def normal(*shape, seed=0, dtype=torch.float32, scale=1.0):
    # A generator of its own: what a test drew before does not matter, nor does the order of tests.
    generator = torch.Generator().manual_seed(seed)
    numbers = scale * torch.randn(*shape, generator=generator)
    return numbers.to(dtype)


# 128 rows are one block of FP8_BLOCK, and 256 columns two groups of 128: a scale of the wrong group is seen.
def low_bit_of(scheme, group_size=None, shape=(128, 256), seed=0):
    return quantize_weight(normal(*shape, seed=seed), resolve_scheme(scheme, group_size))


def as_bytes(tensor):
    """The bytes of a tensor in the order of its elements."""
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def same_bytes(a, b):
    # Not `torch.equal` of the tensors: it takes 0.0 for -0.0, and no NaN for itself.
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(as_bytes(a), as_bytes(b))


def same_tensors(tensors, expected):
    """Whether two dicts hold the same bytes under the same names."""
    if tensors.keys() != expected.keys():
        return False

    return all(same_bytes(tensors[name], tensor) for name, tensor in expected.items())


def copies(named_tensors):
    """Copies by name of a stream or of named parameters, which a later write does not reach."""
    # One after the other: what a stream gives may be gone when the next comes.
    copied = {}
    for name, tensor in named_tensors:
        copied[name] = tensor.detach().clone()
    return copied


def names_in(named):
    """The names of a stream, or of named parameters or modules, in their order."""
    return [name for name, _ in named]


def relative_error(numbers, expected):
    difference = numbers.double() - expected.double()
    return (difference.norm() / expected.double().norm()).item()


# The definition -----------------------------------------------------------------------------------------------------


def by_definition(weight, scheme, group_size=None):
    """The tensors of a checkpoint, by `references`."""
    if scheme == NVFP4:
        return _float4_by_definition(weight)
    if scheme == "FP8_DYNAMIC":
        return _float8_tensors(*references.quantize_float8(weight))
    if scheme == "FP8_BLOCK":
        return _float8_tensors(*references.quantize_float8_blocks(weight))
    return _integers_by_definition(weight, scheme, None if group_size == -1 else group_size)


def _float8_tensors(quantized, scales):
    return {"weight": quantized.view(torch.float8_e4m3fn), "weight_scale": scales}


def _float4_by_definition(weight):
    quantized, scales, global_scale = references.quantize_float4(weight)
    values = torch.tensor(quantized, dtype=torch.uint8)
    return {
        # Two values to a byte, the first in the low bits.
        "weight_packed": values[:, ::2] | values[:, 1::2] << 4,
        "weight_scale": torch.tensor(scales, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([global_scale]),
    }


def _integers_by_definition(weight, scheme, group_size):
    bits = 8 if scheme in ("W8A16", "W8A8") else 4
    zero_points = None
    if scheme == "W4A16_ASYM":
        quantized, scales, zero_points = references.quantize_int4_asymmetric(weight, group_size)
    else:
        quantized, scales = references.quantize_int(weight, bits, group_size)

    tensors = {"weight_scale": torch.tensor(scales, dtype=torch.bfloat16)}
    if scheme in ("W8A8", "W4A8"):
        tensors["weight"] = torch.tensor(quantized, dtype=torch.int8)
        return tensors

    tensors["weight_packed"] = references.pack_int(quantized, bits)
    tensors["weight_shape"] = torch.tensor(weight.shape)
    if zero_points is not None:
        tensors["weight_zero_point"] = references.pack_zero_points(zero_points)
    return tensors


# compressed-tensors -------------------------------------------------------------------------------------------------


def observed(weight, scheme, global_scale=None):
    """Scale and zero point between minimum and maximum, as llm-compressor's observer finds them."""
    args = scheme.weights
    rows, columns = weight.shape

    if args.block_structure is not None:
        height, width = args.block_structure
        tiles = weight.reshape(rows // height, height, columns // width, width)
        # Neither is clamped at zero: `calculate_qparams` does that.
        low = tiles.amin((1, 3))
        high = tiles.amax((1, 3))
    else:
        groups = weight.reshape(rows, -1, args.group_size or columns)
        low = groups.amin(-1)
        high = groups.amax(-1)
    return calculate_qparams(low, high, args, global_scale)


def compressed(weight, scheme, qparams=None):
    """The tensors of a checkpoint, by the compressor of the scheme's format; `weight` in bfloat16."""
    tensors = {"weight": weight}
    if has_global_scale(scheme):
        # Of the whole weight, as llm-compressor's observer: a minimum and a maximum, though the scheme is symmetric.
        largest = weight.abs().max().reshape(1)
        tensors["weight_global_scale"] = generate_gparam(-largest, largest)

    if qparams is None:
        qparams = observed(weight, scheme, tensors.get("weight_global_scale"))
    scale, zero_point = qparams
    tensors["weight_scale"] = scale
    if zero_point is not None:
        tensors["weight_zero_point"] = zero_point
    return _compressor(scheme).compress(tensors, scheme)


def decompressed(low_bit):
    """The matrix `(out, in)` of a `LowBitWeight`."""
    matrix = _compressor(low_bit.scheme).decompress(dict(low_bit.tensors), low_bit.scheme)
    return matrix["weight"]


def _compressor(scheme):
    return BaseCompressor.get_value_from_registry(scheme.format.value)
