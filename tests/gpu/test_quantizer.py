"""The quantizer on a GPU: compiled by Triton, and the bytes of the CPU's."""

from __future__ import annotations

import warnings

import pytest
import torch
from quant.schemes import ALL_SCHEMES, same_tensors
from quant.test_reference import many_weights, parts

from qarl_trl.quant import fast, quantize_weight, reference, resolve_scheme
from qarl_trl.quant.activations import (
    dequantize_activations,
    quantize_groups_fp8,
    quantize_tokens_fp8,
    quantize_tokens_int8,
)


pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("scheme", "group_size"), ALL_SCHEMES)
def test_quantized_and_scales_are_those_of_the_cpu(scheme, group_size, dtype):
    resolved, weight = resolve_scheme(scheme, group_size), many_weights(0)
    for master in parts(weight if dtype == torch.bfloat16 else fast.between(weight), resolved):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # kernels that give other bytes are reported and not used
            assert fast.module_for(master.cuda(), resolved) is not reference
        found = quantize_weight(master.cuda(), resolved).tensors
        assert same_tensors({name: t.cpu() for name, t in found.items()}, quantize_weight(master, resolved).tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("plain", [quantize_tokens_fp8, quantize_groups_fp8, quantize_tokens_int8])
def test_activations_are_quantized_by_a_kernel_with_the_bytes_of_the_plain_operations(plain, dtype):
    for x in (fast.sample(dtype).cuda(), torch.randn(3, 70, 11008).to(dtype).cuda()):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kernel = fast.quantizer_of(plain, x)
        assert kernel is not plain
        quantized, scale = plain(x)
        for found, expected in zip(kernel(x), (quantized, scale), strict=True):
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            back = fast.activation_decoder(quantized, scale, dtype)
        assert back is not dequantize_activations
        assert torch.equal(back(quantized, scale, dtype), dequantize_activations(quantized, scale, dtype))


@pytest.mark.parametrize(("scheme", "width"), [("W8A8", 11006), ("FP8_DYNAMIC", 11008), ("NVFP4A16", 11024)])
def test_sizes_that_fill_no_tile(scheme, width):
    resolved, weight = resolve_scheme(scheme), torch.randn(130, width).bfloat16()
    assert fast.module_for(weight.cuda(), resolved) is not reference
    found = quantize_weight(weight.cuda(), resolved).tensors
    assert same_tensors({name: t.cpu() for name, t in found.items()}, quantize_weight(weight, resolved).tensors)


@pytest.mark.parametrize(("scheme", "group_size"), ALL_SCHEMES)
def test_the_plain_operations_give_the_same_on_both_devices(monkeypatch, scheme, group_size):
    monkeypatch.setattr(fast, "module_for", lambda weight, scheme: reference)
    resolved, weight = resolve_scheme(scheme, group_size), many_weights(0)
    for master in parts(weight, resolved):
        found = quantize_weight(master.cuda(), resolved).tensors
        assert same_tensors({name: t.cpu() for name, t in found.items()}, quantize_weight(master, resolved).tensors)
