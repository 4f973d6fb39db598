"""The products that the rollout engine itself computes, in the learner.

Invariant: the product is the engine's own, on the tensors that are published; which of its kernels runs, and in which layout,
the engine decides (`_vllm_layer`). What the backward needs is computed here, by the plain forms in `kernels` (paper Sec. 3.1,
step 2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..quant.activations import quantize_tokens_int8_asymmetric
from ..quant.products import ActivationGemm, DequantGemm, Fp8BlockGemm, Fp8Gemm, Int4Fp8Gemm, Int8Gemm, add_bias
from ..quant.quantize import LowBitWeight
from ..quant.scheme import effective_group_size


class EngineGemm(DequantGemm):
    """
    Weight-only schemes by the engine's kernel: Marlin or Machete on GPUs, `cpu_gemm_wna16` on CPU.

    On GPUs the bias is added to the rounded output, as those two do; the CPU kernel adds it to the sums.
    """

    name = "engine"

    def forward(
        self, x: Tensor, weight: LowBitWeight, bias: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        inside = bias if x.device.type == "cpu" else None  # Marlin would want it permuted
        y = _engine_product(x, weight, inside)
        return y if bias is None or inside is not None else y + bias, (x,)


class EngineActivationGemm(ActivationGemm):
    """Base of the kernels for which the engine quantizes the input too; its codes are computed again for the backward."""

    name = "engine"

    def forward(
        self, x: Tensor, weight: LowBitWeight, bias: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        flat = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
        saved = tuple(t.reshape(*x.shape[:-1], -1) for t in self.quantize(flat))
        return _engine_product(x, weight, bias), saved


class EngineFp8Gemm(EngineActivationGemm, Fp8Gemm):
    """FP8 per channel and token: CUTLASS on GPUs."""


class EngineFp8BlockGemm(EngineActivationGemm, Fp8BlockGemm):
    """FP8 in blocks and groups."""


class EngineInt4Fp8Gemm(EngineActivationGemm, Int4Fp8Gemm):
    """INT4 weights and FP8 activations: CUTLASS on Hopper."""


class EngineInt8Gemm(EngineActivationGemm, Int8Gemm):
    """INT8 on both sides: CUTLASS on GPUs; oneDNN on CPU, which without AVX512_BF16 cuts the result off to bfloat16."""


class CpuInt4Int8Gemm(ActivationGemm):
    """INT4 weights and asymmetric per-token INT8 activations: torch's own 4-bit kernel, which the CPU engine calls."""

    name = "dyn_quant_4bit"

    def forward(
        self, x: Tensor, weight: LowBitWeight, bias: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        flat = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)  # as the activations of the engine are
        saved = tuple(t.reshape(*x.shape[:-1], -1) for t in self.quantize(flat))
        return self._engine_gemm(flat, weight, _as_bfloat16(bias)).to(x.dtype).reshape(*x.shape[:-1], -1), saved

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        codes, scale = quantize_tokens_int8_asymmetric(x)
        return codes.to(torch.int16), scale

    def _engine_gemm(self, x: Tensor, weight: LowBitWeight, bias: Tensor | None) -> Tensor:
        out_features, in_features = weight.codes.shape
        group_size = effective_group_size(weight.scheme) or in_features
        # A single group is one scale a channel also to vLLM, and then the kernel sums, scales and rounds otherwise.
        one_group = group_size == in_features
        # The kernel keeps its bias among the packed codes. With groups it gives float32 out, and the bias can be added
        # behind it.
        inside = bias.detach().float() if one_group and bias is not None else torch.empty(0)
        packed, packed_bias = weight.prepared.get("dyn_quant_4bit", (None, None))
        if packed is None or not torch.equal(packed_bias, inside):
            unsigned = weight.codes + 8
            pairs = (unsigned[:, 1::2] << 4 | unsigned[:, ::2]).to(torch.uint8)
            scale = weight.scale.float() if one_group else weight.scale
            packed = torch.ops.aten._dyn_quant_pack_4bit_weight(
                pairs, scale, inside if len(inside) else None, group_size, in_features, out_features
            )
            weight.prepared["dyn_quant_4bit"] = packed, inside
        # With groups the kernel demands float32.
        y = torch.ops.aten._dyn_quant_matmul_4bit(
            x if one_group else x.float(), packed, group_size, in_features, out_features
        )
        return (y if one_group else add_bias(y, bias)).to(torch.bfloat16)


def _engine_product(x: Tensor, weight: LowBitWeight, bias: Tensor | None) -> Tensor:
    """`(..., in)` times the weight by the engine's layer, which computes in bfloat16, in `x.dtype`."""
    from ._vllm_layer import multiply

    flat = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
    return multiply(flat, weight, _as_bfloat16(bias)).to(x.dtype).reshape(*x.shape[:-1], weight.shape[0])


def _as_bfloat16(bias: Tensor | None) -> Tensor | None:
    """The dtype in which the engine holds a bias."""
    return None if bias is None else bias.to(torch.bfloat16)
