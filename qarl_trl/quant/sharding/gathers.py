"""FSDP2 gathers the quantized values of a weight instead of the weight, and no process keeps those of the others.

torch calls a shard's `fsdp_pre_all_gather` for the tensors to gather, and its `fsdp_post_all_gather` for the parameter
to build (`torch.distributed.fsdp._fully_shard._fsdp_param`: "extensions", which torchao's float8 weights also use).
Both are methods of a class, because FSDP2 makes new tensors from a parameter (`new_zeros`, `narrow`, `detach`), which
keep its class but not attributes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from ..quantize import LowBitWeight
from .shards import local_rows, unit_of, whole


_aten = torch.ops.aten
# Operations of FSDP2 and `nn.Parameter` whose result must again be a `MasterShard`. FSDP2 copies the rows of this
# process to a padded `new_zeros` of the parameter, takes views of that, and looks for its two methods on the views.
_SAME_KIND = {op.default for op in (_aten.detach, _aten.alias, _aten.view, _aten.new_zeros)} | {_aten.slice.Tensor}


def can_gather_quantized(shape: Sequence[int], ranks: int, scheme: QuantizationScheme) -> bool:
    """Whether `ranks` processes have equal numbers of rows of a weight of `shape`, independent of each other's."""
    return ranks > 1 and shape[0] % ranks == 0 and unit_of(shape, ranks, scheme) is not None


class MasterShard(Tensor):
    """
    A master weight (whole, or the rows of this process) whose quantized values FSDP2 gathers; otherwise it behaves as
    `plain`.

    Attributes:
        plain: The ordinary tensor in the same memory.
        parameter: Its name in its module, a `LowBitLayer`.
    """

    plain: Tensor
    parameter: str
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, plain: Tensor, parameter: str) -> MasterShard:
        master = Tensor._make_subclass(cls, plain)
        master.plain = plain
        master.parameter = parameter
        return master

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        # The operation runs on plain tensors; otherwise it would come back here.
        plain_args, plain_kwargs = tree_map_only(cls, cls._same_memory, (args, kwargs or {}))
        result = func(*plain_args, **plain_kwargs)

        # accelerate moves parameters to the meta device before it shards them.
        moved_to_meta = func is _aten._to_copy.default and result.is_meta
        if func in _SAME_KIND or moved_to_meta:
            return cls(result, args[0].parameter)
        return result

    def _same_memory(self) -> Tensor:
        """`plain`, if it is still in the memory of this tensor."""
        # `param.data = ...` replaces the memory of this tensor only. Operations would go on with the old weights.
        if self.data_ptr() != self.plain.data_ptr():
            raise RuntimeError(
                f"The master weight {self.parameter!r}, whose quantized values FSDP2 gathers, was given other memory "
                "(`param.data = ...`). Write to it in place, or load it with `load_state_dict(assign=True)`."
            )
        return self.plain

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.__reduce_ex__(protocol)  # a checkpoint of shards holds plain tensors

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """
        Return the tensors that FSDP2 sends for these rows, the low-bit ones, and the metadata for
        `fsdp_post_all_gather`.

        FSDP2 calls it before every forward and backward of `module`, the `LowBitLayer` with the parameter; the first
        call of a step quantizes the rows. The tensors must have the same sizes in every process and every call,
        because FSDP2 keeps the buffers: so processes with unequal numbers of rows cannot use it.
        """
        if not can_gather_quantized(outer_size, mesh.size(), module.scheme):
            raise RuntimeError(
                f"Quantized values of a weight {tuple(outer_size)} cannot be gathered from {mesh.size()} processes. "
                "Shard the model with as many as `prepare_gathers` was told."
            )

        rows = module.store.rows_of(module, self.parameter)
        # Before the gather the module's parameter is the `DTensor` of all shards. `whole_weights` may need it later,
        # when the module has the gathered parameter in its place.
        sharded = getattr(module, self.parameter)
        return tuple(rows.data.values()), (rows, outer_size, sharded)

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: GatheredWeight | None = None
    ) -> tuple[Tensor, tuple[()]] | None:
        """
        Return the parameter for the forward: a new `GatheredWeight`; or fill `out`, the one from last time.

        FSDP2 owns the memory of `outputs` and frees it after each forward and backward; so we return no inner tensors
        to free.
        """
        rows, size, sharded = metadata
        # `outputs` are the rows of all processes, one after the other: `can_gather_quantized` made sure
        # that each process has equally many.
        weight = LowBitWeight(dict(zip(rows.data, outputs, strict=True)), rows.scheme)

        # FSDP2 keeps the parameter of its first gather, because gradients accumulate in its `grad`.
        if out is not None:
            out.content.low_bit = weight
            out.content.sharded = sharded
            return None
        return GatheredWeight(size, dtype, outputs[0].device, _Content(weight, sharded)), ()


@dataclass
class _Content:
    """What a [`GatheredWeight`] stands for: the whole low-bit weight, and the `DTensor` of its master weights."""

    low_bit: LowBitWeight
    sharded: DTensor


class GatheredWeight(Tensor):
    """
    Parameter in a forward, with the low-bit weight in place of numbers. It is the leaf that gets the gradient of the
    whole weight, which no process has.

    Any operation on it is an error. An ordinary tensor without memory would crash, or compute with garbage.

    Attributes:
        content: One object for this parameter and the tensors that autograd and FSDP2 detach from it.
    """

    content: _Content
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, size: torch.Size, dtype: torch.dtype, device: torch.device, content: _Content) -> GatheredWeight:
        weight = Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=device)
        weight.content = content
        return weight

    @property
    def low_bit(self) -> LowBitWeight:
        """The low-bit weight, whole."""
        return self.content.low_bit

    @property
    def sharded(self) -> DTensor:
        """The master weights."""
        return self.content.sharded

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        weight = args[0]
        # FSDP2 and `nn.Parameter` apply these two to what `fsdp_post_all_gather` returns.
        if func in (_aten.detach.default, _aten.as_strided.default):
            return cls(weight.shape, weight.dtype, weight.device, weight.content)

        # FSDP2 reduces zeros for a weight that got no gradient in this process.
        if func is _aten.zeros_like.default:
            return torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)

        raise RuntimeError(
            f"{func} needs the weight {tuple(weight.shape)}, but FSDP2 gathered only its quantized values, for the "
            "layer's forward. Read parameters as `DTensor`s, outside of the forward."
        )


@torch.no_grad()  # else `to_local` returns a view
def is_master_shard(weight: Tensor) -> bool:
    """Whether FSDP2 shards `weight`, and gathers its quantized values instead of itself."""
    return isinstance(weight, DTensor) and isinstance(weight.to_local(), MasterShard)


def make_master_shards(layers: Iterable[Any], ranks: int, device: torch.device) -> None:
    """
    Make FSDP2 gather quantized values for `layers`. Call it before FSDP2 shards them.

    FSDP2 still gathers whole weights for layers with an adapter, for master weights that are not float32, where
    processes have unequal or dependent rows, and where the gemm keeps its own form of the quantized values.

    Args:
        layers: `LowBitLayer`s.
        ranks: Number of processes that will share a copy of the weights.
        device: Where the forward will run.
    """
    for layer in layers:
        # A forward in high precision needs the weight. A gemm that prepares its own form of the quantized values would
        # prepare it in each forward and backward, because FSDP2 frees in between what it gathered.
        if not layer.quantized_forward or layer.gemm_for(layer.scheme, device).prepares:
            continue

        for name, weight in list(layer.named_parameters(recurse=False)):
            # accelerate replaces master weights of another dtype, by `param.data = ...`.
            is_plain = type(weight) is nn.Parameter and weight.dtype == torch.float32
            can_gather = name in layer.gatherable and can_gather_quantized(weight.shape, ranks, layer.scheme)
            if is_plain and can_gather:
                master = MasterShard(weight.detach(), name)
                setattr(layer, name, nn.Parameter(master, requires_grad=weight.requires_grad))
        layer.register_load_state_dict_pre_hook(_load_as_master_shards)


@torch.no_grad()
def _load_as_master_shards(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Make a `MasterShard` of each shard that replaces one."""
    # With `assign=True`, as accelerate loads, the loaded tensors become the parameters. As ordinary shards they would
    # make FSDP2 gather whole weights from then on.
    for name, present in module.named_parameters(recurse=False):
        loaded = state_dict.get(prefix + name)
        if isinstance(loaded, DTensor) and is_master_shard(present):
            state_dict[prefix + name] = DTensor.from_local(
                MasterShard(local_rows(loaded), name),
                loaded.device_mesh,
                loaded.placements,
                shape=loaded.shape,
                stride=loaded.stride(),
            )


@contextmanager
def whole_weights(module: nn.Module) -> Iterator[None]:
    """
    Inside this context, weights whose quantized values FSDP2 gathered are whole, in bfloat16: for forwards in high
    precision.

    Collective. The master weights get no gradient from them.
    """
    gathered = {}
    for name, weight in module.named_parameters(recurse=False):
        if isinstance(weight, GatheredWeight):
            gathered[name] = whole(weight.sharded)

    vars(module).update(gathered)  # an attribute comes before a parameter of that name
    try:
        yield
    finally:
        for name in gathered:
            del vars(module)[name]
