"""`decode` of `qarl_trl.quant.fast`: compiled kernels give the numbers of the plain operations, or are not used."""

import re
import sys
import warnings

import pytest
import references
import torch

from qarl_trl.quant import fast, quantize_weight, reference, resolve_scheme
from qarl_trl.quant.gemm import dequantize
from quant.schemes import ALL_SCHEMES, NAMES, NVFP4, low_bit_of, normal, same_bytes
from quant.test_fast import interpreted
from quant.test_reference import many_weights


cpu = pytest.importorskip("qarl_trl.quant.fast.cpu")  # numba comes with vLLM
kernels = pytest.importorskip("qarl_trl.quant.fast.cpu_kernels")

pytestmark = pytest.mark.usefixtures("forgotten")
DTYPES = [torch.bfloat16, torch.float32]
CPU = torch.device("cpu")


@pytest.fixture
def plain(monkeypatch):
    """Dequantize with the plain operations."""

    def dequantized(low_bit, dtype=torch.bfloat16):
        with monkeypatch.context() as context:
            context.setattr(fast, "_compiled", lambda device_type: None)
            return dequantize(low_bit, dtype)

    return dequantized


def decoder(scheme, shape=(256, 256), dtype=torch.bfloat16):
    return fast.decoder_for(shape, dtype, CPU, scheme)


# On the CPU ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weight():
    return many_weights(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("scheme", "group_size"), ALL_SCHEMES)
def test_a_million_weights_have_the_bytes_of_the_plain_operations(weight, plain, scheme, group_size, dtype):
    low_bit = quantize_weight(weight, resolve_scheme(scheme, group_size))
    assert decoder(low_bit.scheme, low_bit.shape, dtype) is cpu
    found, expected = dequantize(low_bit, dtype), plain(low_bit, dtype)
    assert found.dtype == dtype
    assert same_bytes(found, expected)
    assert found.is_contiguous()
    other = quantize_weight(-weight, low_bit.scheme)
    assert not same_bytes(dequantize(other, dtype), expected)  # control


@pytest.mark.parametrize("scheme", NAMES)
def test_numbers_are_those_of_the_definition_with_scales_of_any_size(scheme):
    """Every code with scales from the least bfloat16 number to large ones, by Python's own numbers."""
    resolved = resolve_scheme(scheme)
    quantized, (scale, zero_point), resolved, columns = fast.every_gemm(resolved, CPU)
    height = len(quantized) // len(scale)
    chosen = torch.cat([torch.arange(5), torch.arange(5, len(scale), 1997)])
    chosen = chosen[scale[chosen].amax(-1) < 2.0**110]
    lines = (chosen.unsqueeze(-1) * height + torch.arange(height)).flatten()
    zero_point = None if zero_point is None else zero_point[chosen]
    quantized, scale = quantized[lines], scale[chosen]
    found = cpu.decode(quantized, (scale, zero_point), resolved, columns, torch.bfloat16)
    if resolved.format == "pack-quantized":
        rows = references.unpack_int(quantized, resolved.weights.num_bits, columns)
    elif resolved.weights.type == "float":
        rows = [[references.float8_value(code) for code in row] for row in quantized.view(torch.uint8).tolist()]
    else:
        rows = quantized.tolist()
    scales = scale.repeat_interleave(height, dim=0).tolist()
    zero_points = None if zero_point is None else zero_point.tolist()
    assert same_bytes(found, references.dequantize_rows(rows, scales, zero_points))
    assert (found.abs() < 2.0**-126).any() and (found.abs() > 2.0**90).any()  # subnormal and large ones


@pytest.mark.parametrize("scheme", NAMES)
def test_the_comparison_sees_every_code_with_every_scale(scheme):
    resolved = resolve_scheme(scheme)
    quantized, (scale, zero_point), resolved, columns = fast.every_gemm(resolved, CPU)
    if resolved.format == "pack-quantized":
        quantized = reference.unpacked(quantized, resolved.weights.num_bits, columns)
    quantized = reference.as_blocks(quantized.view(torch.int8), resolved).int()
    if zero_point is not None:
        quantized = quantized - zero_point.unsqueeze(-1)
    bits = scale.view(torch.int16).int().unsqueeze(-1)
    pairs = ((quantized + 256) << 16 | bits).unique()
    numbers = {4: 31 if zero_point is not None else 16, 8: 254 if resolved.weights.type == "float" else 256}
    assert len(pairs) == 0x7F80 * numbers[resolved.weights.num_bits]
    assert scale.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["W4A16", "W4A16_ASYM", "FP8_BLOCK", "W8A8"])
def test_rows_of_a_larger_matrix_and_parts_for_threads_leave_none_out(plain, monkeypatch, name, dtype):
    monkeypatch.setattr(cpu, "_WEIGHTS_PER_THREAD", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    low_bit = low_bit_of(name, shape=(640, 384))
    whole = plain(low_bit, dtype)
    assert same_bytes(dequantize(low_bit, dtype), whole)
    parts = [dequantize(part, dtype) for part in low_bit.split(128)]
    assert same_bytes(torch.cat(parts), whole)


@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM", "W8A16", "W8A8", "W4A8", "FP8_DYNAMIC"])
@pytest.mark.parametrize("width", [1, 2, 7, 20, 130, 264])
def test_any_width_has_the_bytes_of_the_plain_operations(weight, plain, scheme, width):
    resolved = resolve_scheme(scheme)
    resolved.weights.strategy, resolved.weights.group_size = "channel", None
    low_bit = quantize_weight(weight[::8, :width].contiguous(), resolved)
    whole_words = width % (32 // resolved.weights.num_bits if resolved.format == "pack-quantized" else 2) == 0
    assert decoder(resolved, low_bit.shape) is (cpu if whole_words else reference)
    assert same_bytes(dequantize(low_bit), plain(low_bit))


def test_other_dtypes_and_devices_take_the_plain_operations(monkeypatch):
    scheme = resolve_scheme("W4A16")
    assert decoder(scheme, dtype=torch.float16) is reference
    assert fast.decoder_for((4, 128), torch.bfloat16, torch.device("meta"), scheme) is reference
    monkeypatch.setitem(sys.modules, "qarl_trl.quant.fast.cpu", None)
    fast._compiled.cache_clear()
    try:
        assert decoder(scheme) is reference
    finally:
        fast._compiled.cache_clear()


# A kernel that gives other numbers is not used ------------------------------------------------------------------------


def one_bit_off(decode):
    def broken(*args):
        out = decode(*args)
        out.view(torch.uint8)[-1, -1] ^= 1
        return out

    return broken


def unrounded(decode):
    """The mistake a fused kernel makes most easily: quantized values times scale in float32."""

    def broken(quantized, qparams, scheme, columns, dtype, _):
        scale, zero_point = (None if t is None else t.float() for t in qparams)
        return decode(quantized, (scale, zero_point), scheme, columns, torch.float32).to(dtype)

    return broken


def truncated(decode):
    def broken(quantized, qparams, scheme, columns, dtype, _):
        scale, zero_point = qparams
        exact = reference.decode(quantized, (scale.float(), zero_point), scheme, columns, torch.float32)
        return (exact.view(torch.int32) & -65536).view(torch.float32).to(dtype)

    return broken


def without_subnormal_scales(decode):
    def broken(quantized, qparams, *args):
        scale, zero_point = qparams
        return decode(quantized, (torch.where(scale < 2.0**-126, 0.0, scale), zero_point), *args)

    return broken


def with_neighbouring_scales(decode):
    def broken(quantized, qparams, *args):
        scale, zero_point = qparams
        return decode(quantized, (scale.roll(1, -1), zero_point), *args)

    return broken


def with_a_rounded_scale(decode):
    """The mistake below a global scale: the scale in bfloat16."""

    def broken(quantized, qparams, scheme, columns, dtype, global_scale):
        unit = (qparams[0].float() / global_scale).bfloat16()
        blocks = reference.as_blocks(reference.unpack_fp4(quantized), scheme)
        return (blocks * unit.unsqueeze(-1)).flatten(1).bfloat16().to(dtype)

    return broken


@pytest.mark.parametrize("scheme", NAMES)
@pytest.mark.parametrize("broken", [one_bit_off, truncated, without_subnormal_scales])
def test_a_kernel_with_other_numbers_is_reported_and_not_used(plain, monkeypatch, scheme, broken):
    low_bit = low_bit_of(scheme)
    assert decoder(low_bit.scheme) is cpu
    fast._AGREES.clear()
    monkeypatch.setattr(cpu, "decode", broken(cpu.decode))
    with pytest.warns(UserWarning, match="gives other bytes on cpu"):
        assert decoder(low_bit.scheme, low_bit.shape) is reference
    assert same_bytes(dequantize(low_bit), plain(low_bit))  # and told only once
    assert fast.module_for(normal(256, 256), low_bit.scheme) is cpu  # of the quantizer it says nothing


@pytest.mark.parametrize(
    ("scheme", "dtype", "broken"),
    [
        ("W4A16", torch.bfloat16, with_neighbouring_scales),
        ("FP8_BLOCK", torch.float32, with_neighbouring_scales),
        ("W8A8", torch.float32, lambda decode: unrounded(reference.decode)),
        (NVFP4, torch.bfloat16, one_bit_off),
        (NVFP4, torch.float32, with_neighbouring_scales),
        (NVFP4, torch.float32, with_a_rounded_scale),
    ],
)
def test_other_mistakes_would_be_seen_too(monkeypatch, scheme, dtype, broken):
    monkeypatch.setattr(cpu, "decode", broken(cpu.decode))
    with pytest.warns(UserWarning, match="gives other bytes on cpu"):
        assert decoder(resolve_scheme(scheme), dtype=dtype) is reference


def test_a_kernel_that_does_not_compile_is_not_used(plain, monkeypatch):
    def failing(*args):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(kernels, "decode", failing)
    low_bit = low_bit_of("W4A16")
    with pytest.warns(UserWarning, match="does not run on cpu.*no compiler"):
        assert same_bytes(dequantize(low_bit), plain(low_bit))
    assert decoder(low_bit.scheme) is reference  # and warned once


# For the GPU --------------------------------------------------------------------------------------------------------

INTERPRETED = """
import torch
from qarl_trl.quant import fast, reference, resolve_scheme
from qarl_trl.quant.fast import cuda
cuda._WORDS_PER_PROGRAM = 2**18  # the interpreter's time is that of its programs
for name, group_size, dtype in {cases}:
    assert fast._decodes_alike(cuda, resolve_scheme(name, group_size), torch.device("cpu"), dtype), (name, dtype)
    print(name, "agrees")
# Sizes that fill no tile, and rows of several.
cuda._WORDS_PER_PROGRAM = 256
for name, width in (("W8A8", 1050), ("FP8_DYNAMIC", 1050), ("W4A16_ASYM", 1152)):
    scheme, weight = resolve_scheme(name), torch.randn(10, width).bfloat16()
    args = *reference.quantize(weight, scheme), scheme, width, torch.float32
    assert torch.equal(cuda.decode(*args), reference.decode(*args)), name
    print(name, "takes any size")
"""


@pytest.mark.slow
def test_the_triton_kernel_has_the_bytes_of_the_plain_operations():
    """In Triton's interpreter, on a CPU."""
    pytest.importorskip("triton")
    cases = [("W4A16_ASYM", 32, torch.float32), ("W8A16", -1, torch.bfloat16), ("FP8_BLOCK", None, torch.bfloat16)]
    cases.append((NVFP4, None, torch.bfloat16))
    result = interpreted(INTERPRETED.format(cases=cases))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("agrees") == len(cases)
    assert result.stdout.count("takes any size") == 3


@pytest.mark.slow
def test_the_triton_kernel_has_the_bytes_of_the_plain_operations_in_every_scheme():
    pytest.importorskip("triton")
    cases = [(name, None, dtype) for name in (*NAMES, NVFP4) for dtype in DTYPES]
    result = interpreted(INTERPRETED.format(cases=cases))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("agrees") == len(cases)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("word", ["*i32", "*i64"])
def test_triton_compiles_what_was_written(word, capability):
    """For a GPU that is not there, by the bundled assembler: nothing fused, no subnormals flushed."""
    triton = pytest.importorskip("triton")
    warnings.simplefilter("ignore")  # that it fuses by default, which is what is looked for here
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from qarl_trl.quant.fast import cuda

    cases = [(False, False, 4, True), (False, True, 4, True), (False, False, 8, True), (True, False, 8, True)]
    cases += [(True, False, 4, True), (False, False, 8, False), (True, False, 8, False)]
    for is_float, asymmetric, bits, rounded in cases:
        constants = {"ROWS": 32, "COLUMNS": 64, "FLOAT": is_float, "ASYMMETRIC": asymmetric, "CODE_BITS": bits}
        constants |= {"FLIP": 128, "OFFSET": 128.0, "ROUNDED": rounded}
        pointers = {"words": word, "scales": "*fp32", "zeros": "*fp32", "pairs": "*u8" if bits == 4 else "*i16"}
        signature = pointers | {"rows": "i32", "columns": "i32"} | dict.fromkeys(constants, "constexpr")
        source = ASTSource(cuda._decode, signature=signature, constexprs=constants)
        text = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
        floats = set(re.findall(r"(?:abs|add|div|fma|mul|neg|rcp|sub)(?:\.[a-z]+)*\.f32", text))
        assert {"mul.f32"} <= floats <= {"add.f32", "mul.f32", "sub.f32"}, floats
