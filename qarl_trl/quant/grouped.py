"""The gemm of all experts: one low-bit weight stacks their matrices, and the rows are sorted by expert.

Dequantized weights use one grouped GEMM, as does float8 on GPUs that support it; other schemes run one expert after the other. On
a CPU the result equals, bit for bit, `Gemm.forward` of each expert.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .gemm import ActivationGemm, Bias, CpuInt4Int8Gemm, DequantGemm, Fp8Gemm, Gemm, Saved
from .quantize import LowBitWeight


def grouped_mm(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """
    The matrix product of each expert, by the GEMM of transformers' `grouped_mm` experts; `offsets` as in `ExpertsGemm`.

    Rows `(pairs, k)` times matrices `(experts, k, n)` give `(pairs, n)`. Columns `(m, pairs)` times rows `(pairs, n)` give the
    gradient of the matrices, `(experts, m, n)`, zero for an expert without rows.
    """
    in_rows = b.ndim == 3
    whole = all(step == 1 or step * t.element_size() % 16 == 0 for t in (a, b) for step in t.stride())
    if not whole or not a.shape[0 if in_rows else 1]:
        # torch needs rows of multiples of 16 bytes, and on a GPU at least one. This gives the same bits, but waits for the device.
        ends = offsets.tolist()
        pieces = list(zip([0, *ends], ends, strict=False))
        if in_rows:
            return torch.cat([a[start:end] @ matrix for (start, end), matrix in zip(pieces, b, strict=True)])
        return torch.stack([a[:, start:end] @ b[start:end] for start, end in pieces])
    product = F.grouped_mm(a, b, offs=offsets)
    if in_rows:
        return product  # every row belongs to an expert (`experts.route`), so every row is written
    # On some GPUs the result of an expert without rows is garbage (pytorch issue 172439, B200).
    return product.masked_fill_((offsets.diff(prepend=offsets.new_zeros(1)) == 0).view(-1, 1, 1), 0)


def stacked(matrix: Tensor, offsets: Tensor) -> Tensor:
    """View `(experts * rows, n)` as `(experts, rows, n)`."""
    return matrix.unflatten(0, (len(offsets), -1))


class ExpertsGemm(Gemm):
    """
    `gemm` for all experts: `y[rows of e] = x[rows of e] @ W_low_bit[e]^T` for every expert `e`, forward and backward.

    `x` is `(pairs, in)`, sorted by expert, the weight `(experts * out, in)`; `offsets`, int32 `(experts,)`, is the end of each expert's rows.
    """

    def __init__(self, gemm: Gemm, offsets: Tensor) -> None:
        self.gemm, self.offsets = gemm, offsets

    def forward(self, x: Tensor, weight: LowBitWeight, bias: Bias = None) -> tuple[Tensor, Saved]:
        if isinstance(self.gemm, DequantGemm):
            matrices = stacked(self.gemm.matrix_from(weight, x.dtype), self.offsets)
            return grouped_mm(x, matrices.transpose(-2, -1), self.offsets), (x,)
        if not isinstance(self.gemm, ActivationGemm):
            raise NotImplementedError(f"{type(self.gemm).__name__} has no gemm for experts. Use quant_kernel='auto'.")
        # torch's 4-bit kernel quantizes the bfloat16 cast of its input.
        saved = self.gemm.quantize(x.to(torch.bfloat16) if isinstance(self.gemm, CpuInt4Int8Gemm) else x)
        # torch's grouped float8 GEMM is for Hopper and B200, and gives bfloat16.
        on_gpu = x.device.type != "cpu" and x.dtype == torch.bfloat16
        if isinstance(self.gemm, Fp8Gemm) and on_gpu and torch.cuda.get_device_capability(x.device)[0] in (9, 10):
            return self._float8(self.gemm, *saved, weight, x.dtype), saved
        return self._expert_by_expert(x, weight), saved

    def input_from(self, saved: Saved, dtype: torch.dtype) -> Tensor:
        return self.gemm.input_from(saved, dtype)

    def grad_input(self, grad: Tensor, weight: LowBitWeight) -> Tensor:
        matrices = stacked(self.gemm.matrix_from(weight, grad.dtype), self.offsets)
        return grouped_mm(grad.contiguous(), matrices, self.offsets)

    def grad_weight(self, grad: Tensor, x: Tensor) -> Tensor:
        """`(experts, out, in)`."""
        return grouped_mm(grad.contiguous().t(), x, self.offsets)

    def _float8(self, gemm: Fp8Gemm, x: Tensor, scale: Tensor, weight: LowBitWeight, dtype: torch.dtype) -> Tensor:
        operand, w_scale = gemm.operand(weight)
        matrices, w_scale = stacked(operand, self.offsets).transpose(-2, -1), w_scale.view(len(self.offsets), -1)
        multiply = partial(torch._scaled_grouped_mm, offs=self.offsets, out_dtype=dtype, use_fast_accum=True)
        return multiply(x, matrices, scale_a=scale.squeeze(-1), scale_b=w_scale)

    def _expert_by_expert(self, x: Tensor, weight: LowBitWeight) -> Tensor:
        """The gemm of each expert that has rows; waits for the device to find them."""
        rows = weight.shape[0] // len(self.offsets)
        if "experts" not in weight.prepared:  # kept, because a kernel stores its own form of each expert in it
            weight.prepared["experts"] = weight.split(rows)
        start, outputs = 0, [x.new_zeros((0, rows))]
        for end, part in zip(self.offsets.tolist(), weight.prepared["experts"], strict=True):
            if end > start:
                outputs.append(self.gemm.forward(x[start:end], part)[0])
            start = end
        return torch.cat(outputs)
