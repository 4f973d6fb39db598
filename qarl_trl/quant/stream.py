"""The low-bit model as a stream of tensors in checkpoint names.

Invariant: sync and export read this one stream. It has the tensors that a quantized layer's forward uses (for experts: views
of them), and a new bfloat16 copy of everything else (paper Sec. 3.1, step 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from .experts import PROJECTIONS, checkpoint_tensors, expert_modules
from .linear import LowBitLayer
from .names import checkpoint_names, checkpoint_renaming, plain_name
from .scheme import MASTER_CAST_DTYPE
from .shards import whole


# Names of parameters, and a function that makes checkpoint tensors from all of them.
_Producer = tuple[tuple[str, ...], Callable[..., Iterable[tuple[str, Tensor]]]]


def iter_low_bit_weights(
    model: nn.Module, named_params: Iterable[tuple[str, Tensor]] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """
    Yield every tensor of the low-bit checkpoint of `model`, with the name that transformers saves it under.

    A W4A16 layer `X` gives `X.weight_packed`, `X.weight_scale`, `X.weight_shape`; an FP8 layer `X.weight` (float8) and
    `X.weight_scale`; other parameters come in bfloat16. The experts of a quantized model come as one layer per expert and
    projection, quantized or not. Persistent buffers come last, in their own dtype.

    A `PeftModel` gives its base model with the active adapter merged; a model without low-bit layers gives bfloat16 tensors.
    `named_params` (default: those of `model`) are in module order, whole or as FSDP2's `DTensor`s. Their quantized values are
    gathered, so every process must iterate. `RuntimeError` if parameters of a quantized layer or of experts are missing.
    """
    name_of = checkpoint_names(model)
    quantized = any(isinstance(module, LowBitLayer) for module in model.modules())
    rename = checkpoint_renaming(model) if quantized else str
    producers = list(_producers(model, name_of, rename)) if quantized else []
    for sources, tensors_of in producers:
        if not sources:  # frozen
            yield from tensors_of()
    waiting, seen = {source: producer for producer in producers for source in producer[0]}, {}
    for full_name, param in model.named_parameters() if named_params is None else named_params:
        producer, name = waiting.pop(plain_name(full_name), None), name_of(full_name)
        if producer is not None:
            sources, tensors_of = producer
            seen[plain_name(full_name)] = param
            if seen.keys() >= set(sources):
                yield from tensors_of(*(seen.pop(source) for source in sources))
        elif name is not None:
            # Always a copy: the engine keeps references until a layer is complete.
            tensor = whole(param.detach())
            copied = tensor.to(MASTER_CAST_DTYPE, copy=True) if tensor.is_floating_point() else tensor.clone()
            yield rename(name), copied
    if waiting:
        raise RuntimeError(
            f"{len(waiting)} parameters of quantized layers or experts were not given (first: {min(waiting)!r}), so the engine or "
            "the checkpoint would miss them. Parameter names changed between TRL or torch versions?"
        )
    persistent = model.state_dict(keep_vars=True)
    for full_name, buffer in model.named_buffers():
        if plain_name(full_name) in persistent and (name := name_of(full_name)) is not None:
            yield rename(name), buffer.detach().clone()


def readable_parameters(model: nn.Module, dist: Any) -> Iterator[tuple[str, Tensor]]:
    """
    Yield every parameter of the unwrapped `model` with its plain name: gathered under ZeRO-3, unchanged otherwise.

    `dist` is TRL's `DistributedBackend`. Gathering is collective, so every process must iterate.
    """
    for name, param in model.named_parameters():
        with dist.gather_params([param]):
            yield plain_name(name), param.data


def _producers(
    model: nn.Module, name_of: Callable[[str], str | None], rename: Callable[[str], str]
) -> Iterator[_Producer]:
    """The low-bit layers and the experts of a quantized `model`."""
    experts = {id(module): name for name, module in expert_modules(model)}
    for full_name, module in model.named_modules():
        if id(module) in experts:
            for parameter in PROJECTIONS:
                tensors_of = partial(checkpoint_tensors, experts[id(module)], module, parameter, rename)
                yield (plain_name(f"{full_name}.{parameter}"),), tensors_of
        elif isinstance(module, LowBitLayer):
            prefix = rename(cast(str, name_of(f"{full_name}.weight"))).removesuffix("weight")
            sources = tuple(plain_name(f"{full_name}.{local}") for local in module.sources())
            yield sources, partial(_layer_tensors, module, prefix)


def _layer_tensors(layer: Any, prefix: str, *sources: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield from ((prefix + local, tensor) for local, tensor in layer.low_bit(*sources).tensors.items())
