"""A frozen low-bit base with LoRA adapters beside it: `Q(W) x + s B (A x)`, without master weights (`lora_base: frozen`).

Invariant: a base weight is its low-bit tensors, the same bytes in learner, engine and checkpoint. Its matrix in high precision
exists for as long as one gemm of one layer takes.
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
    `s B (A x)`, `(..., out)`, of `x` `(..., in)`, A `(r, in)` and B `(out, r)`, rounded to bfloat16 where vLLM's LoRA kernels round.

    On a CPU it has the bits of its operations (`vllm.lora.ops.torch_ops`): `A x` is a float32 sum for each token by itself. They copy
    A for each token, which this does not.
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
    The factors in bfloat16, B scaled: what learner and engine multiply by.

    vLLM scales the bfloat16 B as well, so that a saved adapter is served with the same numbers.
    """
    return lora_A.detach().to(MASTER_CAST_DTYPE), lora_B.detach().to(MASTER_CAST_DTYPE) * scaling


class FrozenLinear(LowBitLayer, nn.Linear):
    """`nn.Linear` without a weight parameter: it has low-bit tensors, which stay."""

    held: LowBitWeight  # on the meta device until a checkpoint is read

    @classmethod
    def convert(cls, module: Any, *args: Any) -> None:
        super().convert(module, *args)
        module.held = quantize_weight(module.weight.to("meta"), module.scheme)
        module.weight = None

    @property
    def qweight(self) -> Tensor:
        """By this name peft finds the device of an adapter; of bytes, it leaves the adapter's dtype alone."""
        return self.held.quantized.view(torch.uint8)

    def low_bit(self) -> LowBitWeight:
        return self.held

    def forward(self, input: Tensor) -> Tensor:
        return self._multiply(input, self.low_bit, self._get_gemm(input.device), bias=self.bias)

    def hold_on(self, device: torch.device) -> None:
        """Move the low-bit tensors, which keep their dtypes."""
        data = {name: tensor.to(device) for name, tensor in self.held.data.items()}
        self.held = replace(self.held, data=data, prepared={})

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        super()._apply(fn, recurse)
        device = fn(torch.empty(0, device=self.held.quantized.device)).device
        if (
            device.type != "meta"
        ):  # where accelerate moves a model whose parameters FSDP2 will shard, and these are none
            self.hold_on(device)
        return self


class AdaptedLinear(lora.Linear):
    """`peft.tuners.lora.Linear` around a [`FrozenLinear`], after [`align_adapters`]; never constructed directly."""

    adapter = LoraQuantLinear.adapter

    def factors(self) -> tuple[Tensor, Tensor, float]:  # A, B and scaling of the active adapter
        return self.lora_A[self.adapter].weight, self.lora_B[self.adapter].weight, self.scaling[self.adapter]

    # Without peft's other arguments, as in `LoraQuantLinear`.
    def forward(self, x: Tensor) -> Tensor:
        y = self.base_layer(x)
        if not self.adapter:
            return y
        with torch.autocast(x.device.type, enabled=False):
            return y + AdapterMatmul.apply(x, *self.factors()).to(y.dtype)


def adapter_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The active adapter by peft's names in a file, as [`synced`] gives it; `RuntimeError` while it is disabled."""
    for name, layer in model.named_modules():
        if isinstance(layer, AdaptedLinear):
            if not layer.adapter:
                raise RuntimeError("The adapter is disabled: the engine would sample from the base model. Enable it.")
            names = (f"{plain_name(name)}.{factor}.weight" for factor in ("lora_A", "lora_B"))
            lora_A, lora_B, scaling = layer.factors()
            yield from zip(names, synced(whole(lora_A), whole(lora_B), scaling), strict=True)


def align_adapters(model: nn.Module) -> None:
    """Let the adapters of a `PeftModel` of frozen layers round as the engine does; `ValueError` for one on another layer."""
    modules = checkpoint_modules(model)
    frozen = {name: m for name, m in modules if isinstance(getattr(m, "base_layer", m), FrozenLinear)}
    check_adapters(base_model(model), frozen)
    for layer in frozen.values():
        if type(layer) is lora.Linear:
            layer.__class__ = AdaptedLinear
