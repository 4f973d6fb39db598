"""`QuantLinear`: a linear layer whose forward multiplies by its low-bit weight.

Invariant: the layer quantizes once per optimizer step; forward, sync and export share the result. The layer keeps the
parameters, names and `state_dict` of its `nn.Linear` (paper Sec. 3.1).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .activations import memoize_last
from .cache import LowBitCache
from .gathers import GatheredWeight, is_packed, whole_weights
from .gemm import Bias, Gemm, GemmChoice
from .quantize import LowBitWeight, largest_magnitude, quantize_weight
from .shards import quantize_own, quantize_shards


# Maps the gradient of the output `(tokens, out)`, the input `(tokens, in)` and the sources of the weight to the sources' gradients.
Chain = Callable[..., tuple[Tensor, ...]] | None


class LowBitMatmul(torch.autograd.Function):
    """
    `y = x @ Q(W)^T + b` with the straight-through estimator: `W` gets the gradient of `Q(W)` unchanged.

    `sources` get the gradients: the master weight, or LoRA's factors, whose gradients `chain` computes; a frozen weight has
    none.
    The cast of `x` to `dtype` happens here, so that layers with the same input can share it.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, b: Bias, w: LowBitWeight, gemm: Gemm, dtype: torch.dtype, chain: Chain, *sources: Tensor
    ) -> Tensor:
        ctx.input_dtype, x = x.dtype, memoize_last(Tensor.to, x, dtype)
        y, saved = gemm.forward(x, w, None if b is None else b.to(x.dtype))
        saved = saved if sources else ()  # frozen: no gradient needs the input
        ctx.weight, ctx.gemm, ctx.chain, ctx.num_saved = w, gemm, chain, len(saved)
        ctx.bias_dtype = None if b is None else b.dtype
        ctx.master_dtype = sources[0].dtype if sources else None
        # Does not save the master weight: its gradient does not need it, and it may be written to before the backward.
        ctx.save_for_backward(*saved, *(sources if chain else ()))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors  # read once: under checkpointing each read computes the forward again
        saved, sources = tensors[: ctx.num_saved], tensors[ctx.num_saved :]
        grad_x = grad_bias = None
        grads: tuple[Tensor | None, ...] = (None,) * (len(ctx.needs_input_grad) - 6)
        if ctx.needs_input_grad[0]:
            grad_x = ctx.gemm.grad_input(grad, ctx.weight).to(ctx.input_dtype)
        if ctx.needs_input_grad[1]:
            grad_bias = grad.flatten(0, -2).sum(0, dtype=ctx.bias_dtype)
        if any(ctx.needs_input_grad[6:]):
            x, rows = ctx.gemm.input_from(saved, grad.dtype).flatten(0, -2), grad.flatten(0, -2)
            if ctx.chain:
                grads = ctx.chain(rows, x, *sources)
            else:
                grads = (ctx.gemm.grad_weight(rows, x).to(ctx.master_dtype),)
        return grad_x, grad_bias, None, None, None, None, *grads


class LowBitLayer:
    """Base of the low-bit layers: scheme, low-bit weights and gemm. A copy of a layer gets a new cache and a new gemm."""

    scheme: QuantizationScheme
    gemm_for: GemmChoice  # chooses the gemm at the first forward
    # `False`: the forward runs in high precision, while sync and export still use `low_bit`. This is the paper's quantized-rollout
    # baseline.
    quantized_forward: bool
    # Layers that an engine merges with this one and that must share its global scale, if the scheme has one.
    merged_with: tuple[QuantLinear, ...]
    high_precision_class: type[Any]  # the module's class before
    low_bit_cache: LowBitCache  # by parameter; for LoRA by adapter ("": none)
    gemm: Gemm | None  # chosen in the first low-bit forward
    packed_parameters = tuple[str, ...]()  # those whose quantized values FSDP2 may gather

    @classmethod
    def convert(cls, module: Any, scheme: QuantizationScheme, gemm: GemmChoice, quantized_forward: bool) -> None:
        """Make `module` a layer of this class, in place."""
        module.high_precision_class = type(module)
        module.__class__ = cls
        module.scheme, module.gemm_for = scheme, gemm
        module.quantized_forward, module.merged_with = quantized_forward, ()
        module.low_bit_cache, module.gemm = LowBitCache(), None

    def restore(self) -> None:
        """Undo `convert`."""
        self.__class__ = self.high_precision_class
        for attribute in LowBitLayer.__annotations__:
            del self.__dict__[attribute]

    def sources(self) -> tuple[str, ...]:
        """Names, in this module, of the parameters that `low_bit` takes, in its order; none for experts."""
        return ()

    @torch.no_grad()
    def low_bit_of(self, parameter: str, weight: Tensor | None = None) -> LowBitWeight:
        """
        The low-bit weight of a parameter, or of `weight` instead (whole or a `DTensor`).

        `ValueError` if it holds NaN or infinity.
        """
        own = getattr(self, parameter)
        source = own if weight is None else weight
        if isinstance(source, GatheredWeight):  # in a forward under FSDP2
            return source.held[0]
        if is_packed(own) and isinstance(source, DTensor):  # outside a forward: this process keeps only its own rows
            rows = None
            if source.to_local().data_ptr() == own.to_local().data_ptr():
                rows = self.own_low_bit(parameter, anew=weight is not None)
            return quantize_shards(source, self.scheme, rows)
        others = tuple((layer.weight.data_ptr(), layer.weight._version) for layer in self.merged_with)
        given = None if weight is None else (weight,)
        return self.low_bit_cache.get(parameter, (own,), given, self._quantize, others)

    @torch.no_grad()
    def own_low_bit(self, parameter: str, anew: bool = False) -> LowBitWeight:
        """
        The low-bit rows of this process, for a parameter that FSDP2 shards; made once per optimizer step, or `anew`.

        Syncs and exports ask for `anew`, because a write to a shard may leave its version unchanged: a checkpoint loads through
        `weight.detach().to_local()`, which has a version of its own.
        """
        weight = getattr(self, parameter)
        own = weight.to_local()
        quantize = partial(quantize_own, scheme=self.scheme)
        others = own.data_ptr(), own._version, weight._version
        return self.low_bit_cache.get(parameter, (weight,), (weight,) if anew else None, quantize, others)

    def _quantize(self, weight: Tensor) -> LowBitWeight:
        weight, largest = weight.detach(), None
        if self.merged_with:
            weights = (weight, *(layer.weight for layer in self.merged_with))
            largest = torch.stack([largest_magnitude(w, self.scheme) for w in weights]).max()
        if isinstance(weight, DTensor):
            return quantize_shards(weight, self.scheme)
        return quantize_weight(weight.flatten(0, -2), self.scheme, largest)

    def _get_gemm(self, device: torch.device) -> Gemm:
        if self.gemm is None:
            self.gemm = self.gemm_for(self.scheme, device)
        return self.gemm

    def _multiply(
        self,
        x: Tensor,
        low_bit: Callable[[], LowBitWeight],
        gemm: Gemm,
        *sources: Tensor,
        bias: Bias = None,
        chain: Chain = None,
    ) -> Tensor:
        """`LowBitMatmul` in autocast's dtype; autocast is off inside `low_bit` and `gemm`."""
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        with torch.autocast(device, enabled=False):
            return LowBitMatmul.apply(x, bias, low_bit(), gemm, dtype, chain, *sources)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"low_bit_cache": LowBitCache(), "gemm": None}


class QuantLinear(LowBitLayer, nn.Linear):
    """`nn.Linear` after [`qarl_trl.quant.apply_quantization`]; never constructed directly."""

    packed_parameters = ("weight",)

    def sources(self) -> tuple[str, ...]:
        return ("weight",)

    def low_bit(self, weight: Tensor | None = None) -> LowBitWeight:
        """The low-bit weight of the master weight, or of `weight` `(out, in)` instead (whole or a `DTensor`)."""
        return self.low_bit_of("weight", weight)

    def forward(self, input: Tensor) -> Tensor:
        if self.quantized_forward:
            return self._multiply(input, self.low_bit, self._get_gemm(input.device), self.weight, bias=self.bias)
        with whole_weights(self):
            return super().forward(input)
