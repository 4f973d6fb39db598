"""The learner's products on a GPU against the operations that vLLM's layers call there."""

from __future__ import annotations

import pytest
import torch
from quant.schemes import normal, relative_error, same_bytes, same_tensors
from slow.toys import copies

from qarl_trl.quant import quantize_weight, reference, resolve_scheme
from qarl_trl.quant.cuda_kernels import launch_decode_int4
from qarl_trl.quant.gemms.activations import (
    plain_tokens_fp8,
    plain_tokens_int8,
    quantize_groups_fp8,
    quantize_tokens_fp8,
    quantize_tokens_int8,
)
from qarl_trl.quant.gemms.gemm import plain_gemm
from qarl_trl.quant.gemms.grouped import ExpertsGemm
from qarl_trl.quant.quantize import dequantize
from qarl_trl.quant.supported import SUPPORTED, gpu_generation
from qarl_trl.rollout.engine_gemm import engine_gemm


pytestmark = pytest.mark.gpu
# Both sides round the same float32 sums to bfloat16, but add them up in another order: a step of 2^-8 where they fall
# on two sides.
ONE_ROUNDING = 2**-8
DTYPE = torch.bfloat16


def needs(scheme):
    """Skip the test where vLLM has no kernel for the scheme."""
    generations = SUPPORTED[scheme].gpus
    if gpu_generation(torch.cuda.get_device_capability()) not in generations:
        pytest.skip(f"{scheme} needs one of {generations}")


def matrix():
    """The weight of a layer."""
    return normal(256, 512).cuda()


def inputs(tokens=64):
    """What a layer multiplies, `(tokens, 512)`, and its bias."""
    x = normal(tokens, 512, seed=1, dtype=DTYPE).cuda()
    bias = normal(256, seed=2, dtype=DTYPE).cuda()
    return x, bias


def of_three_sizes(smallest, columns, dtype):
    """Activations of small, usual and large numbers, 500 rows of each."""
    parts = []
    for seed, scale in enumerate((smallest, 1.0, 1e3)):
        parts.append(normal(500, columns, seed=seed, dtype=dtype, scale=scale))
    return torch.cat(parts).cuda()


# Against the operations ---------------------------------------------------------------------------------------------


# As in decoding, in a batch of it, and in a prompt: kernels are chosen by the number of rows.
@pytest.mark.parametrize("tokens", [1, 64, 1000])
@pytest.mark.parametrize(
    ("scheme", "quantize"), [("FP8_DYNAMIC", quantize_tokens_fp8), ("W8A8", quantize_tokens_int8)]
)
def test_eight_bits_on_both_sides(scheme, quantize, tokens):
    needs(scheme)
    from vllm import _custom_ops as ops

    x, bias = inputs(tokens)
    low_bit = quantize_weight(matrix(), resolve_scheme(scheme))
    y, _ = plain_gemm(low_bit.scheme, x.device).forward(x, low_bit, bias)

    quantized, scale = quantize(x)
    engine = ops.cutlass_scaled_mm(quantized, low_bit.quantized.t(), scale, low_bit.scale.float(), DTYPE, bias)

    assert relative_error(y, engine) < ONE_ROUNDING
    unquantized = x.float() @ matrix().t() + bias.float()
    assert relative_error(y, unquantized) > ONE_ROUNDING  # control


def test_quantized_groups_are_those_of_vllm():
    needs("FP8_BLOCK")
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    x = of_three_sizes(1e-2, columns=512, dtype=DTYPE)
    expected, expected_scale = per_token_group_quant_fp8(x, 128, use_ue8m0=False)

    quantized, scale = quantize_groups_fp8(x)

    assert torch.equal(scale, expected_scale)
    assert same_bytes(quantized, expected)
    by_token, _ = quantize_tokens_fp8(x)
    assert not same_bytes(by_token, expected)  # control


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=str)
def activations(request):
    """Of three sizes, with a row of zeros."""
    needs("FP8_DYNAMIC")
    x = of_three_sizes(1e-4, columns=256, dtype=request.param)
    x[3] = 0
    return x


def test_plain_float8_activations_are_those_of_vllms_operation(activations):
    from vllm import _custom_ops as ops

    expected, expected_scale = ops.scaled_fp8_quant(activations, use_per_token_if_dynamic=True)

    quantized, scale = plain_tokens_fp8(activations)

    assert torch.equal(scale, expected_scale)
    assert same_bytes(quantized, expected)
    # Which the learner calls.
    assert same_bytes(quantize_tokens_fp8(activations)[0], expected)


def test_float8_activations_of_a_compiled_engine_differ_in_ties(activations):
    """
    It multiplies by reciprocals where the operation divides. Measured on an H200: 57 % of the scales differ in the
    last bit, and 6.4e-4 of bfloat16 numbers.
    """
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    with set_current_vllm_config(VllmConfig()):
        native = QuantFP8(static=False, group_shape=GroupShape.PER_TOKEN).forward_native
    expected, expected_scale = torch.compile(native, dynamic=True)(activations)

    quantized, scale = quantize_tokens_fp8(activations)

    torch.testing.assert_close(scale, expected_scale, rtol=2**-22, atol=0)
    differ = quantized.view(torch.uint8) != expected.view(torch.uint8)
    assert differ.float().mean() < 2e-3


def test_plain_int8_activations_are_those_of_vllms_operation(activations):
    from vllm import _custom_ops as ops

    expected, expected_scale, _ = ops.scaled_int8_quant(activations)

    quantized, scale = plain_tokens_int8(activations)

    assert torch.equal(scale, expected_scale)
    assert torch.equal(quantized, expected)
    assert torch.equal(quantize_tokens_int8(activations)[0], expected)  # which the learner calls


# Dequantizing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("scheme", "group_size"), [("W4A16", 32), ("W4A16", -1), ("W4A16_ASYM", 128)])
def test_the_kernel_dequantizes_as_plain_operations_do(scheme, group_size, dtype):
    # Not a power of two in either direction, and nine groups of 128.
    weight = quantize_weight(normal(384, 1152).cuda(), resolve_scheme(scheme, group_size))
    zero_point = None
    if "weight_zero_point" in weight.data:
        zero_point = reference.unpack_zero_points(weight.data["weight_zero_point"], 384)

    plain = reference.decode(weight.quantized, weight.scale, zero_point, weight.scheme, dtype)

    assert torch.equal(launch_decode_int4(weight.quantized, weight.scale, zero_point, dtype), plain)
    assert torch.equal(dequantize(weight, dtype), plain)


# Against the engine's own layer -------------------------------------------------------------------------------------


# Errors relative to the plain form. With zero points: what Machete's products of them add (docs/schemes.md). NVFP4A16:
# the plain form rounds dequantized weights, which Marlin does not, so the roundings of weight, sum and bias: sqrt(5) *
# 1.65e-3.
ENGINE = {scheme: ONE_ROUNDING for scheme, row in SUPPORTED.items() if row.gpus}
# W4AFP8 fails on an H200: 0.0050 to 0.0060, where the plain form is 0.0017 from the exact product. What vLLM's kernel
# rounds is unknown, so its bound stays: neither the rounding of inputs or scales, nor fast accumulation, nor bfloat16
# sums of groups explain it.
ENGINE |= {"W4A16_ASYM": 0.01, "NVFP4A16": 0.006}


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 64, 1000])
@pytest.mark.parametrize("scheme", list(ENGINE))
def test_the_engines_own_layer_is_the_plain_form(scheme, tokens, with_bias):
    needs(scheme)
    x, bias = inputs(tokens)
    if not with_bias:
        bias = None
    low_bit = quantize_weight(matrix(), resolve_scheme(scheme))
    before = copies(low_bit.tensors.items())
    plain = plain_gemm(low_bit.scheme, x.device)
    y, saved = plain.forward(x, low_bit, bias)

    engine_y, engine_saved = engine_gemm(low_bit.scheme, x.device).forward(x, low_bit, bias)

    assert relative_error(engine_y, y) < ENGINE[scheme]
    for one, other in zip(saved, engine_saved, strict=True):  # one function makes both
        assert torch.equal(one.float(), other.float())
    # The engine's layer has a copy of its own to repack.
    assert same_tensors(low_bit.tensors, before)

    # Control: 4-bit weights beside float8 activations are a table, not what the checkpoint decompresses to (3.2 %
    # apart on a CPU).
    if scheme == "W4AFP8":
        without_bias = engine_y.float() if bias is None else engine_y.float() - bias.float()
        decompressed = plain.input_from(saved, torch.float32) @ dequantize(low_bit, torch.float32).t()
        assert relative_error(without_bias, decompressed) > 2 * ONE_ROUNDING


@pytest.mark.parametrize("scheme", ["W4A16", "W8A16"])
def test_a_changed_weight_has_a_layer_of_its_own(scheme):
    needs(scheme)
    x, _ = inputs()
    low_bit = quantize_weight(matrix(), resolve_scheme(scheme))
    gemm = engine_gemm(low_bit.scheme, x.device)
    before, _ = gemm.forward(x, low_bit)

    # The engine's layer repacks once for a weight, and must notice another.
    changed = quantize_weight(normal(256, 512, seed=7).cuda(), low_bit.scheme)
    after, _ = gemm.forward(x, changed)
    again, _ = gemm.forward(x, low_bit)

    # Products of two random weights are further apart than they are long.
    assert relative_error(after, before) > 1
    assert torch.equal(again, before)


# Experts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["W4A16", "FP8_DYNAMIC", "FP8_BLOCK", "W8A8", "W4AFP8"])
def test_experts_at_once_are_gemms_one_after_the_other(scheme):
    needs(scheme)
    ends = [10, 10, 30, 31, 60, 80, 80, 100]  # of the rows of each of eight experts, two of which have none
    weight = quantize_weight(normal(8 * 256, 512).cuda(), resolve_scheme(scheme))
    x = normal(100, 512, seed=1, dtype=DTYPE).cuda()
    gemm = plain_gemm(weight.scheme, x.device)
    experts = weight.split(256)

    y, _ = ExpertsGemm(gemm, torch.tensor(ends, dtype=torch.int32, device=x.device)).forward(x, weight)

    def one_after_the_other(order):
        parts = []
        for start, end, expert in zip([0, *ends[:-1]], ends, order, strict=True):
            if end > start:
                part, _ = gemm.forward(x[start:end], expert)
                parts.append(part)
        return torch.cat(parts)

    assert relative_error(y, one_after_the_other(experts)) < ONE_ROUNDING
    assert relative_error(y, one_after_the_other(experts[::-1])) > ONE_ROUNDING  # control
