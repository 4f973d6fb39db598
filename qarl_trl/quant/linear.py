"""`QuantLinear`: a linear layer whose forward multiplies by its low-bit weight.

Invariant: the low-bit tensors are computed once per optimizer step and shared by the forward, the publish and the
export; the layer has exactly the parameters, names and `state_dict` of the `nn.Linear` it was (paper Sec. 3.1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from .kernel_choice import select_kernel
from .products import Kernel
from .quantize import LowBitWeight, largest_magnitude, quantize_weight
from .scheme import effective_group_size, support_of


_optimizer_steps = count(1)
_generation = 0


def _on_optimizer_step(*_: Any) -> None:
    global _generation
    _generation = next(_optimizer_steps)


# Fused and sharded optimizers write through aliases whose version counters the parameter does not share, so a changed
# weight cannot be told from its own counter alone: every optimizer step in the process ends the life of all codes.
register_optimizer_step_post_hook(_on_optimizer_step)


class LowBitMatmul(torch.autograd.Function):
    """`y = x @ Q(W)^T + b` with the straight-through estimator: the gradient of `Q(W)` is given to `W` unchanged."""

    @staticmethod
    def forward(ctx, x: Tensor, master: Tensor, bias: Tensor | None, weight: LowBitWeight, kernel: Kernel) -> Tensor:
        y, saved = kernel.forward(x, weight, None if bias is None else bias.to(x.dtype))
        ctx.weight, ctx.kernel, ctx.master_dtype = weight, kernel, master.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(*saved)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        grad_x = grad_master = grad_bias = None
        if ctx.needs_input_grad[0]:
            # Dequantized again rather than kept: a saved matrix per layer would be a second copy of the model.
            grad_x = grad @ ctx.kernel.matrix_from(ctx.weight, grad.dtype)
        if ctx.needs_input_grad[1]:
            x = ctx.kernel.input_from(ctx.saved_tensors, grad.dtype)
            grad_master = (grad.flatten(0, -2).t() @ x.flatten(0, -2)).to(ctx.master_dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.flatten(0, -2).sum(0, dtype=ctx.bias_dtype)
        return grad_x, grad_master, grad_bias, None, None


class LowBitLayer:
    """
    What every low-bit layer shares: its scheme, its codes for as long as they are valid, and its kernel.

    Attributes:
        scheme (`QuantizationScheme`): The scheme of the low-bit weight.
        kernel_choice (`str`): Which kernel multiplies, see [`~qarl_trl.quant.kernel_choice.select_kernel`].
        quantized_forward (`bool`): `False` leaves the forward in high precision while `low_bit` still serves the
            publish and the export: the quantized-rollout baseline of the paper.
        frozen_qparams (`tuple[Tensor, Tensor | None]` or `None`): Scale and zero point that the weight keeps. No
            parameter and no buffer, so that the `state_dict` stays that of the `nn.Linear`.
        fused (`tuple[LowBitLayer, ...]`): The other layers that an engine merges with this one, where the scheme has a
            global scale that they must share.
    """

    scheme: QuantizationScheme
    kernel_choice: str
    quantized_forward: bool
    frozen_qparams: tuple[Tensor, Tensor | None] | None = None
    fused: tuple[LowBitLayer, ...] = ()

    def sources(self) -> tuple[str, ...]:
        """Names, below this module, of the parameters that `low_bit` takes whole, in its order."""
        raise NotImplementedError

    def low_bit(self, *sources: Tensor | None) -> LowBitWeight:
        """The layer's low-bit weight, quantized when one of its sources has changed since the last call."""
        raise NotImplementedError

    def _quantize(self, weight: Tensor) -> LowBitWeight:
        qparams = self.frozen_qparams
        if qparams is not None and qparams[0].device != weight.device:
            qparams = self.frozen_qparams = tuple(t if t is None else t.to(weight.device) for t in qparams)
        largest = None
        if self.fused:
            weights = (weight, *(layer.weight for layer in self.fused))
            if any(isinstance(w, DTensor) for w in weights):
                raise ValueError(
                    "A scheme with a global scale (NVFP4A16) needs the merged layers (q, k, v; gate, up) whole at once, and "
                    "FSDP has cut them. Use DDP, or a scheme without a global scale."
                )
            largest = torch.stack([largest_magnitude(w, self.scheme) for w in weights]).max()
        return quantize_weight(weight, self.scheme, qparams, largest)

    @property
    def has_run(self) -> bool:
        """Whether the low-bit forward was used since quantization."""
        return "_kernel" in self.__dict__

    @property
    def last_low_bit(self) -> LowBitWeight:
        """What `low_bit` returned last, without looking at the master."""
        return self._cached_slots[self._slot][1]

    def forget(self) -> None:
        """Free the codes; the next use quantizes again."""
        self._cached_slots.clear()

    @property
    def _slot(self) -> str:
        """Which of several weights the layer computes with: an adapter's name, or "" for the master itself."""
        return ""

    @property
    def _cached_slots(self) -> dict[str, tuple[tuple, LowBitWeight]]:
        return self.__dict__.setdefault("_cached", {})

    def _cached_low_bit(
        self,
        own: Sequence[Tensor],
        whole: Sequence[Tensor] | None,
        quantize: Callable[..., LowBitWeight],
        constants: tuple = (),
        slot: str | None = None,
    ) -> Any:
        """
        `quantize(*sources)` or what it gave last, if neither the sources nor `constants` have changed since.

        Args:
            own (`Sequence[Tensor]`): The layer's parameters as they are now.
            whole (`Sequence[Tensor]`, *optional*): The same in full, where `own` are shards.
            quantize (`Callable[..., LowBitWeight]`): The producer.
            constants (`tuple`, *optional*): What else the result depends on.
            slot (`str`, *optional*): Where to keep the result; by default that of the active adapter.
        """
        slot = self._slot if slot is None else slot
        if whole is not None and not all(map(_is_alias, whole, own)):
            self.__dict__["_sharded"] = True
        sharded = self.__dict__.get("_sharded", False)
        # No optimizer touches a frozen weight, so its codes outlive the steps of the others.
        step = _generation if any(tensor.requires_grad for tensor in own) else None
        # Storage and version of a shard belong to a gathered copy; the step count alone tells old from new.
        identity = () if sharded else tuple((tensor.data_ptr(), tensor._version) for tensor in own)
        key = (step, constants, identity)
        cached = self._cached_slots.get(slot)
        # A gathered master is always quantized anew: it may have been loaded without an optimizer step.
        gathered = whole is not None and sharded
        if cached is None or cached[0] != key or gathered:
            self._cached_slots.pop(slot, None)  # the old codes go before the new ones come
            cached = self._cached_slots[slot] = (key, quantize(*(own if whole is None else whole)))
        return cached[1]

    def _compute_input(self, input: Tensor) -> Tensor:
        """`input` in the compute dtype: what autocast would make of it, where it is on."""
        if torch.is_autocast_enabled(input.device.type):
            return input.to(torch.get_autocast_dtype(input.device.type))
        return input

    def _get_kernel(self, device: torch.device) -> Kernel:
        kernel = self.__dict__.get("_kernel")
        if kernel is None:
            kernel = self.__dict__["_kernel"] = select_kernel(self.scheme, device, self.kernel_choice)
        return kernel

    def extra_repr(self) -> str:
        group_size = effective_group_size(self.scheme)
        parts = [
            super().extra_repr(),
            f"scheme={support_of(self.scheme).name}",
            f"group_size={group_size}" if group_size else "",
            f"forward={self.kernel_choice if self.quantized_forward else 'high precision'}",
        ]
        return ", ".join(filter(None, parts))

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in super().__getstate__().items() if k not in ("_cached", "_sharded", "_kernel")}


class QuantLinear(LowBitLayer, nn.Linear):
    """`nn.Linear` after [`qarl_trl.quant.apply_quantization`]; never constructed directly."""

    def sources(self) -> tuple[str, ...]:
        """The master weight."""
        return ("weight",)

    def low_bit(self, weight: Tensor | None = None) -> LowBitWeight:
        """
        The layer's low-bit weight, quantized when the master has changed since the last call.

        Args:
            weight (`Tensor`, *optional*): The full master weight `(out, in)` where `self.weight` is a shard of it.
        """
        whole = None if weight is None else (weight,)
        others = tuple((layer.weight.data_ptr(), layer.weight._version) for layer in self.fused)
        return self._cached_low_bit((self.weight,), whole, self._quantize, constants=others)

    def forward(self, input: Tensor) -> Tensor:
        if not self.quantized_forward:
            return super().forward(input)
        input, kernel = self._compute_input(input), self._get_kernel(input.device)
        with torch.autocast(input.device.type, enabled=False):
            return LowBitMatmul.apply(input, self.weight, self.bias, self.low_bit(), kernel)


def _is_alias(a: Tensor, b: Tensor) -> bool:
    """Whether `a` is the whole of `b` under another name, such as `b.data`."""
    return not isinstance(b, DTensor) and a.shape == b.shape and a.data_ptr() == b.data_ptr()
