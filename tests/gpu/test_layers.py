"""The learner's products on a GPU against the operations that vLLM's layers call there."""

from __future__ import annotations

import pytest
import torch
from quant.schemes import normal, relative_error

from qarl_trl.quant import quantize_weight, resolve_scheme
from qarl_trl.quant.activations import quantize_tokens_fp8, quantize_tokens_int8
from qarl_trl.quant.kernel_choice import select_kernel
from qarl_trl.quant.kernels import dequantize
from qarl_trl.quant.scheme import SUPPORTED, gpu_generation


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
    return low_bit, x, bias, select_kernel(low_bit.scheme, x.device).forward(x, low_bit, bias)[0]


@pytest.mark.parametrize("tokens", [1, 64, 1000])
@pytest.mark.parametrize(
    ("scheme", "quantize"), [("FP8_DYNAMIC", quantize_tokens_fp8), ("W8A8", quantize_tokens_int8)]
)
def test_eight_bits_on_both_sides(scheme, quantize, tokens):
    needs(scheme)
    from vllm import _custom_ops as ops

    low_bit, x, bias, y = layer(scheme, tokens)
    codes, scale = quantize(x)
    engine = ops.cutlass_scaled_mm(codes, low_bit.codes.t(), scale, low_bit.scale.float(), DTYPE, bias)
    assert relative_error(y, engine) < ONE_ROUNDING
    assert relative_error(y, x.float() @ normal(256, 512).cuda().t() + bias.float()) > ONE_ROUNDING  # control


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_activation_codes_are_those_of_vllm(dtype):
    needs("FP8_DYNAMIC")
    from vllm import _custom_ops as ops

    x = torch.cat([normal(500, 256, seed=i, dtype=dtype, scale=s) for i, s in enumerate((1e-4, 1.0, 1e3))]).cuda()
    x[3] = 0
    codes, scale = ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
    found, found_scale = quantize_tokens_fp8(x)
    assert torch.equal(found_scale, scale)
    assert torch.equal(found.view(torch.uint8), codes.view(torch.uint8))
    codes, scale, _ = ops.scaled_int8_quant(x)
    found, found_scale = quantize_tokens_int8(x)
    assert torch.equal(found, codes)
    assert torch.equal(found_scale, scale)


@pytest.mark.parametrize("tokens", [1, 64, 1000])
def test_w4afp8_is_the_product_of_the_hopper_kernel(tokens):
    needs("W4AFP8")
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils import quant_utils

    low_bit, x, bias, y = layer("W4AFP8", tokens)
    per_token = quant_utils.GroupShape.PER_TOKEN
    if hasattr(quant_utils, "convert_bf16_scales_to_fp8"):
        quantize = QuantFP8(static=False, group_shape=per_token)
        scales, channel = quant_utils.convert_bf16_scales_to_fp8(quantize, low_bit.scale.clone())
    else:
        pytest.skip("this vLLM converts the scales elsewhere")
    packed = quant_utils.convert_packed_uint4b8_to_signed_int4_inplace(low_bit.codes.clone())
    codes, scale = quantize_tokens_fp8(x)
    engine = ops.cutlass_w4a8_mm(
        a=codes,
        b_q=ops.cutlass_encode_and_reorder_int4b(packed.t()),
        b_group_scales=ops.cutlass_pack_scale_fp8(scales.t().contiguous()),
        b_group_size=128,
        a_token_scales=scale,
        b_channel_scales=channel,
    ).add_(bias)
    assert relative_error(y, engine) < ONE_ROUNDING
    # Control: by the weight that the checkpoint decompresses to the product is another, 3.2 % by the CPU's form of it.
    other = (codes.float() * scale) @ dequantize(low_bit).float().t() + bias.float()
    assert relative_error(other, engine) > 2 * ONE_ROUNDING
