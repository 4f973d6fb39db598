"""`QuantLinear`: a linear layer whose forward multiplies by its low-bit weight.

Invariant: the low-bit tensors are computed once per optimizer step and shared by the forward, the sync and the
export; the layer has exactly the parameters, names and `state_dict` of the `nn.Linear` it was (paper Sec. 3.1).
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


# From the gradient of the output `(tokens, out)`, the input `(tokens, in)` and the sources of the weight to their gradients.
Chain = Callable[..., tuple[Tensor, ...]] | None


class LowBitMatmul(torch.autograd.Function):
    """
    `y = x @ Q(W)^T + b` with the straight-through estimator: the gradient of `Q(W)` is given to `W` unchanged.

    `sources` are what `W` is made of: the master weight alone, or with a `chain` what that gives gradients to (LoRA's factors);
    none of a frozen weight.
    `x` is cast to `dtype` in here, where layers with the same input can share the cast.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, b: Bias, w: LowBitWeight, gemm: Gemm, dtype: torch.dtype, chain: Chain, *sources: Tensor
    ) -> Tensor:
        ctx.input_dtype, x = x.dtype, memoize_last(Tensor.to, x, dtype)
        y, saved = gemm.forward(x, w, None if b is None else b.to(x.dtype))
        saved = saved if sources else ()  # frozen: no gradient wants the input
        ctx.weight, ctx.gemm, ctx.chain, ctx.num_saved = w, gemm, chain, len(saved)
        ctx.bias_dtype = None if b is None else b.dtype
        ctx.master_dtype = sources[0].dtype if sources else None
        # The master weight is not saved: its gradient does not need it, and it may be written to before the backward.
        ctx.save_for_backward(*saved, *(sources if chain else ()))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors  # asked for once: under checkpointing each time would compute the forward again
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
    """What every low-bit layer shares: its scheme, its low-bit weights and its gemm. A copy gets a new cache and a new gemm."""

    scheme: QuantizationScheme
    gemm_for: GemmChoice  # chooses the gemm at the first forward
    # `False` leaves the forward in high precision while `low_bit` still serves the sync and the export: the quantized-rollout
    # baseline of the paper.
    quantized_forward: bool
    # The other layers that an engine merges with this one, where the scheme has a global scale that they must share.
    merged_with: tuple[QuantLinear, ...]
    high_precision_class: type[Any]  # that the module had
    low_bit_cache: LowBitCache  # by parameter, of LoRA by adapter ("": none)
    gemm: Gemm | None  # chosen in the first low-bit forward
    packed_parameters = tuple[str, ...]()  # of which FSDP2 may gather quantized values

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
        """Names, below this module, of the parameters that `low_bit` makes one weight of, in its order; none of experts."""
        return ()

    @torch.no_grad()
    def low_bit_of(self, parameter: str, weight: Tensor | None = None) -> LowBitWeight:
        """
        The low-bit weight of one of its parameters, or of `weight` in the place of that, whole or a `DTensor`.

        `ValueError` when it holds NaN or infinity.
        """
        own = getattr(self, parameter)
        source = own if weight is None else weight
        if isinstance(source, GatheredWeight):  # in a forward under FSDP2
            return source.held[0]
        if is_packed(own) and isinstance(source, DTensor):  # outside of one: only this process's rows are kept
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
        The low-bit rows of this process, of a parameter that FSDP2 has cut; made once per optimizer step, or `anew`.

        `anew` for what leaves the learner, since not every write to a shard moves a version: `weight.detach().to_local()` has
        its own, and a checkpoint is loaded through it.
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
        """`LowBitMatmul` in the dtype that autocast asks for; what autocast would cast in `low_bit` and `gemm` it leaves alone."""
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
        """The low-bit weight of the master weight, or of `weight` `(out, in)` in its place, whole or a `DTensor`."""
        return self.low_bit_of("weight", weight)

    def forward(self, input: Tensor) -> Tensor:
        if self.quantized_forward:
            return self._multiply(input, self.low_bit, self._get_gemm(input.device), self.weight, bias=self.bias)
        with whole_weights(self):
            return super().forward(input)
