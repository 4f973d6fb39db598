"""`quant_kernel`: which product runs where, and that none is replaced."""

import pytest
import torch

from qarl_trl.quant import resolve_scheme
from qarl_trl.quant.gemms.gemm import (
    CpuInt4Int8Gemm,
    DequantGemm,
    Fp8BlockGemm,
    Fp8Gemm,
    Int4Fp8Gemm,
    Int8Gemm,
    plain_gemm,
)
from qarl_trl.quant.supported import SUPPORTED
from qarl_trl.rollout import engine_gemm as rollout_gemm
from qarl_trl.rollout.engine_gemm import GEMMS, EngineGemm


CPU = torch.device("cpu")
GPU = torch.device("cuda")
# By torch, on any device.
PLAIN = {
    "W4A16": DequantGemm,
    "W4A16_ASYM": DequantGemm,
    "W8A16": DequantGemm,
    "NVFP4A16": DequantGemm,
    "FP8_DYNAMIC": Fp8Gemm,
    "FP8_BLOCK": Fp8BlockGemm,
    "W8A8": Int8Gemm,
    "W4A8": CpuInt4Int8Gemm,
    "W4AFP8": Int4Fp8Gemm,
}
# For these the engine itself calls torch on a CPU.
BY_TORCH = ("W4A8", "FP8_DYNAMIC")


def choose(choice, scheme, device):
    """Class of a product, and of torch's inside the engine's."""
    gemm = GEMMS[choice](resolve_scheme(scheme), device)
    if isinstance(gemm, EngineGemm):
        return EngineGemm, type(gemm.plain)
    return type(gemm)


def test_the_table_of_this_test_has_every_scheme():
    assert PLAIN.keys() == SUPPORTED.keys()


@pytest.mark.parametrize("scheme", PLAIN)
def test_every_scheme_has_a_gemm_on_cpu_and_the_engine_those_of_the_table(scheme):
    plain = PLAIN[scheme]
    assert choose("auto", scheme, CPU) is plain

    if not SUPPORTED[scheme].cpu_engine:
        with pytest.raises(ValueError, match="has no kernel for"):
            choose("engine", scheme, CPU)
    elif scheme in BY_TORCH:
        assert choose("engine", scheme, CPU) is plain
    else:
        assert choose("engine", scheme, CPU) == (EngineGemm, plain)


@pytest.mark.parametrize(
    ("scheme", "device", "choice", "words"),
    [
        ("FP8_DYNAMIC", "cpu", "dequant", ["'dequant'", "activation", "'auto'"]),
        # A device for which no vLLM exists.
        ("W4A16", "meta", "engine", ["'engine'", "'meta'", "'auto'"]),
        ("W4A8", "cuda", "engine", ["'engine'", "W4A8", "'cuda'"]),
    ],
)
def test_a_gemm_that_is_not_there_is_an_error(scheme, device, choice, words):
    with pytest.raises(ValueError) as error:
        choose(choice, scheme, torch.device(device))

    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(("cpu_engine", "right", "wrong"), [(True, CPU, GPU), (False, GPU, CPU)])
def test_the_engines_gemm_needs_a_vllm_for_the_device(monkeypatch, cpu_engine, right, wrong):
    # One vLLM is installed: that for CPUs, or that for GPUs.
    monkeypatch.setattr(rollout_gemm, "is_cpu_engine", lambda: cpu_engine)

    assert choose("engine", "W4A16", right) == (EngineGemm, DequantGemm)
    with pytest.raises(ValueError, match=rf"on device '{wrong}' needs a vLLM for it.*'auto'"):
        choose("engine", "W4A16", wrong)


def test_the_engines_gemm_needs_vllm(monkeypatch):
    monkeypatch.setattr(rollout_gemm, "is_vllm_available", lambda: False)

    with pytest.raises(ValueError, match=r"needs a vLLM for it.*make install.*'auto'"):
        choose("engine", "W8A8", CPU)

    # Control: torch's does not.
    assert plain_gemm(resolve_scheme("W8A8"), CPU)
