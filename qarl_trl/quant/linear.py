"""`QuantLinear`: a linear layer whose forward multiplies by its low-bit weight.

Invariant: the low-bit tensors are computed once per optimizer step and shared by the forward, the publish and the
export; the layer has exactly the parameters, names and `state_dict` of the `nn.Linear` it was (paper Sec. 3.1).
"""

from __future__ import annotations

from itertools import count
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from .kernels import Kernel, dequantize, select_kernel
from .quantize import LowBitWeight, quantize_weight


_optimizer_steps = count(1)
_generation = 0


def _on_optimizer_step(*_: Any) -> None:
    global _generation
    _generation = next(_optimizer_steps)


# Fused and sharded optimizers write through aliases whose version counters the parameter does not share, so a changed
# weight cannot be told from its own counter alone: every optimizer step in the process ends the life of all codes.
register_optimizer_step_post_hook(_on_optimizer_step)


class LowBitMatmul(torch.autograd.Function):
    """`y = x @ Q(W)^T` with the straight-through estimator: the gradient of `Q(W)` is given to `W` unchanged."""

    @staticmethod
    def forward(ctx, x: Tensor, master: Tensor, weight: LowBitWeight, kernel: Kernel) -> Tensor:
        y, saved = kernel.forward(x, weight)
        ctx.weight, ctx.kernel, ctx.master_dtype = weight, kernel, master.dtype
        ctx.save_for_backward(*saved)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_x = grad_master = None
        if ctx.needs_input_grad[0]:
            # Dequantized again rather than kept: a saved matrix per layer would be a second copy of the model.
            grad_x = grad @ dequantize(ctx.weight, grad.dtype)
        if ctx.needs_input_grad[1]:
            x = ctx.kernel.input_from(ctx.saved_tensors, grad.dtype)
            grad_master = (grad.flatten(0, -2).t() @ x.flatten(0, -2)).to(ctx.master_dtype)
        return grad_x, grad_master, None, None


class QuantLinear(nn.Linear):
    """
    `nn.Linear` after [`qarl_trl.quant.apply_quantization`]; never constructed directly.

    Attributes:
        scheme (`QuantizationScheme`): The scheme of the low-bit weight.
        kernel_choice (`str`): Which kernel multiplies, see [`~qarl_trl.quant.kernels.select_kernel`].
        quantized_forward (`bool`): `False` leaves the forward in high precision while `low_bit` still serves the
            publish and the export: the quantized-rollout baseline of the paper.
        frozen_qparams (`tuple[Tensor, Tensor | None]` or `None`): Scale and zero point that the weight keeps. No
            parameter and no buffer, so that the `state_dict` stays that of the `nn.Linear`.
    """

    scheme: QuantizationScheme
    kernel_choice: str
    quantized_forward: bool
    frozen_qparams: tuple[Tensor, Tensor | None] | None = None

    def low_bit(self, weight: Tensor | None = None) -> LowBitWeight:
        """
        The layer's low-bit weight, quantized when the master has changed since the last call.

        Args:
            weight (`Tensor`, *optional*): The full master weight `(out, in)` where `self.weight` is a shard of it.
        """
        if weight is not None and not _is_alias(weight, self.weight):
            self.__dict__["_sharded"] = True
        if self.__dict__.get("_sharded"):
            # Storage and version belong to a gathered copy; the step count alone tells old from new.
            key = (_generation,)
        else:
            key = (_generation, self.weight.data_ptr(), self.weight._version)
        cached = self.__dict__.get("_cached")
        # A gathered master is always quantized anew: it may have been loaded without an optimizer step.
        gathered = weight is not None and self.__dict__.get("_sharded", False)
        if cached is None or cached[0] != key or gathered:
            cached = (key, self._quantize(self.weight if weight is None else weight))
            self.__dict__["_cached"] = cached
        return cached[1]

    def _quantize(self, weight: Tensor) -> LowBitWeight:
        qparams = self.frozen_qparams
        if qparams is not None and qparams[0].device != weight.device:
            qparams = self.frozen_qparams = tuple(t if t is None else t.to(weight.device) for t in qparams)
        return quantize_weight(weight, self.scheme, qparams)

    @property
    def has_run(self) -> bool:
        """Whether the low-bit forward was used since quantization."""
        return "_kernel" in self.__dict__

    @property
    def last_low_bit(self) -> LowBitWeight:
        """What `low_bit` returned last, without looking at the master."""
        return self.__dict__["_cached"][1]

    def forward(self, input: Tensor) -> Tensor:
        if not self.quantized_forward:
            return super().forward(input)
        device_type = input.device.type
        if torch.is_autocast_enabled(device_type):
            input = input.to(torch.get_autocast_dtype(device_type))
        kernel = self.__dict__.get("_kernel")
        if kernel is None:
            kernel = self.__dict__["_kernel"] = select_kernel(self.scheme, input.device, self.kernel_choice)
        with torch.autocast(device_type, enabled=False):
            y = LowBitMatmul.apply(input, self.weight, self.low_bit(), kernel)
            return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        forward = self.kernel_choice if self.quantized_forward else "high precision"
        return f"{super().extra_repr()}, scheme={self.scheme.weights.num_bits}-bit, forward={forward}"

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in super().__getstate__().items() if k not in ("_cached", "_sharded", "_kernel")}


def _is_alias(a: Tensor, b: Tensor) -> bool:
    """Whether `a` is the whole of `b` under another name, such as `b.data`."""
    return not isinstance(b, DTensor) and a.shape == b.shape and a.data_ptr() == b.data_ptr()
