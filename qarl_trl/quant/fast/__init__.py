"""The functions of `reference` and `activations` as compiled kernels: byte-identical, quicker, and optional (this folder can be deleted).

Invariant: a kernel is used only after it gave, in this process, on this device and for this scheme, the bytes of the plain
function: quantized values of every bfloat16 number below 1e37, and numbers of every code with every scale. Otherwise that is used.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from types import ModuleType

import torch
from compressed_tensors.quantization import QuantizationScheme, QuantizationType
from torch import Tensor

from .. import activations, reference
from ..reference import FP8, FP8_MAX, QParams
from ..scheme import has_global_scale, quantized_key


DTYPES = (torch.bfloat16, torch.float32)
_AGREES: dict[tuple, bool] = {}
Quantizer = Callable[[Tensor], tuple[Tensor, Tensor]]
# Of the quantizers of activations: numbers of a scale (0: a token's), dtype of the quantized values, whether numbers are divided by the
# scale or multiplied by its reciprocal, and largest, least and floor of max(max(magnitude, least) / largest, floor). The
# asymmetric one has a kernel of its own, on a CPU only.
RULES: dict[Quantizer, tuple[int, torch.dtype, bool, float, float, float]] = {
    activations.quantize_tokens_fp8: (0, FP8, False, FP8_MAX, 0.0, activations.FP8_MIN_SCALE),
    activations.quantize_groups_fp8: (128, FP8, True, FP8_MAX, activations.FP8_GROUP_MIN, 0.0),
    activations.quantize_tokens_int8: (0, torch.int8, False, 127.0, 0.0, 0.0),
    activations.quantize_tokens_int8_asymmetric: (0, torch.int16, False, 255.0, 0.0, 0.0),
}


def module_for(weight: Tensor, scheme: QuantizationScheme) -> ModuleType:
    """The module that quantizes a contiguous master `(out, in)`: `fast.cpu`, `fast.cuda` or `reference`."""
    return _checked(_quantizes_alike, weight.shape, weight.dtype, weight.device, scheme)


def decoder_for(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device, scheme: QuantizationScheme
) -> ModuleType:
    """The module that decodes a matrix `(out, in)` of this `shape`."""
    return _checked(_decodes_alike, shape, dtype, device, scheme)


def takes(shape: tuple[int, int], dtype: torch.dtype, scheme: QuantizationScheme) -> bool:
    """Whether there are kernels for a matrix, and whether its rows and groups are whole words of weights and of quantized values."""
    multiple = 32 // scheme.weights.num_bits if scheme.format == "pack-quantized" else 2
    width = reference.width_of_scales(shape[1], scheme)
    return dtype in DTYPES and shape[0] * shape[1] > 0 and width % 2 == 0 and shape[1] % multiple == 0


def quantizer_of(plain: Quantizer, x: Tensor) -> Quantizer:
    """What quantizes activations `x` `(..., in)` as `plain` does, a function of `activations`: a kernel, or `plain` itself."""
    compiled, (width, *rule) = _compiled(x.device.type), RULES[plain]
    if compiled is None or type(x) is not Tensor or x.dtype not in DTYPES or not x.is_contiguous() or not x.numel():
        return plain
    if x.shape[-1] % (width or 2) or x.storage_offset() % 2:  # kernels read two numbers at a time
        return plain

    def kernel(x: Tensor) -> tuple[Tensor, Tensor]:
        return compiled.quantize_activations(plain, x, width or x.shape[-1], *rule)

    case = (plain.__name__, x.device, x.dtype)
    agrees = _agrees(case, compiled.__name__, lambda: _same_activations(kernel, plain, compiled.__name__, *case[1:]))
    return kernel if agrees else plain


def activation_decoder(quantized: Tensor, scale: Tensor, dtype: torch.dtype) -> Callable[..., Tensor]:
    """What computes [`activations.dequantize_activations`] of contiguous quantized values: a kernel, or that function itself."""
    plain, compiled = activations.dequantize_activations, _compiled(quantized.device.type)
    whole = type(quantized) is Tensor and quantized.is_contiguous() and scale.is_contiguous() and quantized.numel() > 0
    if compiled is None or not whole or dtype not in DTYPES or quantized.dtype not in (FP8, torch.int8):
        return plain
    if quantized.shape[-1] // scale.shape[-1] % 2 or quantized.storage_offset() % 2:
        return plain
    case = (plain.__name__, quantized.device, quantized.dtype, dtype)
    agrees = _agrees(case, compiled.__name__, lambda: _same_numbers(compiled.dequantize_activations, plain, *case[1:]))
    return compiled.dequantize_activations if agrees else plain


def _checked(
    check: Callable[..., bool],
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    scheme: QuantizationScheme,
) -> ModuleType:
    """The compiled module of a device if there is one for the matrix, and if it has passed `check`."""
    compiled = _compiled(device.type)
    if compiled is None or not takes(shape, dtype, scheme):
        return reference
    case = (check.__name__, device, dtype, scheme.format, quantized_key(scheme.weights))
    agrees = _agrees(case, compiled.__name__, lambda: check(compiled, scheme, device, dtype))
    return compiled if agrees else reference


def _agrees(case: tuple, name: str, check: Callable[[], bool]) -> bool:
    """Whether the compiled functions of a case have passed their check, which runs once."""
    if case not in _AGREES:
        try:
            _AGREES[case] = check()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of whatever compiler there is
            warnings.warn(
                f"The compiled quantizer {name} does not run on {case[1]} ({type(error).__name__}: {error}). "
                "The plain operations are used instead: slower, with the same bytes.",
                stacklevel=4,
            )
            _AGREES[case] = False
    return _AGREES[case]


@functools.cache
def _compiled(device_type: str) -> ModuleType | None:
    try:
        return importlib.import_module(f".{device_type}", __package__)
    except ImportError:  # another device; or no numba, which comes with vLLM, or triton, with torch for CUDA
        return None


def _quantizes_alike(
    compiled: ModuleType, scheme: QuantizationScheme, device: torch.device, dtype: torch.dtype
) -> bool:
    """Whether `compiled` has the quantized values, scales and zero points of `reference`."""
    weight = sample(dtype).to(device)
    plain = weight.bfloat16()
    found, expected = [*compiled.extremes(weight, scheme)], [*reference.extremes(plain, scheme)]
    for global_scale in _global_scales(scheme, device):
        quantized, qparams = compiled.quantize(weight, scheme, global_scale)
        found += [quantized, *qparams]
        quantized, (scale, zero_point) = reference.quantize(plain, scheme, global_scale)
        expected += [quantized, scale, zero_point]
        if zero_point is not None:
            found.append(compiled.pack_zero_points(zero_point))
            expected.append(reference.pack_zero_points(zero_point))
        for factor in (1.0, 0.25):  # with scales of other weights quantized values saturate
            scales = (scale.float() * factor).to(scale.dtype).float()
            scales = torch.where(scales > 0, scales, scale.float()).to(scale.dtype)
            args = ((scales, zero_point), scheme, global_scale)
            found.append(compiled.encode(weight, *args))
            expected.append(reference.encode(plain, *args))
    found.append(_finite(compiled, weight, scheme))
    expected.append(_finite(reference, plain, scheme))
    return _same_bytes(found, expected, compiled.__name__, f"{quantized_key(scheme.weights)}, {dtype}")


def _decodes_alike(compiled: ModuleType, scheme: QuantizationScheme, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `compiled` has the numbers of `reference`, of every code with every scale and of a quantized weight."""
    weight = sample(torch.bfloat16).to(device)
    found, expected = [], []
    for global_scale in _global_scales(scheme, device):
        quantized = *reference.quantize(weight, scheme, global_scale), scheme, weight.shape[1]
        for case in (every_gemm(scheme, device), quantized):
            for results, module in ((found, compiled), (expected, reference)):
                results.append(module.decode(*case, dtype, global_scale))
    return _same_bytes(found, expected, compiled.__name__, f"{quantized_key(scheme.weights)}, {dtype}")


def _same_activations(
    kernel: Quantizer, plain: Quantizer, compiled: str, device: torch.device, dtype: torch.dtype
) -> bool:
    """Whether `kernel` has the quantized values and scales of `plain`, also of ties, and NaN where that has it."""
    found, expected, samples = [], [], [sample(dtype)]
    for low, high in ((-448.0, 448.0), (-127.0, 127.0), (-128.0, 127.0)):  # a scale of 1
        samples.append(samples[0][:256].clamp(low, high))
        samples[-1][:, ::128], samples[-1][:, 1::128] = low, high
    x = torch.cat(samples).to(device)
    diverged = samples[-1].to(device)
    diverged[::3, 5], diverged[1::3, 6] = torch.nan, torch.inf
    for results, function in ((found, kernel), (expected, plain)):
        results += function(x)
        results += [y.float().nan_to_num(-1.0, torch.inf, -torch.inf) for y in function(diverged)]
    return _same_bytes(found, expected, compiled, f"{plain.__name__}, {dtype}")


def _same_numbers(
    kernel: Callable[..., Tensor],
    plain: Callable[..., Tensor],
    device: torch.device,
    quantized_dtype: torch.dtype,
    dtype: torch.dtype,
) -> bool:
    """Whether `kernel` has the numbers of `plain`, of every code with scales of all sizes, and NaN where that has it."""
    scale = torch.cat((sample(torch.float32)[:512, :2].abs(), torch.tensor([[0.0, torch.inf], [torch.nan, 1.0]])))
    quantized = torch.arange(256).repeat(len(scale), 2).to(torch.uint8).view(quantized_dtype)
    found, expected = (
        [function(quantized.to(device), scale.to(device), dtype).float().nan_to_num(-1.0, torch.inf, -torch.inf)]
        for function in (kernel, plain)
    )
    return _same_bytes(found, expected, kernel.__module__, f"{plain.__name__}, {quantized_dtype} to {dtype}")


def _same_bytes(found: list, expected: list, compiled: str, case: str) -> bool:
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if not a is b is None]
    if all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs):
        return True
    warnings.warn(
        f"The compiled quantizer {compiled} gives other bytes on {pairs[0][0].device} than the plain operations "
        f"({case}), which are used instead: slower, with the right bytes. "
        "Please report this with the versions of torch and numba or triton.",
        stacklevel=5,
    )
    return False


def every_gemm(scheme: QuantizationScheme, device: torch.device) -> tuple[Tensor, QParams, QuantizationScheme, int]:
    """
    What `decode` takes for every code with every scale, finite and not below zero; rows have 256 quantized values.

    With zero points it is every difference of the two. Float8 quantized values of NaN, which no quantizer writes, are left out, and
    blocks are of two rows.
    """
    args, zero_point = scheme.weights, None
    if has_global_scale(scheme):
        scale, pairs = torch.arange(0x7F, device=device), torch.arange(0x10, 0x100, 0x22, device=device)
        quantized = pairs.to(torch.uint8).repeat(len(scale), 16)
        return quantized, (scale.to(torch.uint8).view(reference.FP8).unsqueeze(-1).repeat(1, 16), None), scheme, 256
    scale = torch.arange(0x7F80, device=device).to(torch.int16).view(torch.bfloat16).unsqueeze(-1)
    row = torch.arange(256, device=device)
    if args.type == QuantizationType.FLOAT:
        row = row.masked_fill(row & 0x7F == 0x7F, 0).to(torch.uint8).view(reference.FP8)
    else:
        row = (row % (1 << args.num_bits) - (1 << (args.num_bits - 1))).to(torch.int8)
    if not args.symmetric:
        zero_point = torch.tensor((-8, 7), dtype=torch.int8, device=device).repeat_interleave(len(scale)).unsqueeze(-1)
        scale = scale.repeat(2, 1)
    rows = row.unsqueeze(0)
    if args.block_structure is not None:  # two blocks next to each other, each with all quantized values
        scheme = scheme.model_copy(deep=True)
        scheme.weights.block_structure = [2, 128]
        rows, scale = row.view(2, 128).repeat(1, 2), scale.view(-1, 2)
    if scheme.format == "pack-quantized":
        rows = reference.packed(rows, args.num_bits)
    groups = 256 // reference.width_of_scales(256, scheme) // scale.shape[1]
    quantized, scale = rows.repeat(len(scale), 1), scale.repeat(1, groups)
    zero_point = None if zero_point is None else zero_point.repeat(1, groups)
    return quantized, (scale, zero_point), scheme, 256


def _finite(quantizer: ModuleType, weight: Tensor, scheme: QuantizationScheme) -> Tensor:
    """Which extremes and scales are finite with NaN and infinity in two of three rows: a diverged weight is told by them."""
    weight = weight.clone()
    # NaN and infinity of either sign, as patterns: a negative NaN does not survive a conversion.
    shift = 0 if weight.dtype == torch.bfloat16 else 16
    patterns = weight.view(torch.int16 if shift == 0 else torch.int32)
    for start, value in enumerate((0x7FC0, 0x7F80, 0xFFC0 - 0x10000, 0xFF80 - 0x10000)):
        patterns[start::6].fill_diagonal_(value << shift)
    low, high = quantizer.extremes(weight, scheme)
    found = torch.maximum(high, -low)
    if not has_global_scale(scheme):  # below one, scales are float8 and saturate
        found = torch.stack((found, quantizer.quantize(weight, scheme)[1][0]))
    return found.isfinite()


def _global_scales(scheme: QuantizationScheme, device: torch.device) -> list[Tensor | None]:
    """Global scales under which some of [`sample`]'s own scales are in range, each for other sizes of weights."""
    if not has_global_scale(scheme):
        return [None]
    return [
        torch.tensor([reference.FP8_MAX * reference.FP4_MAX / largest], device=device)
        for largest in (1e37, 1e15, 8.0, 1e-10, 1e-30)
    ]


def sample(dtype: torch.dtype) -> Tensor:
    """Weights `(1024, 256)` with every bfloat16 number below 1e37, near ones and all sizes in a row, and many ties."""
    with torch.device("cpu"):
        patterns = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).float()
        patterns = torch.where(patterns.abs() < 1e37, patterns, -0.0).view(256, 256)
        rng = torch.Generator().manual_seed(0)
        noise = torch.randn(256, 256, generator=rng) * torch.logspace(-30, 4, 256).unsqueeze(-1)
        halves = torch.randint(-16, 17, (256, 256), generator=rng) / 2
        halves[:, ::16] = 7.5  # a scale of 1 where quantized values have 4 bits
        weight = torch.cat((patterns, patterns.t(), noise, halves)).bfloat16()
        return weight if dtype == torch.bfloat16 else between(weight).to(dtype)


def between(weight: Tensor, seed: int = 0) -> Tensor:
    """float32 numbers from those of a bfloat16 `weight` to the next larger ones, a fifth of them halfway."""
    low_bits = torch.randint(0, 5, weight.shape, generator=torch.Generator().manual_seed(seed)) * 2**14
    return (weight.float().view(torch.int32) | low_bits.clamp(max=2**16 - 1).int()).view(torch.float32)
