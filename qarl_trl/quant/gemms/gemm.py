"""The low-bit gemms in torch, one class per scheme family, and the choice of one by scheme and device."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor

from ..quantize import LowBitWeight, dequantize
from ..reference import FP8, unpacked
from ..scheme import effective_group_size, support_of
from . import activations
from .activations import memoize_last


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
    # Whether it keeps the dequantized matrix, until the quantized values change: no pass after the first dequantizes.
    keeps_matrices = False

    def forward(self, x: Tensor, weight: LowBitWeight, bias: Bias = None) -> tuple[Tensor, Saved]:
        """
        Multiply.

        Args:
            x: `(..., in)`.
            weight: The low-bit weight `(out, in)`.
            bias: `(out,)`, in the dtype of `x`.

        Returns:
            `y` `(..., out)` in the dtype of `x`, and the tensors for `input_from`.
        """
        raise NotImplementedError

    def input_from(self, saved: Saved, dtype: torch.dtype) -> Tensor:
        """The input of the multiplication, `(..., in)` in `dtype`."""
        return saved[0].to(dtype)

    def matrix_from(self, weight: LowBitWeight, dtype: torch.dtype) -> Tensor:
        """The weight of the multiplication, `(out, in)` in `dtype`. Do not write to it."""
        if not self.keeps_matrices:
            return self.new_matrix_from(weight, dtype)

        # By dtype: a forward under autocast and a float32 backward may want different ones.
        key = f"matrix in {dtype}"
        if key not in weight.prepared:
            weight.prepared[key] = self.new_matrix_from(weight, dtype)
        return weight.prepared[key]

    def new_matrix_from(self, weight: LowBitWeight, dtype: torch.dtype) -> Tensor:
        """`matrix_from`, in new storage."""
        return dequantize(weight, dtype)

    def keep_matrices(self) -> None:
        """From now on keep the dequantized matrix of each weight, as `quant_keep_matrices` says."""
        self.keeps_matrices = True
        self.prepares = True

    def grad_input(self, grad: Tensor, weight: LowBitWeight) -> Tensor:
        """The gradient of the input, `(..., in)`, from that of `y` `(..., out)`."""
        # By default dequantizes again: keeping each layer's matrix needs memory for a second model.
        return grad @ self.matrix_from(weight, grad.dtype)

    def grad_weight(self, grad: Tensor, x: Tensor) -> Tensor:
        """The gradient of the weight, `(out, in)`, from that of `y` `(tokens, out)` and the input `(tokens, in)`."""
        return grad.t() @ x


# Returns the gemm of a scheme on a device, or raises ValueError.
GemmChoice = Callable[[QuantizationScheme, torch.device], Gemm]


# Weight-only schemes -------------------------------------------------------------------------------------------------


class DequantGemm(Gemm):
    """
    Dequantize the weight of a layer, and multiply in the compute dtype.

    It adds the bias to the rounded output, as Marlin and Machete do.
    """

    def forward(self, x: Tensor, weight: LowBitWeight, bias: Bias = None) -> tuple[Tensor, Saved]:
        # The matrix gets no name, so that it is freed before the bias is added.
        y = F.linear(x, self.matrix_from(weight, x.dtype))
        return add_to_rounded(y, bias), (x,)


# Schemes that quantize activations -----------------------------------------------------------------------------------


class ActivationGemm(Gemm):
    """Base of the gemms that quantize activations: they save the quantized input instead of the input."""

    # maps `(..., in)` to quantized values `(..., in)` and scale `(..., groups)`
    quantize: Callable[[Tensor], tuple[Tensor, Tensor]]

    def forward(self, x: Tensor, weight: LowBitWeight, bias: Bias = None) -> tuple[Tensor, Saved]:
        saved = self.save(x)
        return self.multiply(x, saved, weight, bias), saved

    def save(self, x: Tensor) -> Saved:
        """Quantized values `(..., in)` and scale `(..., groups)` of an input `(..., in)`."""
        # q, k and v (gate and up) multiply the same input: it is quantized once.
        return memoize_last(self.quantize, x)

    def multiply(self, x: Tensor, saved: Saved, weight: LowBitWeight, bias: Bias = None) -> Tensor:
        """
        Multiply an input that is quantized already.

        Args:
            x: `(..., in)`.
            saved: From [`save`], or some of its rows.
            weight: The low-bit weight `(out, in)`.
            bias: `(out,)`.

        Returns:
            `(..., out)` in the dtype of `x`.
        """
        quantized, scale = saved
        rows = quantized.reshape(-1, quantized.shape[-1])
        row_scale = scale.reshape(-1, scale.shape[-1])
        y = self.matmul(rows, row_scale, weight, bias, x.dtype)
        return y.reshape(*x.shape[:-1], -1)

    def input_from(self, saved: Saved, dtype: torch.dtype) -> Tensor:
        quantized, scale = saved
        return activations.dequantize_activations(quantized, scale, dtype)

    def matmul(self, x: Tensor, scale: Tensor, weight: LowBitWeight, bias: Bias, dtype: torch.dtype) -> Tensor:
        """
        Multiply quantized values.

        Args:
            x: Quantized values `(tokens, in)`.
            scale: Their scale, float32 `(tokens, groups)`.
            weight: The low-bit weight `(out, in)`.
            bias: `(out,)`.
            dtype: Dtype of the result.

        Returns:
            `(tokens, out)`, with the bias.
        """
        raise NotImplementedError


class Fp8Gemm(ActivationGemm):
    """
    FP8 weights and per-token FP8 activations, `(x_q W_q^T) s_x s_w + b`: summed as vLLM's kernels do on CUDA, in
    float32 elsewhere.
    """

    quantize = staticmethod(activations.quantize_tokens_fp8)

    def operand(self, weight: LowBitWeight) -> tuple[Tensor, Tensor]:
        """The float8 operand `(out, in)` and its scale, float32 `(out, 1)`."""
        return weight.quantized, weight.scale.float()

    def matmul(self, x: Tensor, scale: Tensor, weight: LowBitWeight, bias: Bias, dtype: torch.dtype) -> Tensor:
        operand, weight_scale = self.operand(weight)
        if x.device.type == "cuda":
            # As vLLM's kernels for Ada and Hopper, whose sums keep fewer bits than float32.
            # torch wants the scales of columns as a row, `(1, out)`.
            column_scale = weight_scale.t().contiguous()
            return torch._scaled_mm(x, operand.t(), scale, column_scale, bias, out_dtype=dtype, use_fast_accum=True)

        # As vLLM where it has no such kernel: it scales the float32 sums.
        one = torch.ones(1, device=x.device)
        sums = torch._scaled_mm(x, operand.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
        sums.mul_(scale).mul_(weight_scale.t())
        return add_to_sums(sums, bias).to(dtype)


class Int4Fp8Gemm(Fp8Gemm):
    """
    INT4 weights and per-token FP8 activations, as vLLM's kernel for Hopper multiplies them.

    For each group the kernel has a table of sixteen products `quantized value * scale`, rounded to float8. The scale
    is also rounded to float8, under a float32 scale per channel. So the kernel's weight differs from the one that the
    checkpoint decompresses to.
    """

    def operand(self, weight: LowBitWeight) -> tuple[Tensor, Tensor]:
        float8_scale, channel_scale = activations.quantize_tokens_fp8(weight.scale)
        # Divided by 8, so that the largest entry, 8 times the scale, is a float8 number.
        group_scale = (float8_scale.float() / 8).to(FP8).float()

        quantized = unpacked(weight.quantized, 4)
        groups = quantized.unflatten(-1, (group_scale.shape[-1], -1))
        entries = (groups * group_scale.unsqueeze(-1)).to(FP8)
        return entries.flatten(-2), channel_scale * 8

    def matmul(self, x: Tensor, scale: Tensor, weight: LowBitWeight, bias: Bias, dtype: torch.dtype) -> Tensor:
        # The bias comes after rounding here, unlike in the FP8 gemm.
        y = super().matmul(x, scale, weight, None, dtype)
        return add_to_rounded(y, bias)

    def new_matrix_from(self, weight: LowBitWeight, dtype: torch.dtype) -> Tensor:
        entries, channel_scale = self.operand(weight)
        return (entries.float() * channel_scale).to(dtype)


class Fp8BlockGemm(ActivationGemm):
    """
    FP8 weights in blocks of 128 x 128 and FP8 activations in groups of 128: one float32 gemm per block column.

    vLLM adds the bias to the rounded output of its block kernels.
    """

    quantize = staticmethod(activations.quantize_groups_fp8)

    def matmul(self, x: Tensor, scale: Tensor, weight: LowBitWeight, bias: Bias, dtype: torch.dtype) -> Tensor:
        height, width = weight.scheme.weights.block_structure
        # One scale for each row and block column, `(out, in / width)`.
        row_scale = weight.scale.float().repeat_interleave(height, dim=0)
        blocks = zip(x.split(width, dim=1), weight.quantized.split(width, dim=1), strict=True)

        # Each block column has other scales, so its sums are scaled before they are added up.
        y = torch.zeros(x.shape[0], weight.quantized.shape[0], device=x.device)
        for column, (left, right) in enumerate(blocks):
            y += (left.float() @ right.float().t()) * scale[:, column : column + 1] * row_scale[:, column]
        return add_to_rounded(y.to(dtype), bias)


class Int8Gemm(ActivationGemm):
    """INT8 weights and per-token INT8 activations, accumulated exactly in int32."""

    quantize = staticmethod(activations.quantize_tokens_int8)

    def matmul(self, x: Tensor, scale: Tensor, weight: LowBitWeight, bias: Bias, dtype: torch.dtype) -> Tensor:
        tokens = x.shape[0]
        if x.device.type == "cuda" and tokens <= 16:  # cuBLAS needs more rows
            x = F.pad(x, (0, 0, 0, 17 - tokens))

        sums = torch._int_mm(x, weight.quantized.t())[:tokens]
        y = sums.float().mul_(weight.scale.float().t()).mul_(scale)
        y = add_to_sums(y, bias)
        return y.to(dtype)


class CpuInt4Int8Gemm(ActivationGemm):
    """INT4 weights and asymmetric per-token INT8 activations: torch's own 4-bit kernel, which the CPU engine calls."""

    prepares = True
    quantize = staticmethod(activations.quantize_tokens_int8_asymmetric)

    def save(self, x: Tensor) -> Saved:
        # The engine's dtype of activations. The kernel does not return the quantized values of its input.
        return memoize_last(self.quantize, memoize_last(Tensor.to, x, torch.bfloat16))

    def multiply(self, x: Tensor, saved: Saved, weight: LowBitWeight, bias: Bias = None) -> Tensor:
        # The kernel quantizes the input itself.
        cast = memoize_last(Tensor.to, x, torch.bfloat16)
        cast_bias = None if bias is None else bias.to(torch.bfloat16)
        y = self._kernel(cast.reshape(-1, x.shape[-1]), weight, cast_bias)
        return y.to(x.dtype).reshape(*x.shape[:-1], -1)

    def _kernel(self, x: Tensor, weight: LowBitWeight, bias: Bias) -> Tensor:
        """`x` `(tokens, in)` bfloat16 times the weight plus the bias, `(tokens, out)` bfloat16."""
        out_features, in_features = weight.quantized.shape
        group_size = effective_group_size(weight.scheme) or in_features

        # vLLM also treats a single group as one scale per channel; then the kernel sums, scales and rounds in
        # another way, and adds the bias itself.
        if group_size == in_features:
            packed = self._packed(weight, bias)
            y = torch.ops.aten._dyn_quant_matmul_4bit(x, packed, group_size, in_features, out_features)
            return y.to(torch.bfloat16)

        # With groups the kernel takes and returns float32, and we add the bias afterwards.
        packed = self._packed(weight, None)
        sums = torch.ops.aten._dyn_quant_matmul_4bit(x.float(), packed, group_size, in_features, out_features)
        return add_to_sums(sums, bias).to(torch.bfloat16)

    def _packed(self, weight: LowBitWeight, bias: Bias) -> Tensor:
        """The kernel's form of the quantized values and of a bias; kept until the bias changes."""
        kernel_bias = torch.empty(0) if bias is None else bias.detach().float()
        packed, packed_bias = weight.prepared.get("dyn_quant_4bit", (None, None))

        if packed is None or not torch.equal(packed_bias, kernel_bias):
            packed = _packed_for_torch(weight, kernel_bias)
            weight.prepared["dyn_quant_4bit"] = (packed, kernel_bias)
        return packed


def _packed_for_torch(weight: LowBitWeight, bias: Tensor) -> Tensor:
    """Pack int4 values and scales for torch's 4-bit kernel; an empty `bias` means none."""
    out_features, in_features = weight.quantized.shape
    group_size = effective_group_size(weight.scheme) or in_features

    # Two values to a byte, each plus 8, the first in the low bits.
    unsigned = weight.quantized + 8
    pairs = (unsigned[:, 1::2] << 4 | unsigned[:, ::2]).to(torch.uint8)

    # The kernel takes float32 scales for a single group, bfloat16 ones for several.
    scale = weight.scale.float() if group_size == in_features else weight.scale
    kernel_bias = bias if len(bias) else None
    return torch.ops.aten._dyn_quant_pack_4bit_weight(pairs, scale, kernel_bias, group_size, in_features, out_features)


def add_to_sums(sums: Tensor, bias: Bias) -> Tensor:
    """Add the bias `(out,)` to float32 sums `(tokens, out)`, before they are rounded."""
    return sums if bias is None else sums + bias.float()


def add_to_rounded(y: Tensor, bias: Bias) -> Tensor:
    """Add the bias `(out,)` to an output `(..., out)` that is already rounded to its dtype."""
    return y if bias is None else y + bias


# The choice ----------------------------------------------------------------------------------------------------------


_GEMMS: dict[str, type[Gemm]] = {
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


def plain_gemm(scheme: QuantizationScheme, device: torch.device) -> Gemm:
    """
    Torch's own gemm for a scheme.

    Args:
        scheme: A supported scheme.
        device: Where it runs. If that has no such gemm, torch raises in the first forward.
    """
    return _GEMMS[support_of(scheme).name]()


def dequant_gemm(scheme: QuantizationScheme, device: torch.device) -> Gemm:
    """
    [`plain_gemm`] of a scheme that does not quantize activations.

    Args:
        scheme: A supported scheme.
        device: Where it runs.

    Raises:
        ValueError: for a scheme that quantizes activations.
    """
    support = support_of(scheme)
    if support.activations != "none":
        raise ValueError(f"quant_kernel='dequant' leaves out {support.name}'s activation quantization. Use 'auto'.")
    return plain_gemm(scheme, device)
