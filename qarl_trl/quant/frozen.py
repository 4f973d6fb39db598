"""A frozen low-bit base with LoRA adapters beside it: `Q(W) x + s B (A x)`, without master weights (`lora_base: frozen`).

Invariant: a base weight exists as low-bit tensors, with the same bytes in learner, engine and checkpoint. Its high-precision
matrix exists only during one matrix multiplication of its layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from peft.tuners import lora
from torch import Tensor, nn

from .linear import LowBitLayer
from .lora import LoraQuantLinear, check_adapters, factor_gradients
from .names import base_model, checkpoint_modules, plain_name
from .quantize import LowBitWeight, quantize_weight
from .scheme import MASTER_CAST_DTYPE
from .shards import whole


class AdapterMatmul(torch.autograd.Function):
    """
    Computes `s B (A x)` `(..., out)` from `x` `(..., in)`, A `(r, in)` and B `(out, r)`. Rounds to bfloat16 where vLLM's LoRA kernels do.

    On a CPU the result has the same bits as vLLM's (`vllm.lora.ops.torch_ops`): `A x` is a separate float32 sum for each token.
    vLLM copies A for each token, this function does not.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, lora_A: Tensor, lora_B: Tensor, scaling: float) -> Tensor:
        ctx.dtype, ctx.scaling, x = x.dtype, scaling, x.to(MASTER_CAST_DTYPE)
        ctx.save_for_backward(x, lora_A, lora_B)
        (used_A, used_B), rows = synced(lora_A, lora_B, scaling), x.flatten(0, -2)
        if x.device.type == "cpu":
            inner = torch.einsum("bi,boi->bo", rows.float(), used_A.float().expand(len(rows), -1, -1)).to(x.dtype)
        else:
            inner = rows @ used_A.t()
        return (inner @ used_B.t()).view(*x.shape[:-1], -1).to(ctx.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, lora_A, lora_B = ctx.saved_tensors
        used_A, used_B = (factor.to(grad.dtype) for factor in synced(lora_A, lora_B, ctx.scaling))
        rows = grad.flatten(0, -2), x.flatten(0, -2).to(grad.dtype)
        return (grad @ used_B) @ used_A, *factor_gradients(ctx.scaling, *rows, lora_A, lora_B), None


def synced(lora_A: Tensor, lora_B: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """
    The factors that learner and engine multiply by: A and B in bfloat16, B times `scaling`.

    vLLM also scales B after the cast to bfloat16, so it serves a saved adapter with the same numbers.
    """
    return lora_A.detach().to(MASTER_CAST_DTYPE), lora_B.detach().to(MASTER_CAST_DTYPE) * scaling


class FrozenLinear(LowBitLayer, nn.Linear):
    """`nn.Linear` with constant low-bit tensors instead of a weight parameter."""

    held: LowBitWeight  # on the meta device until a checkpoint is read

    @classmethod
    def convert(cls, module: Any, *args: Any) -> None:
        super().convert(module, *args)
        module.held = quantize_weight(module.weight.to("meta"), module.scheme)
        module.weight = None

    @property
    def qweight(self) -> Tensor:
        """peft reads this attribute to find an adapter's device. It holds bytes, so peft does not change the adapter's dtype."""
        return self.held.quantized.view(torch.uint8)

    def low_bit(self) -> LowBitWeight:
        return self.held

    def forward(self, input: Tensor) -> Tensor:
        return self._multiply(input, self.low_bit, self._get_gemm(input.device), bias=self.bias)

    def hold_on(self, device: torch.device) -> None:
        """Move the low-bit tensors to `device`; they keep their dtypes."""
        data = {name: tensor.to(device) for name, tensor in self.held.data.items()}
        self.held = replace(self.held, data=data, prepared={})

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        super()._apply(fn, recurse)
        device = fn(torch.empty(0, device=self.held.quantized.device)).device
        # accelerate moves a model to the meta device before FSDP2 shards its parameters; `held` is no parameter.
        if device.type != "meta":
            self.hold_on(device)
        return self


class AdaptedLinear(lora.Linear):
    """`peft.tuners.lora.Linear` around a [`FrozenLinear`], after [`align_adapters`]; never constructed directly."""

    adapter = LoraQuantLinear.adapter

    def factors(self) -> tuple[Tensor, Tensor, float]:  # A, B and scaling of the active adapter
        return self.lora_A[self.adapter].weight, self.lora_B[self.adapter].weight, self.scaling[self.adapter]

    # Takes no other arguments of peft's, as in `LoraQuantLinear`.
    def forward(self, x: Tensor) -> Tensor:
        y = self.base_layer(x)
        if not self.adapter:
            return y
        with torch.autocast(x.device.type, enabled=False):
            return y + AdapterMatmul.apply(x, *self.factors()).to(y.dtype)


def adapter_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the active adapter from [`synced`], by their names in peft's files. `RuntimeError` if it is disabled."""
    for name, layer in model.named_modules():
        if isinstance(layer, AdaptedLinear):
            if not layer.adapter:
                raise RuntimeError("The adapter is disabled: the engine would sample from the base model. Enable it.")
            names = (f"{plain_name(name)}.{factor}.weight" for factor in ("lora_A", "lora_B"))
            lora_A, lora_B, scaling = layer.factors()
            yield from zip(names, synced(whole(lora_A), whole(lora_B), scaling), strict=True)


def align_adapters(model: nn.Module) -> None:
    """Make the adapters of frozen layers in a `PeftModel` round as the engine does. `ValueError` if one is on another layer."""
    modules = checkpoint_modules(model)
    frozen = {name: m for name, m in modules if isinstance(getattr(m, "base_layer", m), FrozenLinear)}
    check_adapters(base_model(model), frozen)
    for layer in frozen.values():
        if type(layer) is lora.Linear:
            layer.__class__ = AdaptedLinear
