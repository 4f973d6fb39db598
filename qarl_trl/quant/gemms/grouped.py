"""The gemm of all experts: one low-bit weight stacks their matrices, and the rows are sorted by expert.

Dequantized weights use one grouped GEMM, as does float8 on GPUs that support it; other schemes run one expert after
the other. On a CPU the result equals, bit for bit, `Gemm.forward` of each expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..quantize import LowBitWeight
from .gemm import ActivationGemm, Bias, DequantGemm, Fp8Gemm, Gemm, Saved


# Matrix products of all experts --------------------------------------------------------------------------------------


def grouped_mm(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """
    The matrix product of each expert, by the GEMM of transformers' `grouped_mm` experts.

    Args:
        a: Rows `(pairs, k)`, sorted by expert, or columns `(m, pairs)`.
        b: For rows the matrices `(experts, k, n)`; for columns the rows `(pairs, n)`.
        offsets: The end of each expert's rows or columns, int32 `(experts,)`.

    Returns:
        For rows `(pairs, n)`. For columns the gradient of the matrices, `(experts, m, n)`, zero for an expert without
        rows.
    """
    rows_times_matrices = b.ndim == 3
    pairs = a.shape[0] if rows_times_matrices else a.shape[1]
    # torch needs rows of multiples of 16 bytes, and on a GPU at least one.
    if pairs == 0 or not _is_aligned(a) or not _is_aligned(b):
        return _mm_one_by_one(a, b, offsets)

    product = F.grouped_mm(a, b, offs=offsets)
    if rows_times_matrices:
        return product  # every row belongs to an expert (`experts.route`), so every row is written

    # On some GPUs the result of an expert without rows is garbage (pytorch issue 172439, B200).
    counts = offsets.diff(prepend=offsets.new_zeros(1))
    return product.masked_fill_((counts == 0).view(-1, 1, 1), 0)


def _is_aligned(matrix: Tensor) -> bool:
    """Whether every row (or matrix) begins at a multiple of 16 bytes from the first one."""
    return all(step == 1 or step * matrix.element_size() % 16 == 0 for step in matrix.stride())


def _mm_one_by_one(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """The product of [`grouped_mm`], the same bits, by one gemm after the other; waits for the device."""
    ends = offsets.tolist()
    starts = [0, *ends[:-1]]
    pieces = [slice(start, end) for start, end in zip(starts, ends, strict=True)]

    if b.ndim == 3:
        return torch.cat([a[rows] @ matrix for rows, matrix in zip(pieces, b, strict=True)])
    return torch.stack([a[:, columns] @ b[columns] for columns in pieces])


def stacked(matrix: Tensor, offsets: Tensor) -> Tensor:
    """View `(experts * rows, n)` as `(experts, rows, n)`."""
    return matrix.unflatten(0, (len(offsets), -1))


# The low-bit gemm ----------------------------------------------------------------------------------------------------


class ExpertsGemm(Gemm):
    """
    A gemm for all experts: `y[rows of e] = x[rows of e] @ W_low_bit[e]^T` for every expert `e`, forward and backward.

    `x` is `(pairs, in)`, sorted by expert, the weight `(experts * out, in)`.

    Args:
        gemm: The gemm of one expert.
        offsets: The end of each expert's rows, int32 `(experts,)`.
    """

    def __init__(self, gemm: Gemm, offsets: Tensor) -> None:
        self.gemm = gemm
        self.offsets = offsets

    def forward(self, x: Tensor, weight: LowBitWeight, bias: Bias = None) -> tuple[Tensor, Saved]:
        if isinstance(self.gemm, DequantGemm):
            matrices = stacked(self.gemm.matrix_from(weight, x.dtype), self.offsets)
            return grouped_mm(x, matrices.transpose(-2, -1), self.offsets), (x,)

        if not isinstance(self.gemm, ActivationGemm):
            raise NotImplementedError(f"{type(self.gemm).__name__} has no gemm for experts. Use quant_kernel='auto'.")

        saved = self.gemm.save(x)
        if isinstance(self.gemm, Fp8Gemm) and _has_grouped_float8(x):
            return self._grouped_float8(self.gemm, saved, weight, x.dtype), saved
        return self._expert_by_expert(self.gemm, x, saved, weight), saved

    def input_from(self, saved: Saved, dtype: torch.dtype) -> Tensor:
        return self.gemm.input_from(saved, dtype)

    def grad_input(self, grad: Tensor, weight: LowBitWeight) -> Tensor:
        matrices = stacked(self.gemm.matrix_from(weight, grad.dtype), self.offsets)
        # Autograd may hand over a transposed or expanded gradient, whose strides torch refuses.
        return grouped_mm(grad.contiguous(), matrices, self.offsets)

    def grad_weight(self, grad: Tensor, x: Tensor) -> Tensor:
        """The gradient of the weight, `(experts, out, in)`."""
        return grouped_mm(grad.contiguous().t(), x, self.offsets)

    def _grouped_float8(self, gemm: Fp8Gemm, saved: Saved, weight: LowBitWeight, dtype: torch.dtype) -> Tensor:
        """One grouped float8 GEMM for all experts."""
        quantized, scale = saved
        operand, operand_scale = gemm.operand(weight)
        matrices = stacked(operand, self.offsets).transpose(-2, -1)

        return torch._scaled_grouped_mm(
            quantized,
            matrices,
            scale_a=scale.squeeze(-1),
            scale_b=operand_scale.view(len(self.offsets), -1),
            offs=self.offsets,
            out_dtype=dtype,
            use_fast_accum=True,
        )

    def _expert_by_expert(self, gemm: ActivationGemm, x: Tensor, saved: Saved, weight: LowBitWeight) -> Tensor:
        """The gemm of each expert that has rows; waits for the device to find them."""
        out_features = weight.shape[0] // len(self.offsets)
        if "experts" not in weight.prepared:  # kept, because a kernel stores its own form of each expert in it
            weight.prepared["experts"] = weight.split(out_features)

        outputs = [x.new_zeros((0, out_features))]  # a call without any rows has a result too
        start = 0
        for end, expert in zip(self.offsets.tolist(), weight.prepared["experts"], strict=True):
            if end > start:
                # Copies, because a kernel may want scales that begin at a multiple of 16 bytes.
                quantized_rows = tuple(tensor[start:end].clone() for tensor in saved)
                outputs.append(gemm.multiply(x[start:end], quantized_rows, expert))
            start = end
        return torch.cat(outputs)


def _has_grouped_float8(x: Tensor) -> bool:
    """Whether torch has a grouped float8 GEMM for an input: it is for Hopper and B200, and gives bfloat16."""
    if x.device.type == "cpu" or x.dtype != torch.bfloat16:
        return False
    major, _ = torch.cuda.get_device_capability(x.device)
    return major in (9, 10)
