"""One gemm for all experts: their matrices lie one above the other in one low-bit weight, the rows are sorted by expert.

On a CPU every form gives the bits that `Gemm.forward` gives for each expert by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatch

import torch
import torch.nn.functional as F
from torch import Tensor

from .activations import memoize_last
from .gemm import Bias, CpuInt4Int8Gemm, DequantGemm, Fp8BlockGemm, Fp8Gemm, Gemm, Int8Gemm, Saved
from .quantize import LowBitWeight


def grouped_mm(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """
    The matrix product of each expert, by the GEMM of transformers' `grouped_mm` experts; `offsets` as in `ExpertsGemm`.

    Of rows `(pairs, k)` with matrices `(experts, k, n)`: `(pairs, n)`. Of columns `(m, pairs)` with rows `(pairs, n)`, the gradient
    of the matrices: `(experts, m, n)`, zero for an expert without rows.
    """
    in_rows = b.ndim == 3
    whole = all(step == 1 or step * t.element_size() % 16 == 0 for t in (a, b) for step in t.stride())
    if not whole or not a.shape[0 if in_rows else 1]:
        # torch takes only rows of whole 16 bytes, and on a GPU at least one. Here are the same bits, but it waits for the device.
        ends = offsets.tolist()
        pieces = list(zip([0, *ends], ends, strict=False))
        if in_rows:
            return torch.cat([a[start:end] @ matrix for (start, end), matrix in zip(pieces, b, strict=True)])
        return torch.stack([a[:, start:end] @ b[start:end] for start, end in pieces])
    product = F.grouped_mm(a, b, offs=offsets)
    if in_rows:
        return product  # every row is an expert's (`experts.route`), so every row is written
    # On some GPUs garbage is left where an expert has no rows (pytorch issue 172439, B200).
    return product.masked_fill_((offsets.diff(prepend=offsets.new_zeros(1)) == 0).view(-1, 1, 1), 0)


def stacked(matrix: Tensor, offsets: Tensor) -> Tensor:
    """`(experts * rows, n)` as `(experts, rows, n)`."""
    return matrix.unflatten(0, (len(offsets), -1))


class ExpertsGemm(Gemm):
    """
    `gemm` for all experts: `y[rows of e] = x[rows of e] @ W_low_bit[e]^T` for every expert `e`, forward and backward.

    Of `x` `(pairs, in)`, sorted by expert, and a weight `(experts * out, in)`; `offsets` is the row behind each expert's last,
    int32 `(experts,)`.
    """

    def __init__(self, gemm: Gemm, offsets: Tensor) -> None:
        self.gemm, self.offsets = gemm, offsets

    def forward(self, x: Tensor, weight: LowBitWeight, bias: Bias = None) -> tuple[Tensor, Saved]:
        return grouped_gemm(self.gemm, x, weight, self.offsets)

    def input_from(self, saved: Saved, dtype: torch.dtype) -> Tensor:
        return self.gemm.input_from(saved, dtype)

    def grad_input(self, grad: Tensor, weight: LowBitWeight) -> Tensor:
        matrices = stacked(self.gemm.matrix_from(weight, grad.dtype), self.offsets)
        return grouped_mm(grad.contiguous(), matrices, self.offsets)

    def grad_weight(self, grad: Tensor, x: Tensor) -> Tensor:
        """`(experts, out, in)`."""
        return grouped_mm(grad.contiguous().t(), x, self.offsets)


def _multiply(x: Tensor, matrix: Tensor, offsets: Tensor) -> Tensor:
    """`y[rows of e] = x[rows of e] @ W[e]^T` of `x` `(pairs, in)` and a matrix `(experts * out, in)`: `(pairs, out)`."""
    return grouped_mm(x, stacked(matrix, offsets).transpose(-2, -1), offsets)


@singledispatch
def grouped_gemm(gemm: Gemm, x: Tensor, weight: LowBitWeight, offsets: Tensor) -> tuple[Tensor, Saved]:
    """The forward of [`ExpertsGemm`], by the class of the gemm: `y` `(pairs, out)` in `x.dtype`, and what `gemm.input_from` takes."""
    raise NotImplementedError(f"{type(gemm).__name__} has no gemm for experts.")


@grouped_gemm.register
def _(gemm: DequantGemm, x: Tensor, weight: LowBitWeight, offsets: Tensor) -> tuple[Tensor, Saved]:
    return _multiply(x, gemm.matrix_from(weight, x.dtype), offsets), (x,)


@grouped_gemm.register
def _(gemm: CpuInt4Int8Gemm, x: Tensor, weight: LowBitWeight, offsets: Tensor) -> tuple[Tensor, Saved]:
    # Its kernel quantizes what it multiplies, and takes one matrix.
    y = _expert_by_expert(lambda rows, part: gemm.forward(rows, part)[0], x, (x,), weight, offsets)
    return y, gemm.quantize(x.to(torch.bfloat16))


@grouped_gemm.register
def _(gemm: Fp8Gemm, x: Tensor, weight: LowBitWeight, offsets: Tensor) -> tuple[Tensor, Saved]:
    saved = quantized, scale = gemm.quantize(x)
    on_cpu = x.device.type == "cpu"
    if not on_cpu and (x.dtype != torch.bfloat16 or torch.cuda.get_device_capability(x.device)[0] not in (9, 10)):
        # torch's grouped float8 GEMM is for Hopper and B200, and gives bfloat16.
        return _expert_by_expert(lambda *args: gemm.matmul(*args, None, x.dtype), x, saved, weight, offsets), saved
    operand, w_scale = gemm.operand(weight)
    w_scale = w_scale.view(len(offsets), -1)
    if on_cpu:
        sums = _multiply(quantized.float(), operand.float(), offsets)
        return sums.mul_(scale).mul_(_of_rows(w_scale, sums, offsets)).to(x.dtype), saved
    scales = {"scale_a": scale.squeeze(-1), "scale_b": w_scale}
    options = {"offs": offsets, "out_dtype": x.dtype, "use_fast_accum": True}
    matrices = stacked(operand, offsets).transpose(-2, -1)
    return torch._scaled_grouped_mm(quantized, matrices, **scales, **options), saved


@grouped_gemm.register
def _(gemm: Fp8BlockGemm, x: Tensor, weight: LowBitWeight, offsets: Tensor) -> tuple[Tensor, Saved]:
    saved = quantized, scale = gemm.quantize(x)
    height, width = weight.scheme.weights.block_structure
    y = torch.zeros(len(x), weight.quantized.shape[0] // len(offsets), device=x.device)
    w_scale = _of_rows(stacked(weight.scale.float(), offsets), y, offsets)
    for i, (a, b) in enumerate(zip(quantized.split(width, dim=1), weight.quantized.split(width, dim=1), strict=True)):
        sums = _multiply(a.float(), b.float(), offsets) * scale[:, i : i + 1]
        y += (sums.unflatten(-1, (-1, height)) * w_scale[..., i : i + 1]).flatten(-2)
    return y.to(x.dtype), saved


@grouped_gemm.register
def _(gemm: Int8Gemm, x: Tensor, weight: LowBitWeight, offsets: Tensor) -> tuple[Tensor, Saved]:
    saved = quantized, scale = gemm.quantize(x)
    # torch has no grouped GEMM of integers. In float32 this one is exact: 1024 products of two quantized values are at most 2^24.
    parts = zip(quantized.split(1024, dim=1), weight.quantized.split(1024, dim=1), strict=True)
    sums = sum(_multiply(a.float(), b.float(), offsets).to(torch.int32) for a, b in parts).float()
    w_scale = _of_rows(weight.scale.view(len(offsets), -1), sums, offsets)
    return sums.mul_(w_scale).mul_(scale).to(x.dtype), saved


def _of_rows(of_experts: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """What belongs to the expert of each row: `of_experts` `(experts, ...)` as `(rows, ...)`."""
    return of_experts[memoize_last(_experts_of, offsets, len(rows))]


def _experts_of(offsets: Tensor, rows: int) -> Tensor:
    """The expert of each row, int64 `(rows,)`."""
    row = torch.arange(rows, dtype=offsets.dtype, device=offsets.device)
    return torch.bucketize(row, offsets, right=True)


def _expert_by_expert(
    multiply_one: Callable[..., Tensor], x: Tensor, inputs: Saved, weight: LowBitWeight, offsets: Tensor
) -> Tensor:
    """`multiply_one(rows of each input, weight)` of every expert that has rows; waits for the device to know which."""
    rows = weight.shape[0] // len(offsets)
    if "experts" not in weight.prepared:
        weight.prepared["experts"] = weight.split(rows)
    start, outputs = 0, []
    for end, part in zip(offsets.tolist(), weight.prepared["experts"], strict=True):
        if end > start:
            outputs.append(multiply_one(*(tensor[start:end] for tensor in inputs), part))
        start = end
    return torch.cat(outputs) if outputs else x.new_zeros((0, rows))
