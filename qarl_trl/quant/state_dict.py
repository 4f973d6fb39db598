"""The low-bit model as a stream of tensors in checkpoint names.

Invariant: the publish and the export read this one stream; a quantized layer's tensors are the very objects its
forward multiplies with, everything else is a fresh bfloat16 copy (paper Sec. 3.1, step 3).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from trl.distributed import DistributedBackend

from .linear import QuantLinear
from .scheme import MASTER_CAST_DTYPE


def iter_low_bit_weights(
    model: nn.Module, named_params: Iterable[tuple[str, Tensor]] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """
    Yield every tensor of the low-bit checkpoint of `model`.

    Args:
        model (`nn.Module`): A model after `apply_quantization` (without it: plain bfloat16 tensors).
        named_params (`Iterable[tuple[str, Tensor]]`, *optional*): Full parameters by name, in module order, where
            `model`'s own are sharded. Defaults to `model.named_parameters()`.

    Yields:
        `tuple[str, Tensor]`: checkpoint name and tensor: `X.weight_packed`, `X.weight_scale`, `X.weight_shape` for a
        W4A16 layer `X`; `X.weight` (float8) and `X.weight_scale` for FP8; otherwise the parameter in bfloat16.
        Persistent buffers follow, in their own dtype.
    """
    quantized = {
        f"{plain_name(name)}.weight": module
        for name, module in model.named_modules()
        if isinstance(module, QuantLinear)
    }
    for full_name, param in model.named_parameters() if named_params is None else named_params:
        name = plain_name(full_name)
        module = quantized.pop(name, None)
        if module is None:
            # A copy even when the dtype fits: the engine keeps references until a layer is complete.
            tensor = param.detach()
            yield name, tensor.to(MASTER_CAST_DTYPE, copy=True) if tensor.is_floating_point() else tensor.clone()
        else:
            prefix = name.removesuffix("weight")
            yield from ((prefix + local, tensor) for local, tensor in module.low_bit(param).tensors.items())
    if quantized:
        raise RuntimeError(
            f"{len(quantized)} quantized layers were not among the parameters given (first: {next(iter(quantized))!r}), "
            "so the engine or the checkpoint would miss them. Parameter names changed between TRL or torch versions?"
        )
    persistent = model.state_dict(keep_vars=True)
    parameters = {id(p) for p in model.parameters()}
    for name, buffer in model.named_buffers():
        if name in persistent and id(buffer) not in parameters:
            yield name, buffer.detach().clone()


def full_parameters(model: nn.Module, dist: DistributedBackend) -> Iterator[tuple[str, Tensor]]:
    """
    Every parameter of `model` whole, one at a time, under its plain name.

    Gathering is collective: every process has to iterate.

    Args:
        model (`nn.Module`): Unwrapped model, possibly sharded by FSDP2 or ZeRO-3.
        dist (`DistributedBackend`): TRL's view of the sharding.
    """
    for name, param in model.named_parameters():
        with dist.gather_params([param]):
            full = param.full_tensor() if isinstance(param, DTensor) else param.data
            yield plain_name(name), full


def plain_name(name: str) -> str:
    """A parameter's or module's name without the part that activation checkpointing inserts."""
    return name.replace("_checkpoint_wrapped_module.", "")
