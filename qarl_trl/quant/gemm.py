"""The low-bit gemms in torch, one class per scheme family, and the choice of one by scheme and device."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor

from . import activations, reference
from .activations import FP8, memoize_last
from .quantize import LowBitWeight, dequantize
from .scheme import effective_group_size, support_of


Bias = Tensor | None  # `(out,)`
# What a gemm saves of its input for the backward.
Saved = tuple[Tensor, ...]


class Gemm:
    """
    `y = x @ W_low_bit^T + b` as the rollout engine computes it, and its gradients.

    It adds the bias where the engine does: to the float32 sums, or to the rounded output.
    """

    # Whether it keeps its own form of the quantized values in addition (`LowBitWeight.prepared`).
    prepares = False

    def forward(self, x: Tensor, weight: LowBitWeight, bias: Bias = None) -> tuple[Tensor, Saved]:
        """Return `y` `(..., out)` in the dtype of `x` `(..., in)` and the bias `(out,)`, and the tensors for `input_from`."""
        raise NotImplementedError

    def input_from(self, saved: Saved, dtype: torch.dtype) -> Tensor:
        """The input of the multiplication, `(..., in)` in `dtype`."""
        return saved[0].to(dtype)

    def matrix_from(self, weight: LowBitWeight, dtype: torch.dtype) -> Tensor:
        """The weight of the multiplication, `(out, in)` in `dtype`."""
        return dequantize(weight, dtype)

    def grad_input(self, grad: Tensor, weight: LowBitWeight) -> Tensor:
        """The gradient of the input, `(..., in)`, from that of `y` `(..., out)`."""
        # Dequantizes again: keeping each layer's matrix would need memory for a second model.
        return grad @ self.matrix_from(weight, grad.dtype)

    def grad_weight(self, grad: Tensor, x: Tensor) -> Tensor:
        """The gradient of the weight, `(out, in)`, from that of `y` `(tokens, out)` and the input `(tokens, in)`."""
        return grad.t() @ x


# Returns the gemm of a scheme on a device, or raises ValueError.
GemmChoice = Callable[[QuantizationScheme, torch.device], Gemm]


class DequantGemm(Gemm):
    """
    For weight-only schemes: dequantize the weight of a layer, and multiply in the compute dtype.

    It adds the bias to the rounded output, as Marlin and Machete do.
    """

    def forward(self, x: Tensor, weight: LowBitWeight, bias: Bias = None) -> tuple[Tensor, Saved]:
        y = F.linear(x, dequantize(weight, x.dtype))
        return y if bias is None else y + bias, (x,)


class ActivationGemm(Gemm):
    """Base of the gemms that quantize activations: they save the quantized input instead of the input."""

    # maps `(..., in)` to quantized values `(..., in)` and scale `(..., groups)`
    quantize: Callable[[Tensor], tuple[Tensor, Tensor]]

    def forward(self, x: Tensor, weight: LowBitWeight, bias: Bias = None) -> tuple[Tensor, Saved]:
        saved = memoize_last(self.quantize, x)
        quantized, scale = (tensor.reshape(-1, tensor.shape[-1]) for tensor in saved)
        y = self.matmul(quantized, scale, weight, bias, x.dtype)
        return y.reshape(*x.shape[:-1], -1), saved

    def input_from(self, saved: Saved, dtype: torch.dtype) -> Tensor:
        return activations.dequantize_activations(*saved, dtype)

    def matmul(self, x: Tensor, scale: Tensor, weight: LowBitWeight, bias: Bias, dtype: torch.dtype) -> Tensor:
        """`(tokens, in)` quantized values times the weight plus the bias, `(tokens, out)` in `dtype`."""
        raise NotImplementedError


class Fp8Gemm(ActivationGemm):
    """FP8 weights and per-token FP8 activations, accumulated in float32 (`(x_q W_q^T) s_x s_w + b`)."""

    quantize = staticmethod(activations.quantize_tokens_fp8)

    def operand(self, weight: LowBitWeight) -> tuple[Tensor, Tensor]:
        """The float8 operand `(out, in)` and its scale, float32 `(out, 1)`."""
        return weight.quantized, weight.scale.float()

    def matmul(self, x: Tensor, scale: Tensor, weight: LowBitWeight, bias: Bias, dtype: torch.dtype) -> Tensor:
        w, w_scale = self.operand(weight)
        if x.device.type == "cuda":
            # As vLLM's kernels for Ada and Hopper, whose sums keep fewer bits than float32.
            return torch._scaled_mm(
                x, w.t(), scale, w_scale.t().contiguous(), bias, out_dtype=dtype, use_fast_accum=True
            )
        one = torch.ones(1, device=x.device)
        gemm = torch._scaled_mm(x, w.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
        return add_bias(gemm.mul_(scale).mul_(w_scale.t()), bias).to(dtype)


class Int4Fp8Gemm(Fp8Gemm):
    """
    INT4 weights and per-token FP8 activations, as vLLM's kernel for Hopper multiplies them.

    For each group the kernel has a table of sixteen products `quantized value * scale`, rounded to float8. The scale is also rounded
    to float8, under a float32 scale per channel. So the kernel's weight differs from the one that the checkpoint decompresses to.
    """

    def operand(self, weight: LowBitWeight) -> tuple[Tensor, Tensor]:
        scale, channel_scale = activations.quantize_tokens_fp8(weight.scale)
        # Divided by 8, so that the largest entry, 8 times the scale, is a float8 number.
        scale, channel_scale = (scale.float() / 8).to(FP8), channel_scale * 8
        quantized = reference.unpacked(weight.quantized, 4)
        groups = quantized.unflatten(-1, (scale.shape[-1], -1))
        return (groups * scale.float().unsqueeze(-1)).to(FP8).flatten(-2), channel_scale

    def matmul(self, x: Tensor, scale: Tensor, weight: LowBitWeight, bias: Bias, dtype: torch.dtype) -> Tensor:
        y = super().matmul(x, scale, weight, None, dtype)
        return y if bias is None else y + bias

    def matrix_from(self, weight: LowBitWeight, dtype: torch.dtype) -> Tensor:
        table, channel_scale = self.operand(weight)
        return (table.float() * channel_scale).to(dtype)


class Fp8BlockGemm(ActivationGemm):
    """
    FP8 weights in blocks of 128 x 128 and FP8 activations in groups of 128: one float32 gemm per block column.

    vLLM adds the bias to the rounded output of its block kernels.
    """

    quantize = staticmethod(activations.quantize_groups_fp8)

    def matmul(self, x: Tensor, scale: Tensor, weight: LowBitWeight, bias: Bias, dtype: torch.dtype) -> Tensor:
        height, width = weight.scheme.weights.block_structure
        w_scale = weight.scale.float().repeat_interleave(height, dim=0)
        y = torch.zeros(x.shape[0], weight.quantized.shape[0], device=x.device)
        for i, (a, b) in enumerate(zip(x.split(width, dim=1), weight.quantized.split(width, dim=1), strict=True)):
            y += (a.float() @ b.float().t()) * scale[:, i : i + 1] * w_scale[:, i]
        return y.to(dtype) if bias is None else y.to(dtype) + bias


class Int8Gemm(ActivationGemm):
    """INT8 weights and per-token INT8 activations, accumulated exactly in int32."""

    quantize = staticmethod(activations.quantize_tokens_int8)

    def matmul(self, x: Tensor, scale: Tensor, weight: LowBitWeight, bias: Bias, dtype: torch.dtype) -> Tensor:
        tokens = x.shape[0]
        if x.device.type == "cuda" and tokens <= 16:  # cuBLAS needs more rows
            x = F.pad(x, (0, 0, 0, 17 - tokens))
        sums = torch._int_mm(x, weight.quantized.t())[:tokens]
        return add_bias(sums.float().mul_(weight.scale.float().t()).mul_(scale), bias).to(dtype)


class CpuInt4Int8Gemm(ActivationGemm):
    """INT4 weights and asymmetric per-token INT8 activations: torch's own 4-bit kernel, which the CPU engine calls."""

    prepares = True
    quantize = staticmethod(activations.quantize_tokens_int8_asymmetric)

    def forward(self, x: Tensor, weight: LowBitWeight, bias: Bias = None) -> tuple[Tensor, Saved]:
        cast = memoize_last(Tensor.to, x, torch.bfloat16)  # the engine's dtype of activations and bias
        y = self._multiply(cast.reshape(-1, x.shape[-1]), weight, None if bias is None else bias.to(torch.bfloat16))
        return y.to(x.dtype).reshape(*x.shape[:-1], -1), memoize_last(self.quantize, cast)

    def _multiply(self, x: Tensor, weight: LowBitWeight, bias: Bias) -> Tensor:
        out_features, in_features = weight.quantized.shape
        group_size = effective_group_size(weight.scheme) or in_features
        # vLLM also treats a single group as one scale per channel; then the kernel sums, scales and rounds differently.
        one_group = group_size == in_features
        # The kernel packs the bias with the values. With groups it returns float32, and we add the bias afterwards.
        inside = bias.detach().float() if one_group and bias is not None else torch.empty(0)
        packed, packed_bias = weight.prepared.get("dyn_quant_4bit", (None, None))
        if packed is None or not torch.equal(packed_bias, inside):
            unsigned = weight.quantized + 8
            pairs = (unsigned[:, 1::2] << 4 | unsigned[:, ::2]).to(torch.uint8)
            scale = weight.scale.float() if one_group else weight.scale
            kernel_bias, sizes = inside if len(inside) else None, (group_size, in_features, out_features)
            packed = torch.ops.aten._dyn_quant_pack_4bit_weight(pairs, scale, kernel_bias, *sizes)
            weight.prepared["dyn_quant_4bit"] = packed, inside
        x = x if one_group else x.float()  # the kernel requires float32 with groups
        y = torch.ops.aten._dyn_quant_matmul_4bit(x, packed, group_size, in_features, out_features)
        return (y if one_group else add_bias(y, bias)).to(torch.bfloat16)


_GEMMS: dict[str, type[Gemm]] = {
    **dict.fromkeys(("W4A16", "W4A16_ASYM", "W8A16", "NVFP4A16"), DequantGemm),
    "FP8_DYNAMIC": Fp8Gemm,
    "FP8_BLOCK": Fp8BlockGemm,
    "W8A8": Int8Gemm,
    "W4A8": CpuInt4Int8Gemm,
    "W4AFP8": Int4Fp8Gemm,
}


def plain_gemm(scheme: QuantizationScheme, device: torch.device) -> Gemm:
    """Torch's own gemm for `scheme`. If the device has none, torch raises in the first forward."""
    return _GEMMS[support_of(scheme).name]()


def dequant_gemm(scheme: QuantizationScheme, device: torch.device) -> Gemm:
    """[`plain_gemm`] of a scheme that does not quantize activations; `ValueError` for others."""
    support = support_of(scheme)
    if support.activations != "none":
        raise ValueError(f"quant_kernel='dequant' leaves out {support.name}'s activation quantization. Use 'auto'.")
    return plain_gemm(scheme, device)


def add_bias(sums: Tensor, bias: Bias) -> Tensor:
    """Add the bias to float32 sums, before they are rounded."""
    return sums if bias is None else sums + bias.float()
