"""`quant_kernel`: which product runs where, and that none is replaced."""

import pytest
import torch

from qarl_trl.quant import gemm as plain_module
from qarl_trl.quant import resolve_scheme
from qarl_trl.quant.gemm import CpuInt4Int8Gemm, DequantGemm, Fp8BlockGemm, Fp8Gemm, Int4Fp8Gemm, Int8Gemm, plain_gemm
from qarl_trl.quant.scheme import SUPPORTED
from qarl_trl.rollout import gemm as rollout_gemm
from qarl_trl.rollout.gemm import GEMMS, EngineGemm, engine_gemm


CPU = torch.device("cpu")


def kinds(gemm):
    """Class of a product, and of torch's inside the engine's."""
    return (type(gemm), type(gemm.plain)) if isinstance(gemm, EngineGemm) else (type(gemm),)


@pytest.mark.parametrize(
    ("scheme", "choice", "expected"),
    [
        ("W4A16", "auto", [DequantGemm]),
        ("W4A16_ASYM", "dequant", [DequantGemm]),
        ("W4A16", "engine", [EngineGemm, DequantGemm]),
        ("FP8_DYNAMIC", "auto", [Fp8Gemm]),
        ("FP8_DYNAMIC", "engine", [Fp8Gemm]),
        ("FP8_BLOCK", "auto", [Fp8BlockGemm]),
        ("W8A8", "auto", [Int8Gemm]),
        ("W8A8", "engine", [EngineGemm, Int8Gemm]),
        ("W4A8", "auto", [CpuInt4Int8Gemm]),
        ("W4A8", "engine", [CpuInt4Int8Gemm]),
    ],
)
def test_gemm_by_scheme_and_choice_on_cpu(scheme, choice, expected):
    assert kinds(GEMMS[choice](resolve_scheme(scheme), CPU)) == tuple(expected)


@pytest.mark.parametrize(
    ("scheme", "device", "choice", "words"),
    [
        ("FP8_DYNAMIC", "cpu", "dequant", ["'dequant'", "activation", "'auto'"]),
        ("W4A16", "meta", "engine", ["'engine'", "'meta'", "'auto'"]),
        ("W8A16", "cpu", "engine", ["'engine'", "W8A16", "'cpu'"]),
        ("W4A8", "meta", "auto", ["W4A8", "'meta'"]),
        ("W4A8", "cuda", "auto", ["W4A8", "'cuda'", "qarl-trl schemes"]),
    ],
)
def test_a_gemm_that_is_not_there_is_an_error(scheme, device, choice, words):
    with pytest.raises(ValueError) as error:
        GEMMS[choice](resolve_scheme(scheme), torch.device(device))
    assert all(word in str(error.value) for word in words)


def test_every_scheme_has_a_gemm_on_cpu_and_the_engine_those_of_the_table():
    assert plain_module._GEMMS.keys() == SUPPORTED.keys()
    for name, row in SUPPORTED.items():
        scheme = resolve_scheme(name)
        assert plain_gemm(scheme, CPU)
        if row.cpu_engine:
            assert engine_gemm(scheme, CPU)
        else:
            with pytest.raises(ValueError, match="the engine has no kernel"):
                engine_gemm(scheme, CPU)


@pytest.mark.parametrize(
    ("scheme", "other", "enough", "expected"),
    [
        ("FP8_DYNAMIC", (8, 0), (8, 9), Fp8Gemm),
        ("FP8_BLOCK", (8, 9), (9, 0), Fp8BlockGemm),
        ("W8A8", (7, 5), (8, 0), Int8Gemm),
        ("W8A8", (10, 0), (9, 0), Int8Gemm),
        ("W4AFP8", (10, 0), (9, 0), Int4Fp8Gemm),
    ],
)
@pytest.mark.parametrize("choice", ["auto", "engine"])
def test_activations_need_a_gpu_whose_engine_computes_the_same(monkeypatch, scheme, other, enough, expected, choice):
    monkeypatch.setattr(rollout_gemm, "is_cpu_engine", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: other)
    with pytest.raises(ValueError) as error:
        GEMMS[choice](resolve_scheme(scheme), torch.device("cuda"))
    assert all(word in str(error.value) for word in (scheme, *SUPPORTED[scheme].gpus, str(other), "W4A16"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: enough)
    assert kinds(GEMMS[choice](resolve_scheme(scheme), torch.device("cuda")))[-1] is expected


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        ("W4A16", DequantGemm),
        ("W4A16_ASYM", DequantGemm),
        ("W8A16", DequantGemm),
        ("NVFP4A16", DequantGemm),
        ("FP8_DYNAMIC", Fp8Gemm),
        ("FP8_BLOCK", Fp8BlockGemm),
        ("W8A8", Int8Gemm),
        ("W4AFP8", Int4Fp8Gemm),
    ],
)
def test_the_engines_gemm_on_a_gpu(monkeypatch, scheme, expected):
    assert SUPPORTED[scheme].gpus
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(rollout_gemm, "is_cpu_engine", lambda: False)
    assert kinds(engine_gemm(resolve_scheme(scheme), torch.device("cuda"))) == (EngineGemm, expected)
    monkeypatch.setattr(rollout_gemm, "is_cpu_engine", lambda: True)
    with pytest.raises(ValueError, match=r"on device 'cuda' needs a vLLM for it.*'auto'"):
        engine_gemm(resolve_scheme(scheme), torch.device("cuda"))


@pytest.mark.parametrize("scheme", ["W4A16", "W8A8"])
def test_the_engines_gemm_needs_a_vllm_for_the_device(monkeypatch, scheme):
    with (
        monkeypatch.context() as patch,
        pytest.raises(ValueError, match=r"on device 'cpu' needs a vLLM for it.*'auto'"),
    ):
        patch.setattr(rollout_gemm, "is_cpu_engine", lambda: False)
        engine_gemm(resolve_scheme(scheme), CPU)
    monkeypatch.setattr(rollout_gemm, "is_vllm_available", lambda: False)
    with pytest.raises(ValueError, match=r"without vLLM.*make install.*'auto'"):
        engine_gemm(resolve_scheme(scheme), CPU)
    assert plain_gemm(resolve_scheme(scheme), CPU)
