"""
The straight-through product: a forward by the low-bit weight, and gradients for its high-precision sources (paper Sec.
3.1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..gemms.activations import memoize_last
from ..gemms.gemm import Bias, Gemm
from ..quantize import LowBitWeight


# Maps the gradient of the output `(tokens, out)`, the input `(tokens, in)` and the sources of the weight to the
# gradients of the sources.
SourceGradients = Callable[..., tuple[Tensor, ...]]
# `LowBitMatmul.forward` takes so many arguments before the sources.
_BEFORE_SOURCES = 6


class LowBitMatmul(torch.autograd.Function):
    """
    `y = x Q(W)^T + b` with the straight-through estimator: the master weight gets the gradient of `Q(W)` unchanged.

    Args of `apply`:
        x: Input `(..., in)`. It is cast here, so that layers with the same input share one cast.
        bias: `(out,)` or `None`.
        weight: The low-bit weight, `(out, in)`.
        gemm: Multiplies by it, and knows what its backward needs of the input.
        dtype: Dtype of the product.
        source_gradients: For a weight made from several tensors (LoRA): computes their gradients. `None` for one
            master weight.
        sources: The tensors that get gradients: the master weight, or LoRA's factors; none for a frozen weight.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Bias,
        weight: LowBitWeight,
        gemm: Gemm,
        dtype: torch.dtype,
        source_gradients: SourceGradients | None,
        *sources: Tensor,
    ) -> Tensor:
        cast = memoize_last(Tensor.to, x, dtype)
        cast_bias = None if bias is None else bias.to(cast.dtype)
        y, saved_input = gemm.forward(cast, weight, cast_bias)

        if not sources:
            saved_input = ()  # a frozen weight needs no input in the backward
        # Not the master weight: its gradient does not need it, and it may be written to before the backward.
        saved_sources = sources if source_gradients else ()
        ctx.save_for_backward(*saved_input, *saved_sources)

        ctx.weight = weight
        ctx.gemm = gemm
        ctx.source_gradients = source_gradients
        ctx.saved_inputs = len(saved_input)
        # Gradients go back in the dtypes of what came in, which autocast may have cast.
        ctx.input_dtype = x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.source_dtype = sources[0].dtype if sources else None
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Read once: under activation checkpointing each read computes the forward again.
        tensors = ctx.saved_tensors
        saved_input = tensors[: ctx.saved_inputs]
        sources = tensors[ctx.saved_inputs :]

        needs_x, needs_bias, *_ = ctx.needs_input_grad
        needs_sources = ctx.needs_input_grad[_BEFORE_SOURCES:]
        grad_x = None
        grad_bias = None
        source_grads: tuple[Tensor | None, ...] = (None,) * len(needs_sources)
        grad_rows = grad.flatten(0, -2)

        if needs_x:
            grad_x = ctx.gemm.grad_input(grad, ctx.weight).to(ctx.input_dtype)
        if needs_bias:
            grad_bias = grad_rows.sum(0, dtype=ctx.bias_dtype)
        if any(needs_sources):
            # What was multiplied: an input that the gemm quantized gives its quantized values.
            x_rows = ctx.gemm.input_from(saved_input, grad.dtype).flatten(0, -2)
            if ctx.source_gradients:
                source_grads = ctx.source_gradients(grad_rows, x_rows, *sources)
            else:
                source_grads = (ctx.gemm.grad_weight(grad_rows, x_rows).to(ctx.source_dtype),)

        return grad_x, grad_bias, None, None, None, None, *source_grads
