"""FSDP2 gathers the quantized values of a weight instead of the weight, and no process keeps those of the others.

torch asks a shard that has `fsdp_pre_all_gather` what to gather, and its `fsdp_post_all_gather` what to make of it
(`torch.distributed.fsdp._fully_shard._fsdp_param`: "extensions", as torchao's float8 weights use them).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from .quantize import LowBitWeight
from .shards import own_rows, quantize_own, quantize_shards, unit_of, whole


if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationScheme

    from .linear import LowBitLayer


_aten = torch.ops.aten
# What FSDP2 and `nn.Parameter` make of a tensor that has to be one of its kind again.
_SAME_KIND = {op.default for op in (_aten.detach, _aten.alias, _aten.view, _aten.new_zeros)} | {_aten.slice.Tensor}


def gathers_quantized(shape: Sequence[int], ranks: int, scheme: QuantizationScheme) -> bool:
    """Whether `ranks` processes have equally many rows of a weight of `shape`, none of which depend on those of another."""
    return ranks > 1 and shape[0] % ranks == 0 and unit_of(shape, ranks, scheme) is not None


def gather_quantized(layers: Iterable[LowBitLayer], ranks: int, device: torch.device) -> None:
    """
    Let FSDP2, which is about to cut the parameters of `layers` for `ranks` processes, gather quantized values of them.

    Not of adapted layers, of master weights that are not float32, where rows are uneven or depend on those of another process, where
    the product on `device` keeps something made of the quantized values: those weights it gathers, as ever.
    """
    for layer in layers:
        if not layer.quantized_forward or layer.gemm_for(layer.scheme, device).prepares:
            continue
        packed = {
            name: weight
            for name, weight in layer.named_parameters(recurse=False)
            # accelerate writes master weights of another dtype anew, by `param.data = ...`.
            if name in layer.packed_parameters and type(weight) is nn.Parameter and weight.dtype == torch.float32
            if gathers_quantized(weight.shape, ranks, layer.scheme)
        }
        for name, weight in packed.items():
            master = CodedMaster(weight.detach(), name)
            setattr(layer, name, nn.Parameter(master, requires_grad=weight.requires_grad))
        if packed:
            layer.register_load_state_dict_pre_hook(_load_packed)


@torch.no_grad()
def own_quantized(layer: LowBitLayer, parameter: str, anew: bool = False) -> LowBitWeight:
    """
    The low-bit rows of this process, of a parameter with gathered quantized values; made once per optimizer step, or `anew`.

    Not every write to a shard moves a version: `weight.detach().to_local()` has its own, and a checkpoint is loaded through it.
    """
    weight, slot = getattr(layer, parameter), "" if parameter == "weight" else parameter
    qparams, own = layer.qparams_of(parameter, weight.device), weight.to_local()
    quantize = partial(quantize_own, scheme=layer.scheme, qparams=qparams)
    others = own.data_ptr(), own._version, weight._version
    return layer._low_bit_cache.get(slot, (weight,), (weight,) if anew else None, quantize, others)


@torch.no_grad()
def gathered_quantized(layer: LowBitLayer, parameter: str, weight: Tensor | None) -> LowBitWeight | None:
    """The low-bit weight of a parameter (or of `weight` in its place, made anew) with gathered quantized values; `None` of another."""
    own, anew = getattr(layer, parameter), weight is not None
    weight = weight if anew else own
    if isinstance(weight, GatheredCodes):
        return weight.low_bit
    if not _is_packed(own) or not isinstance(weight, DTensor):
        return None
    same = weight.to_local().data_ptr() == own.to_local().data_ptr()
    qparams = layer.qparams_of(parameter, weight.device)
    return quantize_shards(weight, layer.scheme, qparams, own_quantized(layer, parameter, anew) if same else None)


@contextmanager
def whole_weights(layer: LowBitLayer) -> Iterator[None]:
    """
    Inside, weights of which FSDP2 has gathered the quantized values alone are whole, in bfloat16: for a forward in high precision.

    Collective. `RuntimeError` where they would need a gradient, which the master weights would not get.
    """
    quantized = {name: w for name in layer.packed_parameters if isinstance(w := getattr(layer, name), GatheredCodes)}
    if torch.is_grad_enabled() and any(weight.requires_grad for weight in quantized.values()):
        raise RuntimeError(
            "A high-precision forward of weights whose quantized values FSDP2 gathers has no gradient. Run it under torch.no_grad(), or "
            "train with quantize_learner=False."
        )
    vars(layer).update({name: whole(weight.shard) for name, weight in quantized.items()})  # found before parameters
    try:
        yield
    finally:
        for name in quantized:
            del vars(layer)[name]


def _is_packed(weight: Tensor) -> bool:
    return isinstance(weight, DTensor) and isinstance(weight.to_local(), CodedMaster)


@torch.no_grad()
def _load_packed(layer: LowBitLayer, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Shards that take the place of a `CodedMaster` (`assign=True`, as accelerate loads) become one."""
    for name in getattr(layer, "packed_parameters", ()):  # none after `restore`
        given = state_dict.get(prefix + name)
        if isinstance(given, DTensor) and _is_packed(getattr(layer, name)):
            packed, mesh, placements = CodedMaster(own_rows(given), name), given.device_mesh, given.placements
            size, stride = given.shape, given.stride()
            state_dict[prefix + name] = DTensor.from_local(packed, mesh, placements, shape=size, stride=stride)


class CodedMaster(Tensor):
    """
    A master, whole or the rows of this process, of which FSDP2 gathers quantized values; to all else it is the tensor it was made of.

    Attributes:
        plain (`Tensor`): That tensor, in the same memory.
        parameter (`str`): Its name in its module, a `LowBitLayer`.
    """

    plain: Tensor
    parameter: str
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, plain: Tensor, parameter: str) -> CodedMaster:
        master = Tensor._make_subclass(cls, plain)
        master.plain, master.parameter = plain, parameter
        return master

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        plain_args, plain_kwargs = tree_map_only(cls, cls._same_memory, (args, kwargs or {}))
        result = func(*plain_args, **plain_kwargs)
        # accelerate shards what it has moved to the meta device.
        if func in _SAME_KIND or (func is _aten._to_copy.default and result.is_meta):
            return cls(result, args[0].parameter)
        return result

    def _same_memory(self) -> Tensor:
        if self.data_ptr() != self.plain.data_ptr():
            raise RuntimeError(
                f"A master {self.parameter!r} whose quantized values FSDP2 gathers was given other memory (`param.data = ...`). "
                "Write to it in place, or load it with `load_state_dict(assign=True)`."
            )
        return self.plain

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> CodedMaster:
        copied = type(self)(self.plain.detach().clone(), self.parameter)
        copied.requires_grad_(self.requires_grad)
        if isinstance(self, nn.Parameter):
            copied = nn.Parameter(copied, self.requires_grad)
        return memo.setdefault(id(self), copied)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: LowBitLayer, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """The packed quantized values and the scales of these rows, and what they are of."""
        if not gathers_quantized(outer_size, mesh.size(), module.scheme):
            raise RuntimeError(
                f"Quantized values of a weight {tuple(outer_size)} cannot be gathered from {mesh.size()} processes: each must "
                "have equally many rows that depend on none of another's. Shard the model with as many as `gather_quantized` was told."
            )
        own = own_quantized(module, self.parameter)
        tensors = {name: tensor for name, tensor in own.tensors.items() if name != "weight_shape"}
        return tuple(tensors.values()), (own, tuple(tensors), outer_size, getattr(module, self.parameter))

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[()]] | None:
        """What stands for the whole weight in the forward: a new one, or `out`, given its quantized values again."""
        own, names, size, shard = metadata
        tensors = dict(zip(names, outputs, strict=True))
        if "weight_shape" in own.tensors:
            tensors["weight_shape"] = torch.tensor((math.prod(size[:-1]), size[-1]))
        weight = LowBitWeight(dict(sorted(tensors.items())), own.scheme)
        if out is not None:
            out.held[:] = weight, shard
            return None
        return GatheredCodes(size, dtype, outputs[0].device, [weight, shard]), ()


class GatheredCodes(Tensor):
    """
    Stands for a whole weight, of which only the quantized values are there, as the leaf that receives the gradient.

    Attributes:
        held (`list`): The quantized values, until FSDP2 frees them, and the `DTensor` they are of.
    """

    held: list[Any]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, size: torch.Size, dtype: torch.dtype, device: torch.device, held: list[Any]) -> GatheredCodes:
        weight = Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=device)
        weight.held = held
        return weight

    @property
    def low_bit(self) -> LowBitWeight:
        return self.held[0]

    @property
    def shard(self) -> DTensor:
        return self.held[1]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        weight = args[0]
        if func in (_aten.detach.default, _aten.as_strided.default):
            return cls(weight.shape, weight.dtype, weight.device, weight.held)
        if func is _aten.zeros_like.default:
            return torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
        raise RuntimeError(
            f"{func} wants the weight {tuple(weight.shape)}, of which FSDP2 has gathered the quantized values alone. Only the layer's "
            "forward can use them; read parameters as `DTensor`s, outside of it."
        )
