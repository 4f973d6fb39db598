"""`qarl_trl.rollout.engine_gemm`: the products are those of the engine's own layers."""

import pytest
import torch
import torch.nn.functional as F
from quant.schemes import low_bit_of, normal, relative_error, same_bytes

from qarl_trl.quant.activations import quantize_tokens_int8
from qarl_trl.quant.gemm import CpuInt4Int8Gemm, DequantGemm, Fp8Gemm, Int8Gemm, dequantize
from qarl_trl.rollout._vllm_layer import multiply
from qarl_trl.rollout.cpu import cpu_flags
from qarl_trl.rollout.engine_gemm import EngineGemm


pytestmark = [pytest.mark.engine, pytest.mark.slow]
BF16 = torch.bfloat16


@pytest.mark.parametrize(("scheme", "group_size"), [("W4A16", 32), ("W4A16", -1), ("W4A16_ASYM", 128)])
def test_the_engines_gemm_is_close_to_the_dequant_gemm(scheme, group_size):
    low_bit, x = low_bit_of(scheme, group_size), normal(2, 9, 256, seed=1, dtype=BF16)
    y, saved = EngineGemm(DequantGemm()).forward(x, low_bit)
    exact = F.linear(x.double(), dequantize(low_bit).double())
    assert saved[0] is x
    # Measured 5.2e-3 against 1.6e-3 of the dequant GEMM. Without AVX512_BF16 vLLM's kernel cuts weights and result off
    # to bfloat16 where a GEMM rounds (its bits are exactly those of the cut-off product); with it it is nearer.
    assert relative_error(y, exact) < 8e-3
    assert relative_error(DequantGemm().forward(x, low_bit)[0], exact) < 2.5e-3
    other = low_bit_of(scheme, group_size, seed=5)
    assert relative_error(EngineGemm(DequantGemm()).forward(x, other)[0], exact) > 1  # control


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 18])
@pytest.mark.parametrize("shape", [(64, 128), (96, 1024)])
def test_int8_of_the_engine_is_cut_off_where_the_plain_gemm_is_rounded(tokens, shape, with_bias):
    """Without AVX512_BF16 it has the exact sums, cut off to bfloat16."""
    low_bit, x = low_bit_of("W8A8", shape=shape), normal(tokens, shape[1], seed=1, dtype=BF16)
    if not cpu_flags() & {"avx512_vnni", "avx_vnni"}:
        # oneDNN adds two products in 16 bits there, which larger quantized values saturate
        low_bit.quantized.clamp_(-63, 63)
    bias = normal(shape[0], seed=2, dtype=BF16) if with_bias else None
    y, _ = EngineGemm(Int8Gemm()).forward(x, low_bit, bias)
    quantized, scale = quantize_tokens_int8(x)
    exact = (quantized.long() @ low_bit.quantized.long().t()).float() * low_bit.scale.float().t() * scale
    if with_bias:
        exact += bias.float()
        assert not same_bytes(y, EngineGemm(Int8Gemm()).forward(x, low_bit)[0] + bias)  # control: after the rounding
    cut_off = (exact.view(torch.int32) >> 16).to(torch.int16).view(BF16)
    nearest, _ = Int8Gemm().forward(x, low_bit, bias)
    assert same_bytes(y, cut_off) or same_bytes(y, nearest)
    assert not same_bytes(cut_off, nearest)  # control


@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM"])
def test_the_bias_of_a_4_bit_layer_is_added_where_the_engine_adds_it(scheme):
    from vllm import _custom_ops as ops

    low_bit, x = low_bit_of(scheme), normal(18, 256, seed=1, dtype=BF16)
    bias, zeros = normal(128, seed=2, dtype=BF16), low_bit.tensors.get("weight_zero_point")
    y, _ = EngineGemm(DequantGemm()).forward(x, low_bit, bias)
    expected = ops.cpu_gemm_wna16(
        input=x,
        q_weight=low_bit.prepared["engine"].weight_packed,
        scales=low_bit.scale.t().contiguous(),
        zeros=None if zeros is None else zeros.t().contiguous(),
        bias=bias,
        pack_factor=8,
        isa_hint=low_bit.prepared["engine"].isa_hint,
    )
    assert same_bytes(y, expected)
    assert not same_bytes(y, EngineGemm(DequantGemm()).forward(x, low_bit)[0] + bias)  # control: after the rounding


@pytest.mark.parametrize("with_bias", [False, True])
def test_fp8_is_the_layer_of_the_engine(with_bias):
    low_bit, x = low_bit_of("FP8_DYNAMIC", shape=(96, 256)), normal(18, 256, seed=1, dtype=BF16)
    bias = normal(96, seed=2, dtype=BF16) if with_bias else None
    y, _ = Fp8Gemm().forward(x, low_bit, bias)
    assert same_bytes(y, multiply(x, low_bit, bias))
    if with_bias:
        assert not same_bytes(y, Fp8Gemm().forward(x, low_bit)[0] + bias)  # control: after the rounding


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("group_size", [32, 128, -1])
def test_w4a8_is_the_layer_of_the_engine(group_size, with_bias):
    """Which packs its bias with the weight."""
    from vllm.model_executor.kernels.linear.mixed_precision.dynamic_4bit import Dynamic4bitLinearKernel
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearLayerConfig
    from vllm.scalar_type import scalar_types

    low_bit, x = low_bit_of("W4A8", group_size, shape=(96, 256)), normal(2, 9, 256, seed=1, dtype=BF16)
    bias, layer = normal(96, seed=2, dtype=BF16) if with_bias else None, torch.nn.Module()
    for name, tensor in (("bias", bias), ("weight", low_bit.quantized), ("weight_scale", low_bit.scale)):
        kept = None if tensor is None else torch.nn.Parameter(tensor.clone(), requires_grad=False)
        layer.register_parameter(name, kept)
    groups = 256 if group_size == -1 else group_size
    config = MPLinearLayerConfig((256, 96), (256, 96), scalar_types.int4, BF16, groups, False)
    engine = Dynamic4bitLinearKernel(config, "weight", "weight_scale")
    engine.process_weights_after_loading(layer)
    y, _ = CpuInt4Int8Gemm().forward(x, low_bit, bias)
    assert same_bytes(y, engine.apply_weights(layer, x, layer.bias))
    other = low_bit_of("W4A8", group_size, shape=(96, 256), seed=5)
    assert not same_bytes(CpuInt4Int8Gemm().forward(x, other, bias)[0], y)  # control
    if with_bias:
        assert not same_bytes(CpuInt4Int8Gemm().forward(x, low_bit)[0] + bias, y)  # control: after the rounding
