"""
The low-bit model as a stream of tensors under checkpoint names, for weight syncs and files (paper Sec. 3.1, step 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .layers.experts import PROJECTIONS, expert_modules, layer_names, stack_name
from .layers.late_adapters import check_late_adapters
from .layers.layer import LowBitLayer
from .names import checkpoint_names, checkpoint_renaming, plain_name
from .quantize import LowBitWeight
from .scheme import MASTER_CAST_DTYPE
from .sharding.shards import shape_of, whole


# The low-bit weight of a layer by its name: `weight_of` or `fresh_weight_of` of a store.
_WeightOf = Callable[[LowBitLayer, str], LowBitWeight]
# Takes parameters; inside the context they are whole. TRL's `DistributedBackend.gather_params`, for ZeRO-3.
Gather = Callable[[Iterable[nn.Parameter]], AbstractContextManager[Any]]


def checkpoint_stream(
    model: nn.Module, weight_of: _WeightOf | None, gather: Gather, stacked: bool = False
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
        stacked: Yield one tensor for all experts of a projection, `(experts, ...)`, under the name of
            [`~qarl_trl.quant.layers.experts.stack_name`]. A mixture has tens of thousands of matrices.

    Raises:
        RuntimeError: if a layer got an adapter after the quantization.
        ValueError: if the active adapter has settings with which it does not merge.
    """
    if weight_of is not None:
        check_late_adapters(model)

    names = _Names.of(model, in_low_bits=weight_of is not None, stacked=stacked)
    # The `id`s of parameters that the stream already has: as they are, in a low-bit weight, or as layers of experts.
    sent: set[int] = set()

    for module_name, module in model.named_modules():
        # Whole modules first: their parameters must not come again, in high precision, in the loop below.
        if isinstance(module, LowBitLayer) and weight_of is not None:
            # With an adapter some of them belong to modules inside this one, which the loop reaches later.
            sent.update(map(id, _all_sources(module)))
            yield from _low_bit_tensors(module_name, module, names, weight_of, gather)
        elif id(module) in names.experts:
            sent.update(map(id, _projections(module)))
            yield from _plain_expert_tensors(module, names, gather)

        for local, parameter in module.named_parameters(recurse=False):
            name = names.in_base(f"{module_name}.{local}" if module_name else local)
            if name is None:  # an adapter's factor
                continue
            if id(parameter) in sent:  # also a tied parameter, which a checkpoint stores once
                continue

            sent.add(id(parameter))
            with gather([parameter]):
                yield names.saved(name), _bfloat16_copy(whole(parameter.detach()))

    yield from _buffers(model, names)


def renamed_stream(model: nn.Module, named_parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """
    Yield whole parameters that somebody else made (TRL merges an adapter for it) as bfloat16 copies, and the buffers
    of `model`.

    Args:
        model: A model without low-bit layers.
        named_parameters: Names, as in `model`, and whole or FSDP2-sharded tensors.
    """
    names = _Names.of(model, in_low_bits=False, stacked=False)
    for full_name, parameter in named_parameters:
        name = names.in_base(full_name)
        if name is not None:
            yield name, _bfloat16_copy(whole(parameter.detach()))

    yield from _buffers(model, names)


@dataclass(frozen=True)
class _Names:
    """
    How a checkpoint names the parts of a model.

    Attributes:
        in_base: From a name in the model to the name in its base model, `None` for what the base model lacks.
        saved: From a name in the base model to the name that the stream gives.
        experts: The modules of experts that the stream divides into linear layers: by `id`, their names in the base
            model.
        stacked: Whether the layers of all experts of a projection come in one.
    """

    in_base: Callable[[str], str | None]
    saved: Callable[[str], str]
    experts: dict[int, str]
    stacked: bool

    @classmethod
    def of(cls, model: nn.Module, in_low_bits: bool, stacked: bool) -> _Names:
        """The names of a model; `in_low_bits` says whether its low-bit layers are streamed as such."""
        if not in_low_bits:
            # TRL syncs a high-precision model by its own names, and its experts as they are.
            return cls(checkpoint_names(model), str, {}, stacked)

        # Engines load a quantized checkpoint by the names that transformers saves, with one layer for each expert.
        experts = {id(module): name for name, module in expert_modules(model)}
        return cls(checkpoint_names(model), checkpoint_renaming(model), experts, stacked)

    def prefix(self, layer_name: str) -> str:
        """`model.layers.0.q_proj.` for the name of a layer in the model."""
        # A layer that is the whole model has no name.
        name = self.in_base(f"{layer_name}.weight" if layer_name else "weight")
        if name is None:
            raise RuntimeError(
                "A quantized layer has no name in the checkpoint: it lies inside an adapter's own module."
            )
        # transformers' patterns may match a name with `weight` at its end; they do not know `weight_packed`.
        return self.saved(name).removesuffix("weight")

    def of_stack(self, module: nn.Module, projection: str, tensor: str) -> str:
        """The name of a stack: a tensor of every expert in a module of experts."""
        return stack_name(self.saved(f"{self.experts[id(module)]}.0.{projection}.{tensor}"))


# One module ----------------------------------------------------------------------------------------------------------


def _low_bit_tensors(
    module_name: str, layer: LowBitLayer, names: _Names, weight_of: _WeightOf, gather: Gather
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one low-bit layer."""
    for weight_name in layer.weight_names():
        # One weight at a time, so that under ZeRO-3 no more than its sources are whole.
        with gather(layer.sources(weight_name)):
            low_bit = weight_of(layer, weight_name)
            if id(layer) in names.experts:
                yield from _low_bit_expert_tensors(layer, weight_name, names, low_bit)
            else:
                prefix = names.prefix(module_name)
                for local, tensor in low_bit.tensors.items():
                    yield prefix + local, tensor


def _low_bit_expert_tensors(
    module: Any, parameter_name: str, names: _Names, low_bit: LowBitWeight
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of quantized experts: views of the one low-bit weight of a parameter."""
    if names.stacked:
        projections = PROJECTIONS[parameter_name]
        number, *_ = shape_of(getattr(module, parameter_name))
        for projection, stacks in zip(projections, low_bit.stacks(number, len(projections)), strict=True):
            for local, stack in stacks.items():
                yield names.of_stack(module, projection, local), stack
        return

    layers = layer_names(names.experts[id(module)], module, parameter_name)
    rows, _ = low_bit.shape

    # In the order of the rows, which is that of `layer_names`.
    parts = low_bit.split(rows // len(layers))
    for layer, part in zip(layers, parts, strict=True):
        for local, tensor in part.tensors.items():
            yield names.saved(f"{layer}.{local}"), tensor


def _plain_expert_tensors(module: nn.Module, names: _Names, gather: Gather) -> Iterator[tuple[str, Tensor]]:
    """The tensors of experts that stay in high precision, one matrix for each expert and projection."""
    for parameter_name, parameter in zip(PROJECTIONS, _projections(module), strict=True):
        with gather([parameter]):
            if names.stacked:
                projections = PROJECTIONS[parameter_name]
                # `(experts, projections * rows, in)`: gate and up follow each other within an expert.
                stacks = whole(parameter.detach()).chunk(len(projections), dim=1)
                for projection, stack in zip(projections, stacks, strict=True):
                    yield names.of_stack(module, projection, "weight"), _bfloat16_copy(stack)
                continue

            layers = layer_names(names.experts[id(module)], module, parameter_name)
            # All experts' rows one after the other, cut in the order of `layer_names`.
            matrices = whole(parameter.detach()).flatten(0, 1).chunk(len(layers))
            for layer, matrix in zip(layers, matrices, strict=True):
                yield names.saved(f"{layer}.weight"), _bfloat16_copy(matrix)


def _all_sources(layer: LowBitLayer) -> Iterator[nn.Parameter]:
    """The parameters that the low-bit weights of `layer` are made from."""
    for weight_name in layer.weight_names():
        yield from layer.sources(weight_name)


def _projections(module: nn.Module) -> list[nn.Parameter]:
    """The 3-D parameters of a module of experts."""
    return [module.get_parameter(name) for name in PROJECTIONS]


def _buffers(model: nn.Module, names: _Names) -> Iterator[tuple[str, Tensor]]:
    """Copies of the buffers that a checkpoint stores."""
    persistent = model.state_dict(keep_vars=True)
    for full_name, buffer in model.named_buffers():
        name = names.in_base(full_name)
        # Activation checkpointing shows in the names of buffers, but not in those of the state dict.
        if name is not None and plain_name(full_name) in persistent:
            yield names.saved(name), buffer.detach().clone()


def _bfloat16_copy(tensor: Tensor) -> Tensor:
    """
    Always a copy: an engine keeps references until a layer is complete, and the optimizer writes to master weights in
    place.
    """
    if tensor.is_floating_point():
        return tensor.to(MASTER_CAST_DTYPE, copy=True)
    return tensor.clone()
