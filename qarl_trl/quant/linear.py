"""`QuantLinear`: a linear layer whose forward multiplies by its low-bit weight.

Invariant: the low-bit tensors are computed once per optimizer step and shared by the forward, the sync and the
export; the layer has exactly the parameters, names and `state_dict` of the `nn.Linear` it was (paper Sec. 3.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .activations import memoize_last
from .cache import LowBitCache
from .gathers import gathered_quantized, whole_weights
from .gemm import Product, ProductChoice
from .quantize import LowBitWeight, largest_magnitude, quantize_weight
from .reference import QParams
from .scheme import effective_group_size, support_of
from .shards import quantize_shards
from .zero import is_partitioned


# Scale and zero point.


class LowBitMatmul(torch.autograd.Function):
    """
    `y = x @ Q(W)^T + b` with the straight-through estimator: the gradient of `Q(W)` is given to `W` unchanged.

    `x` is cast to `dtype` in here, where layers with the same input can share the cast.
    """

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        master: Tensor,
        bias: Tensor | None,
        weight: LowBitWeight,
        gemm: Product,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.input_dtype, x = x.dtype, memoize_last(Tensor.to, x, dtype)
        y, saved = gemm.forward(x, weight, None if bias is None else bias.to(x.dtype))
        ctx.weight, ctx.gemm, ctx.master_dtype = weight, gemm, master.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(*saved)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x = grad_master = grad_bias = None
        if ctx.needs_input_grad[0]:
            # Dequantized again: a matrix kept for each layer would be a second copy of the model.
            grad_x = (grad @ ctx.gemm.matrix_from(ctx.weight, grad.dtype)).to(ctx.input_dtype)
        if ctx.needs_input_grad[1]:
            x = ctx.gemm.input_from(ctx.saved_tensors, grad.dtype)
            grad_master = (grad.flatten(0, -2).t() @ x.flatten(0, -2)).to(ctx.master_dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.flatten(0, -2).sum(0, dtype=ctx.bias_dtype)
        return grad_x, grad_master, grad_bias, None, None, None


class LowBitLayer:
    """
    What every low-bit layer shares: its scheme, its quantized values and its product.

    Attributes:
        scheme (`QuantizationScheme`): The scheme of the low-bit weight.
        gemm_for (`ProductChoice`): Chooses the product that multiplies, at the first forward.
        quantized_forward (`bool`): `False` leaves the forward in high precision while `low_bit` still serves the
            sync and the export: the quantized-rollout baseline of the paper.
        frozen_qparams (`dict[str, QParams]`): Scale and zero point that a weight keeps, by parameter; empty where they
            follow the weight. No parameters and no buffers, so that the `state_dict` stays what it was.
        merged_with (`tuple[LowBitLayer, ...]`): The other layers that an engine merges with this one, where the scheme
            has a global scale that they must share.
        high_precision_class (`type`): The class that the module had.
        packed_parameters (`tuple[str, ...]`): Those of which FSDP2 may gather quantized values.
    """

    scheme: QuantizationScheme
    gemm_for: ProductChoice
    quantized_forward: bool
    frozen_qparams: dict[str, QParams]
    merged_with: tuple[LowBitLayer, ...]
    high_precision_class: type[nn.Module]
    packed_parameters = ()

    @classmethod
    def convert(
        cls,
        module: nn.Module,
        scheme: QuantizationScheme,
        gemm: ProductChoice,
        quantized_forward: bool,
        qparams: Mapping[str, QParams],
    ) -> None:
        """Make `module` a layer of this class, in place."""
        module.high_precision_class = type(module)
        module.__class__ = cls
        module.scheme, module.gemm_for = scheme, gemm
        module.quantized_forward, module.frozen_qparams, module.merged_with = quantized_forward, dict(qparams), ()

    def restore(self) -> None:
        """Undo `convert`."""
        self.__class__ = self.high_precision_class
        for attribute in (*LowBitLayer.__annotations__, "_quantized", "_gemm"):
            self.__dict__.pop(attribute, None)

    def sources(self) -> tuple[str, ...]:
        """Names, below this module, of the parameters that `low_bit` takes, in its order."""
        raise NotImplementedError

    def low_bit(self, *sources: Tensor | None) -> LowBitWeight:
        """The layer's low-bit weight, from the [`~qarl_trl.quant.cache.CodeCache`] while that is valid."""
        raise NotImplementedError

    def _quantize(self, weight: Tensor, parameter: str = "weight") -> LowBitWeight:
        weight = weight.detach()
        qparams, largest = self.qparams_of(parameter, weight.device), None
        if self.merged_with:
            weights = (weight, *(layer.weight for layer in self.merged_with))
            if any(isinstance(w, DTensor) or is_partitioned(w) for w in weights):
                raise ValueError(
                    "A scheme with a global scale (NVFP4A16) needs the merged layers (q, k, v; gate, up) whole at once, and "
                    "FSDP or ZeRO-3 has cut them. Use DDP, or a scheme without a global scale."
                )
            largest = torch.stack([largest_magnitude(w, self.scheme) for w in weights]).max()
        if isinstance(weight, DTensor):
            return quantize_shards(weight, self.scheme, qparams)
        return quantize_weight(weight.flatten(0, -2), self.scheme, qparams, largest)

    def qparams_of(self, parameter: str, device: torch.device) -> QParams | None:
        """The `frozen_qparams` of a parameter, on `device` from then on."""
        qparams = self.frozen_qparams.get(parameter)
        if qparams is not None and qparams[0].device != device:
            qparams = self.frozen_qparams[parameter] = tuple(t if t is None else t.to(device) for t in qparams)
        return qparams

    @property
    def has_run(self) -> bool:
        """Whether the low-bit forward was used since quantization."""
        return "_gemm" in self.__dict__

    @property
    def last_low_bit(self) -> LowBitWeight:
        """What `low_bit` returned last, without looking at the master."""
        return self._low_bit_cache.last()[self._slot]

    def forget(self) -> None:
        """Free the quantized values; the next use quantizes again."""
        self._low_bit_cache.clear()

    @property
    def _slot(self) -> str:
        """Which of several weights the layer computes with: an adapter's name, or "" for the master itself."""
        return ""

    @property
    def _low_bit_cache(self) -> LowBitCache:
        return self.__dict__.setdefault("_quantized", LowBitCache())

    def _compute_dtype(self, input: Tensor) -> torch.dtype:
        """What autocast would cast `input` to, where it is on."""
        device_type = input.device.type
        return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else input.dtype

    def _compute_input(self, input: Tensor) -> Tensor:
        return input.to(self._compute_dtype(input))

    def _get_gemm(self, device: torch.device) -> Product:
        if not self.has_run:
            self._gemm = self.gemm_for(self.scheme, device)
        return self._gemm

    def extra_repr(self) -> str:
        group_size = effective_group_size(self.scheme)
        parts = [
            super().extra_repr(),
            f"scheme={support_of(self.scheme).name}",
            f"group_size={group_size}" if group_size else "",
            f"forward={'low bit' if self.quantized_forward else 'high precision'}",
        ]
        return ", ".join(filter(None, parts))

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in super().__getstate__().items() if k not in ("_quantized", "_gemm")}


class QuantLinear(LowBitLayer, nn.Linear):
    """`nn.Linear` after [`qarl_trl.quant.apply_quantization`]; never constructed directly."""

    packed_parameters = ("weight",)

    def sources(self) -> tuple[str, ...]:
        """The master weight."""
        return ("weight",)

    def low_bit(self, weight: Tensor | None = None) -> LowBitWeight:
        """
        The layer's low-bit weight.

        Args:
            weight (`Tensor`, *optional*): The master weight `(out, in)` to read instead of `self.weight`, whole or a `DTensor`.
        """
        if (low_bit := gathered_quantized(self, "weight", weight)) is not None:
            return low_bit
        others = tuple((layer.weight.data_ptr(), layer.weight._version) for layer in self.merged_with)
        gathered = None if weight is None else (weight,)
        return self._low_bit_cache.get(self._slot, (self.weight,), gathered, self._quantize, others)

    def forward(self, input: Tensor) -> Tensor:
        if not self.quantized_forward:
            with whole_weights(self):
                return super().forward(input)
        dtype, gemm = self._compute_dtype(input), self._get_gemm(input.device)
        with torch.autocast(input.device.type, enabled=False):
            return LowBitMatmul.apply(input, self.weight, self.bias, self.low_bit(), gemm, dtype)
