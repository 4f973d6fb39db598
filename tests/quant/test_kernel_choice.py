"""`qarl_trl.quant.kernel_choice`: which kernel runs where, and that none is replaced."""

import pytest
import torch

from qarl_trl.quant import kernel_choice, resolve_scheme
from qarl_trl.quant.kernel_choice import select_kernel
from qarl_trl.quant.products import DequantGemm, Fp8BlockGemm, Fp8Gemm, Int4Fp8Gemm, Int8Gemm
from qarl_trl.quant.scheme import SUPPORTED
from qarl_trl.rollout.products import (
    CpuInt4Int8Gemm,
    EngineFp8BlockGemm,
    EngineFp8Gemm,
    EngineGemm,
    EngineInt4Fp8Gemm,
    EngineInt8Gemm,
)


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("scheme", "choice", "kernel"),
    [
        ("W4A16", "auto", DequantGemm),
        ("W4A16", "dequant", DequantGemm),
        ("W4A16", "engine", EngineGemm),
        ("W4A16_ASYM", "auto", DequantGemm),
        ("W4A16_ASYM", "dequant", DequantGemm),
        ("W4A16_ASYM", "engine", EngineGemm),
        ("W8A16", "auto", DequantGemm),
        ("W8A16", "dequant", DequantGemm),
        ("FP8_DYNAMIC", "auto", Fp8Gemm),
        ("FP8_DYNAMIC", "engine", Fp8Gemm),
        ("FP8_BLOCK", "auto", Fp8BlockGemm),
        ("W8A8", "auto", Int8Gemm),
        ("W8A8", "engine", EngineInt8Gemm),
        ("W4A8", "auto", CpuInt4Int8Gemm),
        ("W4A8", "engine", CpuInt4Int8Gemm),
    ],
)
def test_kernel_by_scheme_and_choice_on_cpu(scheme, choice, kernel):
    assert type(select_kernel(resolve_scheme(scheme), CPU, choice)) is kernel


@pytest.mark.parametrize(
    ("scheme", "device", "choice", "words"),
    [
        ("FP8_DYNAMIC", "cpu", "dequant", ["'dequant'", "activation", "'auto'"]),
        ("W4A16", "meta", "engine", ["'engine'", "'meta'", "'auto'"]),
        ("W4A16", "cpu", "marlin", ["'marlin'", "'auto', 'dequant', 'engine'"]),
        ("FP8_BLOCK", "cpu", "dequant", ["'dequant'", "activation", "FP8_BLOCK"]),
        ("W8A8", "cpu", "dequant", ["'dequant'", "activation", "W8A8"]),
        ("W4A8", "cpu", "dequant", ["'dequant'", "activation", "W4A8"]),
        ("W8A16", "cpu", "engine", ["'engine'", "W8A16", "'cpu'"]),
        ("NVFP4A16", "cpu", "engine", ["'engine'", "NVFP4A16", "'cpu'"]),
        ("FP8_BLOCK", "cpu", "engine", ["'engine'", "FP8_BLOCK", "'cpu'"]),
        ("W8A8", "meta", "engine", ["'engine'", "W8A8", "'meta'"]),
        ("W4A8", "meta", "auto", ["W4A8", "'meta'"]),
    ],
)
def test_a_kernel_that_is_not_there_is_an_error(scheme, device, choice, words):
    with pytest.raises(ValueError) as error:
        select_kernel(resolve_scheme(scheme), torch.device(device), choice)
    assert all(word in str(error.value) for word in words)


def test_every_scheme_has_a_kernel_on_cpu_and_no_other_name_in_the_tables():
    assert kernel_choice._PLAIN.keys() == SUPPORTED.keys()
    for name, row in SUPPORTED.items():
        assert select_kernel(resolve_scheme(name), CPU)
        assert (name in kernel_choice._ENGINE["cpu"]) == row.cpu_engine
        assert (name in kernel_choice._ENGINE["cuda"]) == bool(row.gpus)


@pytest.mark.parametrize(
    ("scheme", "other", "enough", "kernel"),
    [
        ("FP8_DYNAMIC", (8, 0), (8, 9), Fp8Gemm),
        ("FP8_BLOCK", (8, 9), (9, 0), Fp8BlockGemm),
        ("W8A8", (7, 5), (8, 0), Int8Gemm),
        ("W8A8", (10, 0), (9, 0), Int8Gemm),
        ("W4AFP8", (10, 0), (9, 0), Int4Fp8Gemm),
    ],
)
def test_activations_need_a_gpu_whose_engine_computes_the_same(monkeypatch, scheme, other, enough, kernel):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: other)
    with pytest.raises(ValueError) as error:
        select_kernel(resolve_scheme(scheme), torch.device("cuda"))
    assert all(word in str(error.value) for word in (scheme, *SUPPORTED[scheme].gpus, str(other), "W4A16"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: enough)
    assert type(select_kernel(resolve_scheme(scheme), torch.device("cuda"))) is kernel


@pytest.mark.parametrize(
    ("scheme", "kernel"),
    [
        ("W4A16", EngineGemm),
        ("W4A16_ASYM", EngineGemm),
        ("W8A16", EngineGemm),
        ("NVFP4A16", EngineGemm),
        ("FP8_DYNAMIC", EngineFp8Gemm),
        ("FP8_BLOCK", EngineFp8BlockGemm),
        ("W8A8", EngineInt8Gemm),
        ("W4AFP8", EngineInt4Fp8Gemm),
    ],
)
def test_the_engines_kernel_on_a_gpu(monkeypatch, scheme, kernel):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernel_choice, "is_cpu_engine", lambda: False)
    assert type(select_kernel(resolve_scheme(scheme), torch.device("cuda"), "engine")) is kernel
    monkeypatch.setattr(kernel_choice, "is_cpu_engine", lambda: True)
    with pytest.raises(ValueError, match=r"on device 'cuda' needs a vLLM for it.*'auto'"):
        select_kernel(resolve_scheme(scheme), torch.device("cuda"), "engine")


@pytest.mark.parametrize("scheme", ["W4A16", "W8A8"])
def test_a_vllm_for_gpus_has_no_kernel_on_cpu(monkeypatch, scheme):
    monkeypatch.setattr(kernel_choice, "is_cpu_engine", lambda: False)
    with pytest.raises(ValueError, match=r"on device 'cpu' needs a vLLM for it.*'auto'"):
        select_kernel(resolve_scheme(scheme), CPU, "engine")


@pytest.mark.parametrize("scheme", ["W4A16", "W8A8"])
def test_the_engines_kernel_without_vllm_is_an_error(monkeypatch, scheme):
    monkeypatch.setattr(kernel_choice, "is_vllm_available", lambda: False)
    with pytest.raises(ValueError, match=r"without vLLM.*make install.*'auto'"):
        select_kernel(resolve_scheme(scheme), CPU, "engine")
    assert select_kernel(resolve_scheme(scheme), CPU)


def test_w4a8_has_no_kernel_on_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    with pytest.raises(ValueError, match=r"W4A8 has no kernel on GPUs.*qarl-trl schemes"):
        select_kernel(resolve_scheme("W4A8"), torch.device("cuda"))
