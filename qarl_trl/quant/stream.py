"""
The low-bit model as a stream of tensors under checkpoint names, for weight syncs and files (paper Sec. 3.1, step 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from .experts import PROJECTIONS, expert_modules, layer_names
from .layer import LowBitLayer
from .names import checkpoint_names, checkpoint_renaming, plain_name
from .quantize import LowBitWeight
from .scheme import MASTER_CAST_DTYPE
from .shards import whole


def checkpoint_stream(
    model: nn.Module,
    weight_of: Callable[[LowBitLayer, str], LowBitWeight] | None,
    gather: Callable[[Iterable[nn.Parameter]], AbstractContextManager[Any]],
) -> Iterator[tuple[str, Tensor]]:
    """
    Yield every tensor of the checkpoint of `model`, with the name that transformers saves it under.

    A W4A16 layer `X` gives `X.weight_packed`, `X.weight_scale`, `X.weight_shape`; an FP8 layer `X.weight` (float8) and
    `X.weight_scale`. Everything else is a new bfloat16 copy. The experts of a quantized model come as one layer per
    expert and projection, quantized or not. Persistent buffers come last, in their own dtype. A `PeftModel` gives its
    base model, with the active adapter merged into the quantized layers.

    Args:
        model: The model, quantized or not.
        weight_of: Gives the low-bit weight of a layer by its name; `None` for a model without low-bit layers.
        gather: Makes parameters whole inside its context. Collective under ZeRO-3 and FSDP2: every process must
            iterate.
    """
    name_of = checkpoint_names(model)
    # Renaming is for engines that load quantized checkpoints. TRL syncs a high-precision model by its own names.
    rename = str if weight_of is None else checkpoint_renaming(model)
    experts = {} if weight_of is None else {id(module): name for name, module in expert_modules(model)}
    sent: set[int] = set()  # parameters that a low-bit weight or a layer of experts already stands for

    for module_name, module in model.named_modules():
        if isinstance(module, LowBitLayer) and weight_of is not None:
            for weight_name in module.weight_names():
                layer: Any = module
                parameters = [layer.get_parameter(source) for source in layer.sources_of(weight_name)]
                sent.update(map(id, parameters))
                with gather(parameters):
                    low_bit = weight_of(module, weight_name)
                    if id(module) in experts:
                        yield from _expert_tensors(experts[id(module)], module, weight_name, rename, low_bit)
                    else:
                        prefix = _checkpoint_prefix(name_of(f"{module_name}.weight"), rename)
                        yield from ((prefix + local, tensor) for local, tensor in low_bit.tensors.items())
        elif id(module) in experts:
            for parameter_name in PROJECTIONS:
                parameter = module.get_parameter(parameter_name)
                sent.add(id(parameter))
                with gather([parameter]):
                    yield from _plain_expert_tensors(experts[id(module)], module, parameter_name, rename, parameter)

        for local, parameter in module.named_parameters(recurse=False):
            name = name_of(f"{module_name}.{local}" if module_name else local)
            if (
                name is None or id(parameter) in sent
            ):  # an adapter's factor, or a weight that is tied or sent in low bits
                continue
            sent.add(id(parameter))
            with gather([parameter]):
                yield rename(name), _bfloat16_copy(whole(parameter.detach()))

    yield from _buffers(model, name_of, rename)


def renamed_stream(model: nn.Module, named_parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """
    Yield whole parameters that somebody else made (TRL merges an adapter for it) as bfloat16 copies, and the buffers
    of `model`.

    Args:
        model: A model without low-bit layers.
        named_parameters: Names, as in `model`, and whole or FSDP2-sharded tensors.
    """
    name_of = checkpoint_names(model)
    for full_name, parameter in named_parameters:
        name = name_of(full_name)
        if name is not None:
            yield name, _bfloat16_copy(whole(parameter.detach()))

    yield from _buffers(model, name_of, str)


def _checkpoint_prefix(weight_name: str | None, rename: Callable[[str], str]) -> str:
    """`model.layers.0.q_proj.` for the checkpoint name of a layer's weight."""
    if weight_name is None:
        raise RuntimeError("A quantized layer has no name in the checkpoint: it lies inside an adapter's own module.")
    return rename(weight_name).removesuffix("weight")


def _expert_tensors(
    name: str, module: Any, parameter: str, rename: Callable[[str], str], low_bit: LowBitWeight
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of quantized experts: views of the one low-bit weight of a `parameter`."""
    layers = layer_names(name, module, parameter)
    for layer, part in zip(layers, low_bit.split(low_bit.shape[0] // len(layers)), strict=True):
        for local, tensor in part.tensors.items():
            yield rename(f"{layer}.{local}"), tensor


def _plain_expert_tensors(
    name: str, module: Any, parameter_name: str, rename: Callable[[str], str], parameter: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of experts that stay in high precision, one matrix for each expert and projection."""
    layers = layer_names(name, module, parameter_name)
    matrices = whole(parameter.detach()).flatten(0, 1).chunk(len(layers))
    for layer, matrix in zip(layers, matrices, strict=True):
        yield rename(f"{layer}.weight"), _bfloat16_copy(matrix)


def _buffers(
    model: nn.Module, name_of: Callable[[str], str | None], rename: Callable[[str], str]
) -> Iterator[tuple[str, Tensor]]:
    """Copies of the buffers that a checkpoint stores."""
    persistent = model.state_dict(keep_vars=True)
    for full_name, buffer in model.named_buffers():
        name = name_of(full_name)
        # Activation checkpointing shows in the names of buffers, but not in those of the state dict.
        if name is not None and plain_name(full_name) in persistent:
            yield rename(name), buffer.detach().clone()


def _bfloat16_copy(tensor: Tensor) -> Tensor:
    """
    Always a copy: an engine keeps references until a layer is complete, and the optimizer writes to master weights in
    place.
    """
    if tensor.is_floating_point():
        return tensor.to(MASTER_CAST_DTYPE, copy=True)
    return tensor.clone()
