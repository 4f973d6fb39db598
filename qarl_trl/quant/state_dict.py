"""The low-bit model as a stream of tensors in checkpoint names.

Invariant: the publish and the export read this one stream; a quantized layer's tensors are the very objects its
forward multiplies with, everything else is a fresh bfloat16 copy (paper Sec. 3.1, step 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from trl.distributed import DistributedBackend

from .experts import PROJECTIONS, QuantExperts, checkpoint_tensors, fused_experts
from .linear import LowBitLayer
from .names import base_model, checkpoint_name, checkpoint_renaming, is_peft_model, plain_name
from .scheme import MASTER_CAST_DTYPE


def iter_low_bit_weights(
    model: nn.Module, named_params: Iterable[tuple[str, Tensor]] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """
    Yield every tensor of the low-bit checkpoint of `model`.

    Args:
        model (`nn.Module`): A model after `apply_quantization` (without it: plain bfloat16 tensors). Of a `PeftModel`
            the stream holds the base model with the active adapter merged, under the base model's names.
        named_params (`Iterable[tuple[str, Tensor]]`, *optional*): Full parameters by name, in module order, where
            `model`'s own are sharded. Defaults to `model.named_parameters()`.

    Yields:
        `tuple[str, Tensor]`: checkpoint name (as transformers saves it) and tensor: `X.weight_packed`, `X.weight_scale`, `X.weight_shape` for a
        W4A16 layer `X`; `X.weight` (float8) and `X.weight_scale` for FP8; otherwise the parameter in bfloat16.
        The fused experts of a quantized model come as one layer per expert and projection, quantized or not.
        Persistent buffers follow, in their own dtype.
    """
    name_of = _naming(model)
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, LowBitLayer) and not isinstance(module, QuantExperts)
    }
    experts = _fused_parameters(model)
    rename = checkpoint_renaming(base_model(model)) if layers or experts else str
    part_of = {plain_name(f"{name}.{local}"): name for name, module in layers.items() for local in module.sources()}
    collected: dict[str, dict[str, Tensor]] = {name: {} for name in layers}
    for full_name, param in model.named_parameters() if named_params is None else named_params:
        layer = part_of.get(plain_name(full_name))
        if layer is not None:
            module, parts = layers[layer], collected[layer]
            parts[plain_name(full_name)] = param
            sources = [plain_name(f"{layer}.{local}") for local in module.sources()]
            if len(parts) == len(sources):
                low_bit = module.low_bit(*(parts[source] for source in sources))
                prefix = rename(name_of(sources[0])).removesuffix("weight")
                yield from ((prefix + local, tensor) for local, tensor in low_bit.tensors.items())
                del collected[layer]
            continue
        name = name_of(full_name)
        if name in experts:
            holder, fused, local = experts.pop(name)
            yield from ((rename(n), tensor) for n, tensor in checkpoint_tensors(holder, fused, local, param))
        elif name is not None:
            # A copy even when the dtype fits: the engine keeps references until a layer is complete.
            tensor = param.detach()
            copied = tensor.to(MASTER_CAST_DTYPE, copy=True) if tensor.is_floating_point() else tensor.clone()
            yield rename(name), copied
    if experts:
        raise RuntimeError(
            f"{len(experts)} parameters of fused experts were not among the parameters given (first: "
            f"{next(iter(experts))!r}), so the engine or the checkpoint would miss them."
        )
    if collected:
        first = next(iter(collected))
        raise RuntimeError(
            f"{len(collected)} quantized layers were not whole among the parameters given (first: {first!r}, "
            f"{len(collected[first])} of {list(layers[first].sources())}), so the engine or the checkpoint would miss "
            "them. Parameter names changed between TRL or torch versions?"
        )
    persistent = model.state_dict(keep_vars=True)
    parameters = {id(p) for p in model.parameters()}
    for full_name, buffer in model.named_buffers():
        name = name_of(full_name)
        if full_name in persistent and id(buffer) not in parameters and name is not None:
            yield rename(name), buffer.detach().clone()


def _fused_parameters(model: nn.Module) -> dict[str, tuple[str, nn.Module, str]]:
    """Fused expert parameters by checkpoint name, as (module name, module, parameter); none where nothing is quantized."""
    if not any(isinstance(module, LowBitLayer) for module in model.modules()):
        return {}
    return {f"{name}.{local}": (name, module, local) for name, module in fused_experts(model) for local in PROJECTIONS}


def full_parameters(model: nn.Module, dist: DistributedBackend) -> Iterator[tuple[str, Tensor]]:
    """
    Every parameter of `model` whole, under its plain name, one at a time; those of an adapted layer together.

    Gathering is collective: every process has to iterate.

    Args:
        model (`nn.Module`): Unwrapped model, possibly sharded by FSDP2 or ZeRO-3.
        dist (`DistributedBackend`): TRL's view of the sharding.
    """
    layer_of = {
        f"{name}.{local}": name
        for name, module in model.named_modules()
        if isinstance(module, LowBitLayer)
        for local in module.sources()
    }
    # A layer's parameters follow each other, except where a bias lies between them.
    groups: dict[str, dict[str, Tensor]] = {}
    for name, param in model.named_parameters():
        groups.setdefault(layer_of.get(name, f"{name}."), {})[name] = param
    for group in groups.values():
        with dist.gather_params(list(group.values())):
            for name, param in group.items():
                yield plain_name(name), param.full_tensor() if isinstance(param, DTensor) else param.data


def _naming(model: nn.Module) -> Callable[[str], str | None]:
    if not is_peft_model(model):
        return plain_name
    return lambda name: checkpoint_name(name, model.active_adapter)
