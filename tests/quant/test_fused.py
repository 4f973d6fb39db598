"""`qarl_trl.quant.fused`: compiled kernels give the bytes of the plain operations, or are not used."""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from qarl_trl.quant import codes, fused, quantize_weight, resolve_scheme
from quant.schemes import NAMES, SCHEMES, normal, same_tensors
from quant.test_codes import many_weights


fused_cpu = pytest.importorskip("qarl_trl.quant.fused_cpu")  # numba comes with vLLM

DTYPES = [torch.bfloat16, torch.float32]


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """Each test compares the kernels anew; a difference is an error unless the test expects it."""
    monkeypatch.setattr(fused, "_AGREES", {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture
def plain(monkeypatch):
    """Quantize with the plain operations."""

    def quantize(weight, scheme, qparams=None):
        with monkeypatch.context() as context:
            context.setattr(fused, "module_for", lambda weight, scheme: codes)
            return quantize_weight(weight, scheme, qparams).tensors

    return quantize


@pytest.fixture(scope="module")
def weight():
    return many_weights(0)


# On the CPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("scheme", "group_size"), SCHEMES)
def test_a_million_weights_have_the_bytes_of_the_plain_operations(weight, plain, scheme, group_size, dtype):
    resolved = resolve_scheme(scheme, group_size)
    master = weight if dtype == torch.bfloat16 else fused.between(weight)
    assert fused.module_for(master, resolved) is fused_cpu
    assert same_tensors(quantize_weight(master, resolved).tensors, plain(master, resolved))


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "group_size"), SCHEMES)
def test_ten_million_weights_have_the_bytes_of_the_plain_operations(plain, scheme, group_size):
    """The plain ones are compared with compressed-tensors on the same weights in `test_codes.py`."""
    resolved = resolve_scheme(scheme, group_size)
    for seed in range(1, 11):
        weight = many_weights(seed)
        for master in (weight, fused.between(weight, seed)):
            assert fused.module_for(master, resolved) is fused_cpu
            assert same_tensors(quantize_weight(master, resolved).tensors, plain(master, resolved)), seed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", NAMES)
def test_frozen_scales_give_the_bytes_of_the_plain_operations(weight, plain, scheme, dtype):
    resolved = resolve_scheme(scheme)
    scale = quantize_weight(weight * 0.25, resolved).scale
    zero_point = None if resolved.weights.symmetric else torch.full(scale.shape, 5, dtype=torch.int8)
    master = weight if dtype == torch.bfloat16 else fused.between(weight)
    found = quantize_weight(master, resolved, (scale, zero_point)).tensors
    assert same_tensors(found, plain(master, resolved, (scale, zero_point)))
    assert not torch.equal(
        *(
            t["weight_packed" if "weight_packed" in t else "weight"].view(torch.uint8)
            for t in (found, quantize_weight(master, resolved).tensors)
        )
    )  # control: other codes


@pytest.mark.parametrize("rows", [1, 3, 4097])
def test_parts_of_the_rows_for_several_threads_leave_none_out(plain, monkeypatch, rows):
    monkeypatch.setattr(fused_cpu, "_WEIGHTS_PER_THREAD", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    weight, scheme = normal(rows, 128, dtype=torch.bfloat16), resolve_scheme("W4A16", 32)
    assert same_tensors(quantize_weight(weight, scheme).tensors, plain(weight, scheme))


@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM", "W8A16", "W8A8", "W4A8", "FP8_DYNAMIC"])
@pytest.mark.parametrize("width", [1, 2, 7, 20, 130, 264])
def test_any_width_has_the_bytes_of_the_plain_operations(weight, plain, scheme, width):
    weight, resolved = weight[::8, :width].contiguous(), resolve_scheme(scheme)
    resolved.weights.strategy, resolved.weights.group_size = "channel", None
    whole_words = width % (32 // resolved.weights.num_bits if resolved.format == "pack-quantized" else 2) == 0
    assert fused.module_for(weight, resolved) is (fused_cpu if whole_words else codes)
    assert same_tensors(quantize_weight(weight, resolved).tensors, plain(weight, resolved))


def test_other_dtypes_and_devices_take_the_plain_operations():
    scheme = resolve_scheme("W4A16")
    assert fused.module_for(normal(4, 128).half(), scheme) is codes
    assert fused.module_for(normal(4, 128).to("meta"), scheme) is codes


def test_without_numba_the_plain_operations_do(weight, plain, monkeypatch):
    monkeypatch.setitem(sys.modules, "qarl_trl.quant.fused_cpu", None)
    fused._compiled.cache_clear()
    scheme = resolve_scheme("W4A16")
    try:
        assert fused.module_for(weight, scheme) is codes
        assert same_tensors(quantize_weight(weight, scheme).tensors, plain(weight, scheme))
    finally:
        fused._compiled.cache_clear()


@pytest.mark.parametrize("scheme", NAMES)
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


# A kernel that gives other bytes is not used --------------------------------------------------------------------------


def test_the_comparison_sees_every_number():
    found = fused.sample(torch.bfloat16).unique()
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    expected = patterns[patterns.abs() < 1e37]
    assert torch.isin(expected.float(), found.float()).all()
    assert len(expected) > 60_000
    low_bits = fused.sample(torch.float32).view(torch.int32) & 0xFFFF
    assert low_bits.unique().tolist() == [0, 2**14, 2**15, 3 * 2**14, 2**16 - 1]  # 2**15: halfway


def one_code_off(monkeypatch):
    encode = fused_cpu.encode

    def other(weight, scale, zero_point, scheme):
        out = encode(weight, scale, zero_point, scheme)
        out.view(torch.uint8)[-1, -1] ^= 1
        return out

    monkeypatch.setattr(fused_cpu, "encode", other)


def one_extreme_off(monkeypatch):
    extremes = fused_cpu.extremes

    def other(weight, scheme):
        low, high = extremes(weight, scheme)
        high[-1, -1] *= 1.01
        return low, high

    monkeypatch.setattr(fused_cpu, "extremes", other)


@pytest.mark.parametrize("broken", [one_code_off, one_extreme_off])
@pytest.mark.parametrize("scheme", NAMES)
def test_a_kernel_with_other_bytes_is_reported_and_not_used(plain, monkeypatch, scheme, broken):
    broken(monkeypatch)
    weight, resolved = normal(256, 256, dtype=torch.bfloat16), resolve_scheme(scheme)
    with pytest.warns(UserWarning, match="gives other bytes"):
        assert fused.module_for(weight, resolved) is codes
    assert same_tensors(quantize_weight(weight, resolved).tensors, plain(weight, resolved))  # and told only once


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_unrounded_quotient_would_be_seen(monkeypatch, dtype):
    """The mistake a fused kernel makes most easily: no bfloat16 number between the division and the code."""

    def unrounded(weight, scale, zero_point, scheme):
        quotient = codes.as_blocks(weight.float(), scheme) / scale.float().unsqueeze(-1)
        return codes.int_codes(codes.as_matrix(quotient, weight.shape, scheme), 8)

    scheme = resolve_scheme("W8A8")
    weight = fused.sample(dtype)
    monkeypatch.setattr(fused_cpu, "encode", unrounded)
    with pytest.warns(UserWarning, match="gives other bytes"):
        assert fused.module_for(weight, scheme) is codes


# For the GPU --------------------------------------------------------------------------------------------------------

INTERPRETED = """
import torch
from qarl_trl.quant import fused, fused_cuda, resolve_scheme
fused_cuda._WORDS_PER_PROGRAM = 2**14  # the interpreter's time is that of its programs
for name, group_size, dtype in {cases}:
    scheme = resolve_scheme(name, group_size)
    assert fused_cuda.takes(fused.sample(dtype), scheme)
    assert fused._agrees(fused_cuda, scheme, torch.device("cpu"), dtype), (name, dtype)
    print(name, "agrees")
"""


def interpreted(cases):
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(
        [sys.executable, "-W", "error::UserWarning:qarl_trl", "-c", INTERPRETED.format(cases=cases)],
        env=environment,
        capture_output=True,
        text=True,
    )


def test_triton_kernels_have_the_bytes_of_the_plain_operations():
    """In Triton's interpreter, on a CPU. Groups, channels and blocks; each kind of code."""
    pytest.importorskip("triton")
    cases = [("W4A16_ASYM", 32, torch.float32), ("W8A16", -1, torch.bfloat16), ("FP8_BLOCK", None, torch.float32)]
    result = interpreted(cases)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("agrees") == len(cases)


@pytest.mark.slow
def test_triton_kernels_have_the_bytes_of_the_plain_operations_in_every_scheme():
    pytest.importorskip("triton")
    cases = [(name, None, dtype) for name in NAMES for dtype in DTYPES]
    result = interpreted(cases)
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

    from qarl_trl.quant import fused_cuda

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
    texts = [ptx(fused_cuda._extremes, {"low": "*i32", "high": "*i32"}, ROWS=32, COLUMNS=64)]
    for kind, asymmetric, bits in (
        (fused_cuda._INT, True, 4),
        (fused_cuda._INT, False, 4),
        (fused_cuda._FLOAT8, False, 8),
    ):
        out = pointers if bits == 4 else pointers | {"out": "*i16"}
        texts.append(ptx(fused_cuda._encode, out, **constants, KIND=kind, ASYMMETRIC=asymmetric, CODE_BITS=bits))
        assert "div.rn.f32" in texts[-1]
    for text in texts:
        floats = set(re.findall(r"(?:abs|add|div|fma|mul|neg|rcp|sub)(?:\.[a-z]+)*\.f32", text))
        assert floats <= {"abs.f32", "add.f32", "add.rn.f32", "div.rn.f32"}, floats
