"""A frozen low-bit base with LoRA adapters beside it: `Q(W) x + s B (A x)`, without master weights (`lora_base:
frozen`).

Invariant: a base weight exists as low-bit tensors, with the same bytes in learner, engine and checkpoint. Its
dequantized matrix exists only during a multiplication of its layer, unless `quant_keep_matrices` keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from peft.tuners import lora
from torch import Tensor, nn

from ..names import base_model, checkpoint_modules, plain_name
from ..quantize import LowBitWeight, quantize_weight
from ..scheme import MASTER_CAST_DTYPE
from ..sharding.shards import whole
from .layer import LowBitLayer
from .lora import LoraQuantLinear, check_adapters, factor_gradients


class AdapterMatmul(torch.autograd.Function):
    """
    Computes `s B (A x)`, and rounds to bfloat16 where vLLM's LoRA kernels do.

    On a CPU the result has the same bits as vLLM's (`vllm.lora.ops.torch_ops`): `A x` is a separate float32 sum for
    each token. vLLM copies A for each token, this function does not.

    Args of `apply`:
        x: `(..., in)`.
        lora_A: A, `(r, in)`.
        lora_B: B, `(out, r)`.
        scaling: s.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, lora_A: Tensor, lora_B: Tensor, scaling: float) -> Tensor:
        cast = x.to(MASTER_CAST_DTYPE)
        ctx.input_dtype = x.dtype
        ctx.scaling = scaling
        ctx.save_for_backward(cast, lora_A, lora_B)

        # The gradients belong to the master factors, so these are saved; backward casts them again.
        used_A, used_B = synced(lora_A, lora_B, scaling)
        rows = cast.flatten(0, -2)
        if x.device.type == "cpu":
            inner = torch.einsum("bi,boi->bo", rows.float(), used_A.float().expand(len(rows), -1, -1)).to(cast.dtype)
        else:
            inner = rows @ used_A.t()

        output = inner @ used_B.t()
        return output.view(*x.shape[:-1], -1).to(ctx.input_dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, lora_A, lora_B = ctx.saved_tensors
        used_A, used_B = (factor.to(grad.dtype) for factor in synced(lora_A, lora_B, ctx.scaling))

        # `used_B` has the scaling in it. `factor_gradients` takes the master factors, and multiplies by it itself.
        grad_x = (grad @ used_B) @ used_A
        grad_rows = grad.flatten(0, -2)
        x_rows = x.flatten(0, -2).to(grad.dtype)
        grad_A, grad_B = factor_gradients(ctx.scaling, grad_rows, x_rows, lora_A, lora_B)
        return grad_x, grad_A, grad_B, None


def synced(lora_A: Tensor, lora_B: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """
    The factors that learner and engine multiply by: A and B in bfloat16, B times `scaling`.

    vLLM also scales B after the cast to bfloat16, so it serves a saved adapter with the same numbers.
    """
    used_A = lora_A.detach().to(MASTER_CAST_DTYPE)
    used_B = lora_B.detach().to(MASTER_CAST_DTYPE) * scaling
    return used_A, used_B


class FrozenLinear(LowBitLayer, nn.Linear):
    """
    `nn.Linear` with constant low-bit tensors instead of a weight parameter.

    Attributes:
        frozen_weight: The low-bit tensors, on the meta device until a checkpoint is read.
    """

    frozen_weight: LowBitWeight

    @classmethod
    def convert(cls, module: Any, *args: Any) -> None:
        super().convert(module, *args)
        # On the meta device it has names, dtypes and shapes, by which the checkpoint's tensors are checked and read.
        module.frozen_weight = quantize_weight(module.weight.to("meta"), module.scheme)
        # As a parameter of `None`: it leaves `state_dict` and the optimizer, and the attribute still exists.
        module.weight = None

    def weight_names(self) -> tuple[str, ...]:
        return ("weight",)

    def source_names(self, name: str) -> tuple[str, ...]:
        return ()

    @property
    def qweight(self) -> Tensor:
        """
        peft reads this attribute to find an adapter's device. It holds bytes, so peft does not change the adapter's
        dtype.
        """
        return self.frozen_weight.quantized.view(torch.uint8)

    def forward(self, input: Tensor) -> Tensor:
        return self.multiply(input, "weight", self.choose_gemm(input.device), bias=self.bias)

    def move_to(self, device: torch.device) -> None:
        """Move the low-bit tensors to `device`; they keep their dtypes."""
        data = {name: tensor.to(device) for name, tensor in self.frozen_weight.data.items()}
        # Without `prepared`, whose tensors a kernel made for the former device.
        self.frozen_weight = replace(self.frozen_weight, data=data, prepared={})

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        super()._apply(fn, recurse)

        # `fn` moves tensors, or casts them. Applied to an empty one it says where to, and low-bit tensors stay uncast.
        probe = torch.empty(0, device=self.frozen_weight.quantized.device)
        device = fn(probe).device
        # accelerate moves a model to the meta device before FSDP2 shards its parameters; the low-bit tensors are no
        # parameters.
        if device.type != "meta":
            self.move_to(device)
        return self


class AdaptedLinear(lora.Linear):
    """`peft.tuners.lora.Linear` around a [`FrozenLinear`], after [`align_adapters`]; never constructed directly."""

    adapter = LoraQuantLinear.adapter

    def factors(self) -> tuple[Tensor, Tensor, float]:
        """A, B and scaling of the active adapter."""
        name = self.adapter
        return self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name]

    # Takes no other arguments of peft's, as in `LoraQuantLinear`.
    def forward(self, x: Tensor) -> Tensor:
        y = self.base_layer(x)
        if not self.adapter:
            return y

        # `AdapterMatmul` chooses its dtypes as the engine does.
        with torch.autocast(x.device.type, enabled=False):
            return y + AdapterMatmul.apply(x, *self.factors()).to(y.dtype)


def adapter_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """
    The tensors of the active adapter, as the engine gets them ([`synced`]), by their names in peft's files.

    Raises:
        RuntimeError: if the adapter is disabled, or a layer got one after [`align_adapters`].
    """
    for name, layer in model.named_modules():
        if isinstance(layer, lora.Linear) and not isinstance(layer, AdaptedLinear):
            raise RuntimeError(
                f"{name!r} got an adapter after the trainer was made, which no weight sync would have. Give the "
                "trainer peft_config, or a PeftModel with this adapter."
            )
        if not isinstance(layer, AdaptedLinear):
            continue
        if not layer.adapter:
            raise RuntimeError("The adapter is disabled: the engine would sample from the base model. Enable it.")

        lora_A, lora_B, scaling = layer.factors()
        used_A, used_B = synced(whole(lora_A), whole(lora_B), scaling)
        yield f"{plain_name(name)}.lora_A.weight", used_A
        yield f"{plain_name(name)}.lora_B.weight", used_B


def align_adapters(model: nn.Module) -> None:
    """
    Make the adapters of frozen layers in a `PeftModel` round as the engine does, and its store name tensors from it
    on.

    Raises:
        ValueError: if an adapter is on a layer that is not frozen.
    """
    frozen = {}
    for name, module in checkpoint_modules(model):
        if isinstance(getattr(module, "base_layer", module), FrozenLinear):
            frozen[name] = module
    check_adapters(base_model(model), frozen)

    # peft wraps only layers with an adapter; the others stay as they are.
    for layer in frozen.values():
        if type(layer) is lora.Linear:
            layer.__class__ = AdaptedLinear
    for layer in frozen.values():
        base: Any = getattr(layer, "base_layer", layer)
        base.store.attach(model)
