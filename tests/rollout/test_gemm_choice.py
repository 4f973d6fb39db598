"""`quant_kernel`: which product runs where, and that none is replaced."""

import pytest
import torch

from qarl_trl.quant import resolve_scheme
from qarl_trl.quant.gemm import CpuInt4Int8Gemm, DequantGemm, Fp8BlockGemm, Fp8Gemm, Int4Fp8Gemm, Int8Gemm, plain_gemm
from qarl_trl.quant.scheme import SUPPORTED
from qarl_trl.rollout import engine_gemm as rollout_gemm
from qarl_trl.rollout.engine_gemm import GEMMS, EngineGemm


CPU, GPU = torch.device("cpu"), torch.device("cuda")
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


def choose(choice, scheme, device):
    """Class of a product, and of torch's inside the engine's."""
    gemm = GEMMS[choice](resolve_scheme(scheme), device)
    return (type(gemm), type(gemm.plain)) if isinstance(gemm, EngineGemm) else type(gemm)


@pytest.mark.parametrize("scheme", PLAIN)
def test_every_scheme_has_a_gemm_on_cpu_and_the_engine_those_of_the_table(scheme):
    assert PLAIN.keys() == SUPPORTED.keys()
    assert choose("auto", scheme, CPU) is PLAIN[scheme]
    if not SUPPORTED[scheme].cpu_engine:
        with pytest.raises(ValueError, match="has no kernel for"):
            choose("engine", scheme, CPU)
    elif scheme in ("W4A8", "FP8_DYNAMIC"):  # the engine itself calls torch
        assert choose("engine", scheme, CPU) is PLAIN[scheme]
    else:
        assert choose("engine", scheme, CPU) == (EngineGemm, PLAIN[scheme])


@pytest.mark.parametrize(
    ("scheme", "device", "choice", "words"),
    [
        ("FP8_DYNAMIC", "cpu", "dequant", ["'dequant'", "activation", "'auto'"]),
        ("W4A16", "meta", "engine", ["'engine'", "'meta'", "'auto'"]),
        ("W4A8", "cuda", "engine", ["'engine'", "W4A8", "'cuda'"]),
    ],
)
def test_a_gemm_that_is_not_there_is_an_error(scheme, device, choice, words):
    with pytest.raises(ValueError) as error:
        choose(choice, scheme, torch.device(device))
    assert all(word in str(error.value) for word in words)


def test_the_engines_gemm_needs_a_vllm_for_the_device(monkeypatch):
    for cpu_engine, right, wrong in ((True, CPU, GPU), (False, GPU, CPU)):
        monkeypatch.setattr(rollout_gemm, "is_cpu_engine", lambda found=cpu_engine: found)
        assert choose("engine", "W4A16", right) == (EngineGemm, DequantGemm)
        with pytest.raises(ValueError, match=rf"on device '{wrong}' needs a vLLM for it.*'auto'"):
            choose("engine", "W4A16", wrong)
    monkeypatch.setattr(rollout_gemm, "is_vllm_available", lambda: False)
    with pytest.raises(ValueError, match=r"needs a vLLM for it.*make install.*'auto'"):
        choose("engine", "W8A8", CPU)
    assert plain_gemm(resolve_scheme("W8A8"), CPU)
