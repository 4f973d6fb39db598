"""The arithmetic of a low-bit layer in torch, one class a kind of scheme.

A kernel computes `y = x @ W_low_bit^T` the way the rollout engine does and gives back what the backward needs.
`kernel_choice` says which one runs; `engine_kernels` has those that call the engine.
Invariant: `dequantize` is bit for bit compressed-tensors' own decompression (paper Sec. 3.1, step 2).
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from torch import Tensor

from .activations import FP8, quantize_groups_fp8, quantize_tokens_fp8, quantize_tokens_int8
from .quantize import LowBitWeight
from .reference import as_blocks, as_matrix
from .scheme import has_global_scale


class Kernel(Protocol):
    """
    A low-bit matrix product. `saved` holds tensors only; `input_from` turns them back into the input used.

    A bias is added where the engine adds it, to the float32 sums or to the rounded output.
    """

    name: str

    def forward(
        self, x: Tensor, weight: LowBitWeight, bias: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """
        `x` (..., in) to `y` (..., out) in `x.dtype`, and the tensors to keep for the backward. `bias` `(out,)` comes in
        `x.dtype`.
        """

    def input_from(self, saved: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """The input that was multiplied, (..., in) in `dtype`."""

    def matrix_from(self, weight: LowBitWeight, dtype: torch.dtype) -> Tensor:
        """The weight that it was multiplied by, (out, in) in `dtype`."""


def dequantize(weight: LowBitWeight, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """
    The matrix that the low-bit tensors stand for, `(out, in)`.

    Codes (minus the zero point) times scale, multiplied and rounded in the scale's dtype (bfloat16) and only then cast to
    `dtype`.
    """
    if has_global_scale(weight.scheme):
        compressor = BaseCompressor.get_value_from_registry(weight.scheme.format.value)
        return compressor.decompress(dict(weight.tensors), weight.scheme)["weight"].to(dtype)
    codes = _unpack(weight) if "weight_packed" in weight.tensors else weight.codes
    blocks = as_blocks(codes, weight.scheme).to(weight.scale.dtype)
    if "weight_zero_point" in weight.tensors:
        blocks.sub_(_zero_point(weight).to(blocks.dtype).unsqueeze(-1))
    return as_matrix(blocks.mul_(weight.scale.unsqueeze(-1)), codes.shape, weight.scheme).to(dtype)


class DequantGemm:
    """
    Weight-only schemes in plain torch: codes dequantized layer by layer into a GEMM in the compute dtype.

    The bias is added to the rounded output, as Marlin and Machete do.
    """

    name = "dequant"

    def forward(
        self, x: Tensor, weight: LowBitWeight, bias: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        y = F.linear(x, dequantize(weight, x.dtype))
        return y if bias is None else y + bias, (x,)

    def input_from(self, saved: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        return saved[0].to(dtype)

    def matrix_from(self, weight: LowBitWeight, dtype: torch.dtype) -> Tensor:
        return dequantize(weight, dtype)


class ActivationGemm:
    """Base of the kernels that quantize activations: they keep the codes of the input instead of the input."""

    def forward(
        self, x: Tensor, weight: LowBitWeight, bias: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        codes, scale = self.quantize(x.reshape(-1, x.shape[-1]))
        y = self.matmul(codes, scale, weight, bias, x.dtype)
        return y.reshape(*x.shape[:-1], -1), (codes.reshape(x.shape), scale.reshape(*x.shape[:-1], -1))

    def input_from(self, saved: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        codes, scale = saved
        groups = codes.float().unflatten(-1, (scale.shape[-1], -1))
        return (groups * scale.unsqueeze(-1)).flatten(-2).to(dtype)

    def matrix_from(self, weight: LowBitWeight, dtype: torch.dtype) -> Tensor:
        return dequantize(weight, dtype)

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Codes `(tokens, in)` and scale `(tokens, groups)` of the input."""
        raise NotImplementedError

    def matmul(
        self, x: Tensor, x_scale: Tensor, weight: LowBitWeight, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """`(tokens, in)` codes times the weight plus the bias, `(tokens, out)` in `dtype`."""
        raise NotImplementedError


class Fp8Gemm(ActivationGemm):
    """FP8 weights and per-token FP8 activations, accumulated in float32 (`(x_q W_q^T) s_x s_w + b`)."""

    name = "scaled_mm"

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return quantize_tokens_fp8(x)

    def operand(self, weight: LowBitWeight) -> tuple[Tensor, Tensor]:
        """What is multiplied, float8 `(out, in)`, and its scale, float32 `(out, 1)`."""
        return weight.codes, weight.scale.float()

    def matmul(
        self, x: Tensor, x_scale: Tensor, weight: LowBitWeight, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        w, w_scale = self.operand(weight)
        if x.device.type == "cuda":
            # As vLLM's kernels for Ada and Hopper do, whose sums keep fewer bits than float32.
            return torch._scaled_mm(
                x,
                w.t(),
                scale_a=x_scale,
                scale_b=w_scale.t().contiguous(),
                bias=bias,
                out_dtype=dtype,
                use_fast_accum=True,
            )
        one = torch.ones(1, device=x.device)
        product = torch._scaled_mm(x, w.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
        return add_bias(product * x_scale * w_scale.t(), bias).to(dtype)


class Int4Fp8Gemm(Fp8Gemm):
    """
    INT4 weights and per-token FP8 activations, as vLLM's kernel for Hopper multiplies them.

    That kernel has no 4-bit product: it holds a table of `code * scale` in float8 for each group, with the scale itself
    rounded to float8 and a float32 scale for the channel above it. Sixteen table entries of three bits' mantissa stand for
    the codes, so the weight that it multiplies by is not the one that the checkpoint decompresses to.
    """

    name = "table_mm"

    def operand(self, weight: LowBitWeight) -> tuple[Tensor, Tensor]:
        scale, channel_scale = quantize_tokens_fp8(weight.scale)
        # An eighth of it, so that the largest entry, 8 scales, is a float8 number.
        scale, channel_scale = (scale.float() / 8).to(FP8), channel_scale * 8
        groups = _unpack(weight).unflatten(-1, (scale.shape[-1], -1))
        return (groups * scale.float().unsqueeze(-1)).to(FP8).flatten(-2), channel_scale

    def matmul(
        self, x: Tensor, x_scale: Tensor, weight: LowBitWeight, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        y = super().matmul(x, x_scale, weight, None, dtype)
        return y if bias is None else y + bias

    def matrix_from(self, weight: LowBitWeight, dtype: torch.dtype) -> Tensor:
        table, channel_scale = self.operand(weight)
        return (table.float() * channel_scale).to(dtype)


class Fp8BlockGemm(ActivationGemm):
    """
    FP8 weights in blocks of 128 x 128 and FP8 activations in groups of 128, one float32 product a block column.

    vLLM adds the bias to the rounded output of its block kernels.
    """

    name = "block_mm"

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return quantize_groups_fp8(x)

    def matmul(
        self, x: Tensor, x_scale: Tensor, weight: LowBitWeight, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        height, width = weight.scheme.weights.block_structure
        w_scale = weight.scale.float().repeat_interleave(height, dim=0)
        y = torch.zeros(x.shape[0], weight.codes.shape[0], device=x.device)
        for i, (a, b) in enumerate(zip(x.split(width, dim=1), weight.codes.split(width, dim=1), strict=True)):
            y += (a.float() @ b.float().t()) * x_scale[:, i : i + 1] * w_scale[:, i]
        return y.to(dtype) if bias is None else y.to(dtype) + bias


class Int8Gemm(ActivationGemm):
    """INT8 weights and per-token INT8 activations, accumulated exactly in int32."""

    name = "int_mm"

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return quantize_tokens_int8(x)

    def matmul(
        self, x: Tensor, x_scale: Tensor, weight: LowBitWeight, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        product = _int_mm(x, weight.codes).float() * weight.scale.float().t() * x_scale
        return add_bias(product, bias).to(dtype)


def add_bias(sums: Tensor, bias: Tensor | None) -> Tensor:
    """The bias on float32 sums, before they are rounded."""
    return sums if bias is None else sums + bias.float()


def _int_mm(x: Tensor, w: Tensor) -> Tensor:
    """`(tokens, in)` times `(out, in)`, both int8, exact in int32."""
    tokens = x.shape[0]
    if x.device.type == "cuda" and tokens <= 16:  # cuBLAS wants more rows
        x = F.pad(x, (0, 0, 0, 17 - tokens))
    return torch._int_mm(x, w.t())[:tokens]


def _unpack(weight: LowBitWeight) -> Tensor:
    """Codes of a packed weight, int8 `(out, in)`."""
    words = weight.tensors["weight_packed"].view(torch.uint8)
    in_features = int(weight.tensors["weight_shape"][1])
    if weight.scheme.weights.num_bits == 8:
        return (words ^ 0x80).view(torch.int8)[:, :in_features]
    # Little-endian: byte i of a word holds codes 2i (low) and 2i + 1 (high), each plus 8.
    codes = torch.stack((words & 0xF, words >> 4), dim=-1).flatten(-2).view(torch.int8)
    return codes.sub_(8)[:, :in_features]


def _zero_point(weight: LowBitWeight) -> Tensor:
    """Zero points, int8 `(out, groups)`."""
    return unpack_from_int32(
        weight.tensors["weight_zero_point"], weight.scheme.weights.num_bits, weight.scale.shape, packed_dim=0
    )
