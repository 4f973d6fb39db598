"""The learner's products on a GPU against the operations that vLLM's layers call there."""

from __future__ import annotations

import pytest
import torch
from quant.schemes import normal, relative_error

from qarl_trl.quant import quantize_weight, resolve_scheme
from qarl_trl.quant.activations import quantize_groups_fp8, quantize_tokens_fp8, quantize_tokens_int8
from qarl_trl.quant.gemm import dequantize, plain_gemm
from qarl_trl.quant.grouped import ExpertsGemm
from qarl_trl.quant.scheme import SUPPORTED, gpu_generation
from qarl_trl.rollout.engine_gemm import engine_gemm


pytestmark = pytest.mark.gpu
# Both sides round the same float32 sums, added up in another order, to bfloat16: a step of 2^-8 where they fall on two sides.
ONE_ROUNDING = 2**-8
DTYPE = torch.bfloat16


def needs(scheme):
    if gpu_generation(torch.cuda.get_device_capability()) not in SUPPORTED[scheme].gpus:
        pytest.skip(f"{scheme} needs one of {SUPPORTED[scheme].gpus}")


def layer(scheme, tokens=64):
    low_bit = quantize_weight(normal(256, 512).cuda(), resolve_scheme(scheme))
    x, bias = normal(tokens, 512, seed=1, dtype=DTYPE).cuda(), normal(256, seed=2, dtype=DTYPE).cuda()
    return low_bit, x, bias, plain_gemm(low_bit.scheme, x.device).forward(x, low_bit, bias)[0]


@pytest.mark.parametrize("tokens", [1, 64, 1000])
@pytest.mark.parametrize(
    ("scheme", "quantize"), [("FP8_DYNAMIC", quantize_tokens_fp8), ("W8A8", quantize_tokens_int8)]
)
def test_eight_bits_on_both_sides(scheme, quantize, tokens):
    needs(scheme)
    from vllm import _custom_ops as ops

    low_bit, x, bias, y = layer(scheme, tokens)
    quantized, scale = quantize(x)
    engine = ops.cutlass_scaled_mm(quantized, low_bit.quantized.t(), scale, low_bit.scale.float(), DTYPE, bias)
    assert relative_error(y, engine) < ONE_ROUNDING
    assert relative_error(y, x.float() @ normal(256, 512).cuda().t() + bias.float()) > ONE_ROUNDING  # control


def test_quantized_of_groups_are_those_of_vllm():
    needs("FP8_BLOCK")
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    x = torch.cat([normal(500, 512, seed=i, dtype=DTYPE, scale=s) for i, s in enumerate((1e-2, 1.0, 1e3))]).cuda()
    quantized, scale = per_token_group_quant_fp8(x, 128, use_ue8m0=False)
    found, found_scale = quantize_groups_fp8(x)
    assert torch.equal(found_scale, scale)
    assert torch.equal(found.view(torch.uint8), quantized.view(torch.uint8))
    assert not torch.equal(quantize_tokens_fp8(x)[0].view(torch.uint8), quantized.view(torch.uint8))  # control


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_activation_quantized_are_those_of_vllm(dtype):
    needs("FP8_DYNAMIC")
    from vllm import _custom_ops as ops
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    x = torch.cat([normal(500, 256, seed=i, dtype=dtype, scale=s) for i, s in enumerate((1e-4, 1.0, 1e3))]).cuda()
    x[3] = 0
    found, found_scale = quantize_tokens_fp8(x)
    with set_current_vllm_config(VllmConfig()):
        native = QuantFP8(static=False, group_shape=GroupShape.PER_TOKEN).forward_native
    quantized, scale = native(x)  # what a compiled engine computes
    assert torch.equal(found_scale, scale)
    assert torch.equal(found.view(torch.uint8), quantized.view(torch.uint8))
    # The operation of an engine that is not compiled divides where that multiplies by the reciprocal: ties fall otherwise, 5.5e-4 of
    # the quantized values of normal numbers by the two formulas on a CPU.
    quantized, scale = ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
    assert torch.equal(found_scale, scale)
    assert (found.view(torch.uint8) != quantized.view(torch.uint8)).float().mean() < 2e-3
    quantized, scale, _ = ops.scaled_int8_quant(x)
    found, found_scale = quantize_tokens_int8(x)
    assert torch.equal(found, quantized)
    assert torch.equal(found_scale, scale)


# Relative to the plain form: one rounding; with zero points what Machete's products of them add (docs/schemes.md); and where the
# plain form rounds dequantized weights that Marlin does not, the roundings of weight, sum and bias: sqrt(5) * 1.65e-3.
ENGINE = {scheme: ONE_ROUNDING for scheme, row in SUPPORTED.items() if row.gpus}
ENGINE |= {"W4A16_ASYM": 0.01, "NVFP4A16": 0.006}


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 64, 1000])
@pytest.mark.parametrize("scheme", list(ENGINE))
def test_the_engines_own_layer_is_the_plain_form(scheme, tokens, with_bias):
    needs(scheme)
    low_bit, x, bias, _ = layer(scheme, tokens)
    bias = bias if with_bias else None
    y, saved = plain_gemm(low_bit.scheme, x.device).forward(x, low_bit, bias)
    before = {name: tensor.clone() for name, tensor in low_bit.tensors.items()}
    engine, engine_saved = engine_gemm(low_bit.scheme, x.device).forward(x, low_bit, bias)
    assert relative_error(engine, y) < ENGINE[scheme]
    assert all(
        torch.equal(a.float(), b.float()) for a, b in zip(saved, engine_saved, strict=True)
    )  # one function makes both
    # The engine's layer has a copy of its own to repack.
    assert all(torch.equal(low_bit.tensors[name].view(torch.uint8), before[name].view(torch.uint8)) for name in before)
    # Control: 4-bit weights in float8 activations are a table, not what the checkpoint decompresses to (3.2 % on a CPU).
    if scheme == "W4AFP8":
        quantized = plain_gemm(low_bit.scheme, x.device).input_from(saved, torch.float32)
        other = quantized @ dequantize(low_bit, torch.float32).t()
        assert relative_error(engine.float() - (0 if bias is None else bias.float()), other) > 2 * ONE_ROUNDING


@pytest.mark.parametrize("scheme", ["W4A16", "W8A16"])
def test_a_changed_weight_has_a_layer_of_its_own(scheme):
    needs(scheme)
    low_bit, x, _, _ = layer(scheme)
    kernel = engine_gemm(low_bit.scheme, x.device)
    before, _ = kernel.forward(x, low_bit)
    other = quantize_weight(normal(256, 512, seed=7).cuda(), low_bit.scheme)
    after, _ = kernel.forward(x, other)
    assert relative_error(after, before) > 1
    assert torch.equal(kernel.forward(x, low_bit)[0], before)


@pytest.mark.parametrize("scheme", ["W4A16", "FP8_DYNAMIC", "FP8_BLOCK", "W8A8", "W4AFP8"])
def test_experts_at_once_are_gemms_one_after_the_other(scheme):
    needs(scheme)
    ends = [10, 10, 30, 31, 60, 80, 80, 100]
    weight = quantize_weight(normal(8 * 256, 512).cuda(), resolve_scheme(scheme))
    x = normal(100, 512, seed=1, dtype=DTYPE).cuda()
    gemm, experts = plain_gemm(weight.scheme, x.device), weight.split(256)
    y, _ = ExpertsGemm(gemm, torch.tensor(ends, dtype=torch.int32, device=x.device)).forward(x, weight)

    def one_after_the_other(order):
        parts = zip([0, *ends], ends, order, strict=False)
        return torch.cat([gemm.forward(x[a:b], expert)[0] for a, b, expert in parts if b > a])

    assert relative_error(y, one_after_the_other(experts)) < ONE_ROUNDING
    assert relative_error(y, one_after_the_other(experts[::-1])) > ONE_ROUNDING  # control
