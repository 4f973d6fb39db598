"""`qarl_trl.rollout.engine_gemm`: the products are those of the engine's own layers."""

import pytest
import torch
import torch.nn.functional as F
from quant.schemes import low_bit_of, normal, relative_error, same_bytes

from qarl_trl.quant.gemms.activations import quantize_tokens_int8
from qarl_trl.quant.gemms.gemm import CpuInt4Int8Gemm, DequantGemm, Fp8Gemm, Int8Gemm
from qarl_trl.quant.quantize import dequantize
from qarl_trl.rollout.cpu_support import cpu_flags
from qarl_trl.rollout.engine_gemm import EngineGemm
from qarl_trl.rollout.vllm.linear_layer import engine_product


pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.usefixtures("several_threads")]
BF16 = torch.bfloat16


def bias_of(size, wanted=True):
    """A bias, or `None`."""
    if not wanted:
        return None
    return normal(size, seed=2, dtype=BF16)


def product(gemm, x, low_bit, bias=None):
    y, _ = gemm.forward(x, low_bit, bias)
    return y


@pytest.mark.parametrize(("scheme", "group_size"), [("W4A16", 32), ("W4A16", -1), ("W4A16_ASYM", 128)])
def test_the_engines_gemm_is_close_to_the_dequant_gemm(scheme, group_size):
    gemm = EngineGemm(DequantGemm())
    low_bit = low_bit_of(scheme, group_size)
    x = normal(2, 9, 256, seed=1, dtype=BF16)
    exact = F.linear(x.double(), dequantize(low_bit).double())

    y, saved = gemm.forward(x, low_bit)

    # Weight-only: the backward gets the input itself.
    assert saved[0] is x
    # Measured 5.2e-3 against 1.6e-3 of the dequant GEMM. Without AVX512_BF16 vLLM's kernel cuts weights and result off
    # to bfloat16 where a GEMM rounds (its bits are exactly those of the cut-off product); with it it is nearer.
    assert relative_error(y, exact) < 8e-3
    assert relative_error(product(DequantGemm(), x, low_bit), exact) < 2.5e-3

    # Control: another weight.
    other = low_bit_of(scheme, group_size, seed=5)
    assert relative_error(product(gemm, x, other), exact) > 1


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 18])
@pytest.mark.parametrize("shape", [(64, 128), (96, 1024)])
def test_int8_of_the_engine_is_cut_off_where_the_plain_gemm_is_rounded(tokens, shape, with_bias):
    """Without AVX512_BF16 it has the exact sums, cut off to bfloat16."""
    gemm = EngineGemm(Int8Gemm())
    low_bit = low_bit_of("W8A8", shape=shape)
    x = normal(tokens, shape[1], seed=1, dtype=BF16)
    bias = bias_of(shape[0], with_bias)
    if not cpu_flags() & {"avx512_vnni", "avx_vnni"}:
        # oneDNN adds two products in 16 bits there, which larger quantized values saturate.
        low_bit.quantized.clamp_(-63, 63)

    y = product(gemm, x, low_bit, bias)

    quantized, scale = quantize_tokens_int8(x)
    # Exact, in integers.
    sums = quantized.long() @ low_bit.quantized.long().t()
    exact = sums.float() * low_bit.scale.float().t() * scale
    if with_bias:
        exact += bias.float()
        # Control: the bias is not added after the rounding.
        assert not same_bytes(y, product(gemm, x, low_bit) + bias)

    cut_off = (exact.view(torch.int32) >> 16).to(torch.int16).view(BF16)
    nearest = product(Int8Gemm(), x, low_bit, bias)
    assert same_bytes(y, cut_off) or same_bytes(y, nearest)

    # Control: the two differ.
    assert not same_bytes(cut_off, nearest)


@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM"])
def test_the_bias_of_a_4_bit_layer_is_added_where_the_engine_adds_it(scheme):
    from vllm import _custom_ops as ops

    gemm = EngineGemm(DequantGemm())
    low_bit = low_bit_of(scheme)
    x = normal(18, 256, seed=1, dtype=BF16)
    bias = bias_of(128)

    y = product(gemm, x, low_bit, bias)

    zeros = low_bit.tensors.get("weight_zero_point")
    if zeros is not None:
        # The engine has zero points along the other dimension.
        zeros = zeros.t().contiguous()
    layer = low_bit.prepared["engine"]
    expected = ops.cpu_gemm_wna16(
        input=x,
        q_weight=layer.weight_packed,
        scales=low_bit.scale.t().contiguous(),
        zeros=zeros,
        bias=bias,
        pack_factor=8,
        isa_hint=layer.isa_hint,
    )
    assert same_bytes(y, expected)

    # Control: not after the rounding.
    assert not same_bytes(y, product(gemm, x, low_bit) + bias)


@pytest.mark.parametrize("with_bias", [False, True])
def test_fp8_is_the_layer_of_the_engine(with_bias):
    low_bit = low_bit_of("FP8_DYNAMIC", shape=(96, 256))
    x = normal(18, 256, seed=1, dtype=BF16)
    bias = bias_of(96, with_bias)

    y = product(Fp8Gemm(), x, low_bit, bias)

    assert same_bytes(y, engine_product(x, low_bit, bias))
    if with_bias:
        # Control: the bias is not added after the rounding.
        assert not same_bytes(y, product(Fp8Gemm(), x, low_bit) + bias)


def engine_layer_of_w4a8(low_bit, group_size, bias):
    """vLLM's kernel for a weight, and the layer that it has packed."""
    from vllm.model_executor.kernels.linear.mixed_precision.dynamic_4bit import Dynamic4bitLinearKernel
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearLayerConfig
    from vllm.scalar_type import scalar_types

    layer = torch.nn.Module()
    # vLLM's kernel asks for the attribute also where there is no bias.
    layer.register_parameter("bias", None)
    tensors = {"weight": low_bit.quantized, "weight_scale": low_bit.scale}
    if bias is not None:
        tensors["bias"] = bias
    for name, tensor in tensors.items():
        layer.register_parameter(name, torch.nn.Parameter(tensor.clone(), requires_grad=False))

    out_features, in_features = low_bit.shape
    size = (in_features, out_features)
    if group_size == -1:
        group_size = in_features
    config = MPLinearLayerConfig(size, size, scalar_types.int4, BF16, group_size, False)

    kernel = Dynamic4bitLinearKernel(config, "weight", "weight_scale")
    kernel.process_weights_after_loading(layer)
    return kernel, layer


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("group_size", [32, 128, -1])
def test_w4a8_is_the_layer_of_the_engine(group_size, with_bias):
    """Which packs its bias with the weight."""
    gemm = CpuInt4Int8Gemm()
    low_bit = low_bit_of("W4A8", group_size, shape=(96, 256))
    x = normal(2, 9, 256, seed=1, dtype=BF16)
    bias = bias_of(96, with_bias)
    kernel, layer = engine_layer_of_w4a8(low_bit, group_size, bias)

    y = product(gemm, x, low_bit, bias)

    assert same_bytes(y, kernel.apply_weights(layer, x, layer.bias))

    # Controls: another weight, and the bias after the rounding.
    other = low_bit_of("W4A8", group_size, shape=(96, 256), seed=5)
    assert not same_bytes(product(gemm, x, other, bias), y)
    if with_bias:
        assert not same_bytes(product(gemm, x, low_bit) + bias, y)
