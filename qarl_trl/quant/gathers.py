"""FSDP2 gathers the codes of a weight instead of the weight, and no process keeps those of the others.

torch asks a shard that has `fsdp_pre_all_gather` what to gather, and its `fsdp_post_all_gather` what to make of it
(`torch.distributed.fsdp._fully_shard._fsdp_param`: "extensions", as torchao's float8 weights use them).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from .quantize import LowBitWeight
from .shards import own_rows, quantize_own, quantize_shards, unit_of


if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationScheme

    from .linear import LowBitLayer


_aten = torch.ops.aten
# What FSDP2 and `nn.Parameter` make of a tensor that has to be one of its kind again.
_SAME_KIND = {op.default for op in (_aten.detach, _aten.alias, _aten.view, _aten.new_zeros)} | {_aten.slice.Tensor}


def gathers_codes(shape: Sequence[int], ranks: int, scheme: QuantizationScheme) -> bool:
    """Whether `ranks` processes have equally many rows of a weight of `shape`, none of which depend on those of another."""
    return ranks > 1 and shape[0] % ranks == 0 and unit_of(shape, ranks, scheme) is not None


def gather_codes(layers: Iterable[LowBitLayer], ranks: int, device: torch.device) -> None:
    """
    Let FSDP2, which is about to cut the parameters of `layers` for `ranks` processes, gather codes of them.

    Not of adapted layers, of masters that are not float32, where rows are uneven or depend on those of another process, where
    the product on `device` keeps something made of the codes, or with `keep_dequantized`: those weights it gathers, as ever.
    """
    for layer in layers:
        if not layer.quantized_forward or layer.keep_dequantized or layer.product_for(layer.scheme, device).prepares:
            continue
        coded = {
            name: weight
            for name, weight in layer.named_parameters(recurse=False)
            # accelerate writes masters of another dtype anew, by `param.data = ...`.
            if name in layer.coded_parameters and type(weight) is nn.Parameter and weight.dtype == torch.float32
            if gathers_codes(weight.shape, ranks, layer.scheme)
        }
        for name, weight in coded.items():
            master = CodedMaster(weight.detach(), name)
            setattr(layer, name, nn.Parameter(master, requires_grad=weight.requires_grad))
        if coded:
            layer.register_load_state_dict_pre_hook(_load_coded)


@torch.no_grad()
def own_codes(layer: LowBitLayer, parameter: str) -> LowBitWeight:
    """The low-bit rows of this process, of a parameter with gathered codes; made once per optimizer step."""
    weight, slot = getattr(layer, parameter), "" if parameter == "weight" else parameter
    qparams = layer.qparams_of(parameter, weight.device)
    quantize = partial(quantize_own, scheme=layer.scheme, qparams=qparams)
    return layer._code_cache.get(slot, (weight,), None, quantize, (weight.to_local().data_ptr(),))


@torch.no_grad()
def gathered_codes(layer: LowBitLayer, parameter: str, weight: Tensor | None) -> LowBitWeight | None:
    """The low-bit weight of a parameter (or of `weight` in its place) with gathered codes; `None` of another."""
    own = getattr(layer, parameter)
    weight = own if weight is None else weight
    if isinstance(weight, GatheredCodes):
        return weight.low_bit
    if not _is_coded(own) or not isinstance(weight, DTensor):
        return None
    same = weight.to_local().data_ptr() == own.to_local().data_ptr()
    qparams = layer.qparams_of(parameter, weight.device)
    return quantize_shards(weight, layer.scheme, qparams, own_codes(layer, parameter) if same else None)


def _is_coded(weight: Tensor) -> bool:
    return isinstance(weight, DTensor) and isinstance(weight.to_local(), CodedMaster)


@torch.no_grad()
def _load_coded(layer: LowBitLayer, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Shards that take the place of a `CodedMaster` (`assign=True`, as accelerate loads) become one."""
    for name in layer.coded_parameters:
        given = state_dict.get(prefix + name)
        if isinstance(given, DTensor) and _is_coded(getattr(layer, name)):
            coded, mesh, placements = CodedMaster(own_rows(given), name), given.device_mesh, given.placements
            size, stride = given.shape, given.stride()
            state_dict[prefix + name] = DTensor.from_local(coded, mesh, placements, shape=size, stride=stride)


class CodedMaster(Tensor):
    """
    A master, whole or the rows of this process, of which FSDP2 gathers codes; to all else it is the tensor it was made of.

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
        plain_args, plain_kwargs = tree_map_only(cls, lambda master: master.plain, (args, kwargs or {}))
        result = func(*plain_args, **plain_kwargs)
        # accelerate shards what it has moved to the meta device.
        if func in _SAME_KIND or (func is _aten._to_copy.default and result.is_meta):
            return cls(result, args[0].parameter)
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.__reduce_ex__(protocol)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: LowBitLayer, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """The packed codes and the scales of these rows, and what they are of."""
        own = own_codes(module, self.parameter)
        tensors = {name: tensor for name, tensor in own.tensors.items() if name != "weight_shape"}
        return tuple(tensors.values()), (own, tuple(tensors), outer_size)

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[()]] | None:
        """What stands for the whole weight in the forward: a new one, or `out`, given its codes again."""
        own, names, size = metadata
        tensors = dict(zip(names, outputs, strict=True))
        if "weight_shape" in own.tensors:
            tensors["weight_shape"] = torch.tensor((math.prod(size[:-1]), size[-1]))
        weight = LowBitWeight(dict(sorted(tensors.items())), own.scheme)
        if out is not None:
            out.held[0] = weight
            return None
        return GatheredCodes(size, dtype, outputs[0].device, [weight]), ()


class GatheredCodes(Tensor):
    """
    Stands for a whole weight, of which only the codes are there, as the leaf that receives the gradient.

    Attributes:
        held (`list[LowBitWeight]`): The codes, until FSDP2 frees them.
    """

    held: list[LowBitWeight]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(
        cls, size: torch.Size, dtype: torch.dtype, device: torch.device, held: list[LowBitWeight]
    ) -> GatheredCodes:
        weight = Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=device)
        weight.held = held
        return weight

    @property
    def low_bit(self) -> LowBitWeight:
        return self.held[0]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        weight = args[0]
        if func in (_aten.detach.default, _aten.as_strided.default):
            return cls(weight.shape, weight.dtype, weight.device, weight.held)
        if func is _aten.zeros_like.default:
            return torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
        raise RuntimeError(
            f"{func} wants the weight {tuple(weight.shape)}, of which FSDP2 has gathered the codes alone. Only the layer's "
            "forward can use them; read parameters as `DTensor`s, outside of it."
        )
