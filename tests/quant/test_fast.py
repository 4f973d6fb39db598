"""`qarl_trl.quant.fast`: compiled kernels give the bytes of the plain operations, or are not used."""

import os
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from qarl_trl.quant import fast, quantize_weight, reference, resolve_scheme
from quant.schemes import ALL_SCHEMES, NAMES, NVFP4, normal, same_tensors
from quant.test_reference import many_weights, parts


cpu = pytest.importorskip("qarl_trl.quant.fast.cpu")  # numba comes with vLLM
numba = pytest.importorskip("numba")
kernels = pytest.importorskip("qarl_trl.quant.fast.cpu_kernels")

pytestmark = pytest.mark.usefixtures("forgotten")
DTYPES = [torch.bfloat16, torch.float32]


@pytest.fixture
def plain(monkeypatch):
    """Quantize with the plain operations."""

    def quantize(weight, scheme, qparams=None):
        with monkeypatch.context() as context:
            context.setattr(fast, "_compiled", lambda device_type: None)
            return quantize_weight(weight, scheme, qparams).tensors

    return quantize


@pytest.fixture(scope="module")
def weight():
    return many_weights(0)


# On the CPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("scheme", "group_size"), ALL_SCHEMES)
def test_a_million_weights_have_the_bytes_of_the_plain_operations(weight, plain, scheme, group_size, dtype):
    resolved = resolve_scheme(scheme, group_size)
    for part in parts(weight if dtype == torch.bfloat16 else fast.between(weight), resolved):
        assert fast.module_for(part, resolved) is cpu
        assert same_tensors(quantize_weight(part, resolved).tensors, plain(part, resolved))


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "group_size"), ALL_SCHEMES)
def test_ten_million_weights_have_the_bytes_of_the_plain_operations(plain, scheme, group_size):
    """The plain ones are compared with compressed-tensors on the same weights in `test_quantized.py`."""
    resolved = resolve_scheme(scheme, group_size)
    for seed in range(1, 11):
        weight = many_weights(seed)
        for master in (*parts(weight, resolved), *parts(fast.between(weight, seed), resolved)):
            assert fast.module_for(master, resolved) is cpu
            assert same_tensors(quantize_weight(master, resolved).tensors, plain(master, resolved)), seed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", NAMES)
def test_frozen_scales_give_the_bytes_of_the_plain_operations(weight, plain, scheme, dtype):
    resolved = resolve_scheme(scheme)
    scale = quantize_weight(weight * 0.25, resolved).scale
    zero_point = None if resolved.weights.symmetric else torch.full(scale.shape, 5, dtype=torch.int8)
    master = weight if dtype == torch.bfloat16 else fast.between(weight)
    found = quantize_weight(master, resolved, (scale, zero_point)).tensors
    assert same_tensors(found, plain(master, resolved, (scale, zero_point)))
    assert not torch.equal(
        *(
            t["weight_packed" if "weight_packed" in t else "weight"].view(torch.uint8)
            for t in (found, quantize_weight(master, resolved).tensors)
        )
    )  # control: other quantized values


@pytest.mark.parametrize("rows", [1, 7, 8, 20])
def test_words_of_zero_points_have_the_bytes_of_the_plain_operations(rows):
    zero_point = torch.arange(rows * 5).remainder(16).sub(8).to(torch.int8).view(rows, 5)
    found = cpu.pack_zero_points(zero_point)
    assert torch.equal(found, reference.pack_zero_points(zero_point))
    assert torch.equal(reference.unpack_zero_points(found, rows), zero_point)
    assert not torch.equal(found, cpu.pack_zero_points(zero_point.roll(1, 0).roll(1, 1)))  # control


@pytest.mark.parametrize("name", ["W4A16", "FP8_BLOCK", NVFP4])
@pytest.mark.parametrize("rows", [1, 3, 17])
def test_parts_of_the_rows_for_several_threads_leave_none_out(plain, monkeypatch, name, rows):
    monkeypatch.setattr(cpu, "_WEIGHTS_PER_THREAD", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    height = 128 if name == "FP8_BLOCK" else 241
    weight, scheme = normal(rows * height, 128, dtype=torch.bfloat16), resolve_scheme(name)
    assert same_tensors(quantize_weight(weight, scheme).tensors, plain(weight, scheme))


def test_an_error_in_a_thread_is_raised(monkeypatch):
    """A thread would only print it, and its part of the quantized values would be what was in memory before."""
    monkeypatch.setattr(cpu, "_WEIGHTS_PER_THREAD", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    weight, scheme, encode = normal(30, 128, dtype=torch.bfloat16), resolve_scheme("W4A16"), kernels.encode
    main, threads = threading.current_thread(), set()
    quantize_weight(weight, scheme)

    def failing(*args):
        threads.add(threading.current_thread())
        if threading.current_thread() is not main:
            raise MemoryError("no room")
        encode(*args)

    monkeypatch.setattr(kernels, "encode", failing)
    with pytest.raises(MemoryError, match="no room"):
        quantize_weight(weight, scheme)
    assert len(threads) > 1


def test_kernels_that_do_not_compile_are_not_used(plain, monkeypatch):
    def failing(*args):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(kernels, "encode", failing)
    weight, scheme = normal(30, 128, dtype=torch.bfloat16), resolve_scheme("W4A16")
    with pytest.warns(UserWarning, match="does not run on cpu.*no compiler"):
        assert fast.module_for(weight, scheme) is reference
    assert fast.module_for(weight, scheme) is reference  # and warned once


@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM", "W8A16", "W8A8", "W4A8", "FP8_DYNAMIC"])
@pytest.mark.parametrize("width", [1, 2, 7, 20, 130, 264])
def test_any_width_has_the_bytes_of_the_plain_operations(weight, plain, scheme, width):
    weight, resolved = weight[::8, :width].contiguous(), resolve_scheme(scheme)
    resolved.weights.strategy, resolved.weights.group_size = "channel", None
    whole_words = width % (32 // resolved.weights.num_bits if resolved.format == "pack-quantized" else 2) == 0
    assert fast.module_for(weight, resolved) is (cpu if whole_words else reference)
    assert same_tensors(quantize_weight(weight, resolved).tensors, plain(weight, resolved))


def test_other_dtypes_and_devices_take_the_plain_operations():
    scheme = resolve_scheme("W4A16")
    assert fast.module_for(normal(4, 128).half(), scheme) is reference
    assert fast.module_for(normal(4, 128).to("meta"), scheme) is reference


def test_without_numba_the_plain_operations_do(weight, plain, monkeypatch):
    monkeypatch.setitem(sys.modules, "qarl_trl.quant.fast.cpu", None)
    fast._compiled.cache_clear()
    scheme = resolve_scheme("W4A16")
    try:
        assert fast.module_for(weight, scheme) is reference
        assert same_tensors(quantize_weight(weight, scheme).tensors, plain(weight, scheme))
    finally:
        fast._compiled.cache_clear()


@pytest.mark.parametrize("scheme", [*NAMES, NVFP4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_storage_of_a_master_can_still_be_resized(scheme, dtype):
    """FSDP frees gathered weights so; after `tensor.numpy()` it could not."""
    weight = normal(256, 256, dtype=dtype)
    quantize_weight(weight, resolve_scheme(scheme))
    weight.untyped_storage().resize_(0)

    weight = normal(256, 256, dtype=torch.float32)
    weight.numpy()  # control
    with pytest.raises(RuntimeError, match="not resizable"):
        weight.untyped_storage().resize_(0)


# Quotients and scales ---------------------------------------------------------------------------------------------------

FLOATS = torch.arange(0x7F80).to(torch.int16).view(torch.bfloat16)  # all that are finite, from zero up


def quotients(numbers, scales, quotient):
    """Of bfloat16 numbers `(n,)` and scales `(n,)`, rounded to bfloat16, by the kernels' instructions."""

    @numba.njit(error_model="numpy")
    def divided(words, scales, out):
        for i in range(len(words)):
            power = kernels._power(scales[i])
            out[i] = quotient(words[i], power, kernels._reciprocal(scales[i], power))

    out = np.empty(len(numbers), np.float32)
    words = numbers.view(torch.int16).to(torch.int32) << 16  # the second number of a word
    divided(words.numpy().view(np.uint32), scales.view(torch.int16).numpy().view(np.uint16), out)
    return torch.from_numpy(out).bfloat16()


def pairs(exponents):
    """All pairs of significands of numbers and scales, at many sizes of scales, with quotients near the powers of 2 given."""
    significands = 1 + torch.arange(128) / 128
    scales = torch.cat((FLOATS[1:127], *(significands * 2.0**e for e in (-126, -125, -20, 0, 9, 125, 126, 127))))
    sizes = scales.double().frexp().exponent - 1
    numbers = significands.double() * 2.0 ** (
        sizes.unsqueeze(-1) + torch.tensor(exponents).unsqueeze(-1).unsqueeze(-1)
    )
    numbers, scales = torch.broadcast_tensors(numbers, scales.double().unsqueeze(-1))
    exact = (numbers < 2.0**128) & (numbers.bfloat16().double() == numbers)
    numbers, scales = numbers[exact].bfloat16(), scales[exact].bfloat16()
    return torch.cat((numbers, -numbers)), torch.cat((scales, scales))


def test_a_gemm_with_the_reciprocal_is_the_quotient():
    numbers, scales = pairs([-125, -124, -30, -1, 0, 3, 7, 8, 100, 126, 127, 128])
    largest = 2.0**126  # above it every code is saturated, and the product may be infinite before the quotient is
    expected = (numbers / scales).clamp(-largest, largest)
    regular = expected.abs() >= 2.0**-126
    assert regular.sum() > 1_500_000
    assert (numbers / scales).isinf().sum() > 1000
    found = quotients(numbers, scales, kernels._second_steps).clamp(-largest, largest)
    assert torch.equal(found[regular].view(torch.int16), expected[regular].view(torch.int16))


def test_a_quotient_that_underflows_is_zero_where_it_has_to_be():
    """Whose sign a float8 number drops, while it keeps that of a smaller number than it has."""
    numbers, scales = pairs([-140, -136, -135, -134, -133, -130, -127])
    expected = numbers / scales
    assert 1000 < (expected == 0).sum() < len(expected) - 1000
    found = quotients(numbers, scales, kernels._second_steps)
    assert torch.equal(found == 0, expected == 0)
    assert torch.equal(found.signbit(), expected.signbit())
    assert found.abs().max() < 2.0**-125  # so that all other quantized values are of zero


@pytest.mark.parametrize(("bits", "other"), [(5, False), (7, True)])
def test_a_reciprocal_of_fewer_bits_gives_other_quotients(bits, other):
    """The control: how near to a tie quotients are. A factor that is off by 2^-18 would still do, one by 2^-16 does not."""

    @kernels._instruction(numba.types.float32)
    def inexact(b, word, power, reciprocal):
        low = b.bitcast(b.add(b.bitcast(reciprocal, kernels._I32), kernels._int(1 << bits)), reciprocal.type)
        return kernels._quotient(b, word, 1, power, low)

    numbers, scales = pairs([0, 3])
    found, expected = quotients(numbers, scales, inexact), numbers / scales
    assert torch.equal(found, expected) != other


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", ["W4A16", "W8A8", "FP8_DYNAMIC", "W4A16_ASYM"])
def test_the_scale_of_every_number_has_the_bytes_of_the_plain_operations(scheme, dtype):
    resolved = resolve_scheme(scheme)
    resolved.weights.strategy, resolved.weights.group_size = "channel", None
    largest = FLOATS[:0x7F00]  # below 2^127: the range of both signs is finite
    other = largest.roll(12345)
    weight = torch.zeros(4, len(largest), 8, dtype=torch.bfloat16)
    weight[0, :, 3], weight[1, :, 6], weight[2, :, 1], weight[2, :, 2] = largest, -largest, largest, -other
    weight[3, :, 0], weight[3, :, 5] = other, -largest
    weight = weight.flatten(0, 1).to(dtype)
    quantized, found = cpu.quantize(weight, resolved)
    expected_quantized, expected = reference.quantize(weight.bfloat16(), resolved)
    for a, b in zip((quantized, *found), (expected_quantized, *expected), strict=True):
        assert a is b is None or torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert (found[0] == 2.0**-7).sum() >= 4  # of zeros
    assert 0 < found[0].min() < 2.0**-126 < 2.0**118 < found[0].max()


@pytest.mark.parametrize("largest", [1e30, 7.0, 3e-20])
def test_the_scale_of_every_number_has_the_bytes_of_the_plain_operations_below_a_global_scale(largest):
    scheme, global_scale = resolve_scheme(NVFP4), torch.tensor([2688 / largest])
    weight = torch.zeros(len(FLOATS), 16, dtype=torch.bfloat16)
    weight[:, 7], weight[:, 8] = -FLOATS, FLOATS / 3
    quantized, (scale, _) = cpu.quantize(weight, scheme, global_scale)
    expected_quantized, (expected, _) = reference.quantize(weight, scheme, global_scale)
    assert torch.equal(scale.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(quantized, expected_quantized)
    assert scale.view(torch.uint8).unique().numel() == 126  # every scale there is


@pytest.mark.parametrize("factor", [2.0**-126, 2.0**-120, 2.0**119])
@pytest.mark.parametrize("scheme", NAMES)
def test_scales_near_the_ends_of_the_range_give_the_bytes_of_the_plain_operations(plain, scheme, factor):
    resolved = resolve_scheme(scheme)
    weight = (normal(256, 256).double() * factor).bfloat16()
    assert weight.isfinite().all()
    scale = plain(weight, resolved)["weight_scale"]
    zero_point = None if resolved.weights.symmetric else torch.full(scale.shape, 3, dtype=torch.int8)
    for frozen in (None, (scale, zero_point), ((scale.float() / 100).bfloat16().clamp(min=2.0**-133), zero_point)):
        assert same_tensors(quantize_weight(weight, resolved, frozen).tensors, plain(weight, resolved, frozen))


@pytest.mark.parametrize("scheme", [*NAMES, NVFP4])
@pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F810000, 0x7FFFFFFF, 0xFFFFFFFF])
def test_a_diverged_weight_is_refused_wherever_it_is(scheme, bits):
    resolved = resolve_scheme(scheme)
    value = torch.tensor([bits]).to(torch.int32).view(torch.float32)
    for place in (0, 1, 127, 130, 255):
        for dtype in DTYPES:
            weight = normal(256, 256, dtype=dtype)
            weight[place, place] = value[0] if dtype == torch.float32 else value.view(torch.bfloat16)[1]
            assert not weight.isfinite().all()
            with pytest.raises(ValueError, match="holds NaN or infinity"):
                quantize_weight(weight, resolved)


# A kernel that gives other bytes is not used --------------------------------------------------------------------------


def test_the_comparison_sees_every_number():
    found = fast.sample(torch.bfloat16).unique()
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    expected = patterns[patterns.abs() < 1e37]
    assert torch.isin(expected.float(), found.float()).all()
    assert len(expected) > 60_000
    low_bits = fast.sample(torch.float32).view(torch.int32) & 0xFFFF
    assert low_bits.unique().tolist() == [0, 2**14, 2**15, 3 * 2**14, 2**16 - 1]  # 2**15: halfway


def one_code_off(monkeypatch):
    encode = cpu.encode

    def other(*args):
        out = encode(*args)
        out.view(torch.uint8)[-1, -1] ^= 1
        return out

    monkeypatch.setattr(cpu, "encode", other)


def one_extreme_off(monkeypatch):
    extremes = cpu.extremes

    def other(weight, scheme):
        low, high = extremes(weight, scheme)
        high[-1, -1] *= 1.01
        return low, high

    monkeypatch.setattr(cpu, "extremes", other)


def one_in_one_pass_off(which):
    def broken(monkeypatch):
        quantize = cpu.quantize

        def other(weight, scheme, global_scale=None):
            quantized, (scale, zero_point) = quantize(weight, scheme, global_scale)
            (quantized, scale)[which].view(torch.uint8)[-1, -1] ^= 1
            return quantized, (scale, zero_point)

        monkeypatch.setattr(cpu, "quantize", other)

    return broken


def deaf_to(value, name):
    """The number is as good as zero."""

    def broken(monkeypatch):
        function = getattr(cpu, name)

        def other(weight, *args):
            return function(
                torch.where(torch.isnan(weight) if value != value else weight == value, 0.0, weight), *args
            )

        monkeypatch.setattr(cpu, name, other)

    return broken


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("scheme", "name"), [("W8A8", "quantize"), ("W4A16_ASYM", "quantize"), (NVFP4, "extremes")])
def test_a_kernel_that_does_not_see_a_diverged_weight_is_not_used(monkeypatch, scheme, name, value):
    deaf_to(value, name)(monkeypatch)
    with pytest.warns(UserWarning, match="gives other bytes"):
        assert fast.module_for(normal(256, 256), resolve_scheme(scheme)) is reference


@pytest.mark.parametrize("broken", [one_code_off, one_extreme_off, one_in_one_pass_off(0), one_in_one_pass_off(1)])
@pytest.mark.parametrize("scheme", [*NAMES, NVFP4])
def test_a_kernel_with_other_bytes_is_reported_and_not_used(plain, monkeypatch, scheme, broken):
    broken(monkeypatch)
    weight, resolved = normal(256, 256, dtype=torch.bfloat16), resolve_scheme(scheme)
    with pytest.warns(UserWarning, match="gives other bytes"):
        assert fast.module_for(weight, resolved) is reference
    assert same_tensors(quantize_weight(weight, resolved).tensors, plain(weight, resolved))  # and told only once


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_unrounded_quotient_would_be_seen(monkeypatch, dtype):
    """The mistake a fused kernel makes most easily: no bfloat16 number between the division and the code."""

    def unrounded(weight, qparams, scheme, global_scale):
        quotient = reference.as_blocks(weight.float(), scheme) / qparams[0].float().unsqueeze(-1)
        return reference.int_quantized(reference.as_matrix(quotient, weight.shape, scheme), 8)

    scheme = resolve_scheme("W8A8")
    weight = fast.sample(dtype)
    monkeypatch.setattr(cpu, "encode", unrounded)
    with pytest.warns(UserWarning, match="gives other bytes"):
        assert fast.module_for(weight, scheme) is reference


# For the GPU --------------------------------------------------------------------------------------------------------

INTERPRETED = """
import torch
from qarl_trl.quant import fast, resolve_scheme
from qarl_trl.quant.fast import cuda
cuda._WORDS_PER_PROGRAM = 2**14  # the interpreter's time is that of its programs
for name, group_size, dtype in {cases}:
    scheme = resolve_scheme(name, group_size)
    assert fast.takes((256, 256), dtype, scheme)
    assert fast._quantizes_alike(cuda, scheme, torch.device("cpu"), dtype), (name, dtype)
    print(name, "agrees")
"""
# Sizes that fill no tile, and rows of several.
RAGGED = """
import torch
from qarl_trl.quant import fast, reference, resolve_scheme
from qarl_trl.quant.fast import cuda
cuda._WORDS_PER_PROGRAM = 256
for name, width in (("W8A8", 1050), ("FP8_DYNAMIC", 1050), ("NVFP4A16", 1104)):
    scheme, weight = resolve_scheme(name), torch.randn(10, width).bfloat16()
    global_scale = torch.tensor([500.0]) if name == "NVFP4A16" else None
    assert fast.takes(weight.shape, weight.dtype, scheme)
    found, expected = (m.quantize(weight, scheme, global_scale) for m in (cuda, reference))
    for a, b in zip((found[0], found[1][0]), (expected[0], expected[1][0])):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name
    print(name, "agrees")
"""


def interpreted(script):
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(
        [sys.executable, "-W", "error::UserWarning:qarl_trl", "-c", script],
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_triton_kernels_have_the_bytes_of_the_plain_operations():
    """In Triton's interpreter, on a CPU. Groups, channels and blocks; each kind of code."""
    pytest.importorskip("triton")
    cases = [("W4A16_ASYM", 32, torch.float32), ("W8A16", -1, torch.bfloat16), ("FP8_BLOCK", None, torch.float32)]
    cases.append((NVFP4, None, torch.bfloat16))
    result = interpreted(INTERPRETED.format(cases=cases))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("agrees") == len(cases)


@pytest.mark.slow
def test_triton_kernels_take_any_size():
    pytest.importorskip("triton")
    result = interpreted(RAGGED)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("agrees") == 3


@pytest.mark.slow
def test_triton_kernels_have_the_bytes_of_the_plain_operations_in_every_scheme():
    pytest.importorskip("triton")
    cases = [(name, None, dtype) for name in (*NAMES, NVFP4) for dtype in DTYPES]
    result = interpreted(INTERPRETED.format(cases=cases))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("agrees") == len(cases)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("word", ["*i32", "*i64"])
def test_triton_compiles_what_was_written(word, capability):
    """For a GPU that is not there, by the bundled assembler: exact divisions, nothing fused, no subnormals flushed."""
    triton = pytest.importorskip("triton")
    warnings.simplefilter("ignore")  # that it fuses by default, which is what is looked for here
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from qarl_trl.quant.fast import cuda

    def ptx(kernel, pointers, **constants):
        signature = {
            "words": word,
            **pointers,
            "rows": "i32",
            "columns": "i32",
            **dict.fromkeys(constants, "constexpr"),
        }
        source = ASTSource(kernel, signature=signature, constexprs=constants)
        return triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]

    pointers = {"scales": "*fp32", "zeros": "*fp32", "out": "*u8"}
    constants = {"ROWS": 32, "COLUMNS": 64, "LOW": -8.0, "HIGH": 7.0, "FLIP": 8}
    texts = [ptx(cuda._extremes, {"low": "*i32", "high": "*i32"}, ROWS=32, COLUMNS=64)]
    for kind, asymmetric, bits in (
        (cuda._INT, True, 4),
        (cuda._INT, False, 4),
        (cuda._FLOAT8, False, 8),
        (cuda._FLOAT4, False, 4),
    ):
        out = pointers if bits == 4 else pointers | {"out": "*i16"}
        texts.append(ptx(cuda._encode, out, **constants, KIND=kind, ASYMMETRIC=asymmetric, CODE_BITS=bits))
        assert "div.rn.f32" in texts[-1]
    for text in texts:
        floats = set(re.findall(r"(?:abs|add|div|fma|mul|neg|rcp|sub)(?:\.[a-z]+)*\.f32", text))
        assert floats <= {"abs.f32", "add.f32", "add.rn.f32", "div.rn.f32"}, floats
