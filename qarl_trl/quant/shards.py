"""Low-bit weights of matrices that FSDP2 shards: each process quantizes its own rows, and then gathers the quantized values.

Invariant: every process gets the bytes of `quantize_weight` of the whole matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from .quantize import LowBitWeight, quantize_weight, rows_together
from .scheme import MASTER_CAST_DTYPE, has_global_scale


def is_partitioned(param: Tensor) -> bool:
    """Whether ZeRO-3 holds `param`: it is empty, or whole at a different address in each forward."""
    return hasattr(param, "ds_id")


def shape_of(param: Tensor) -> torch.Size:
    """The shape of the whole `param`, also while ZeRO-3 keeps it empty."""
    return getattr(param, "ds_shape", param.shape)


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """`tensor` itself, or the whole of a sharded one (collective); sharded floats are cast to bfloat16 first."""
    if not isinstance(tensor, DTensor):
        return tensor
    sent: Any = tensor.to(MASTER_CAST_DTYPE) if tensor.is_floating_point() else tensor
    return sent.full_tensor()


@torch.no_grad()
def quantize_shards(weight: DTensor, scheme: QuantizationScheme, own: LowBitWeight | None = None) -> LowBitWeight:
    """
    `quantize_weight` of a whole sharded weight. Collective: every process must call it.

    If several processes hold rows that depend on each other (blocks, words of zero points, a global scale), it gathers the weight
    itself, in bfloat16: the result is the same, but more bytes move.

    `weight` is `(out, in)`, or for experts `(experts, out, in)`; `own` is the result of `quantize_own`. Raises the `ValueError` of
    `quantize_weight` in the process that holds the rows; the launcher then ends the others.
    """
    unit = _unit(weight, scheme)
    if unit is None:
        return quantize_weight(whole(weight).flatten(0, -2), scheme)
    part = quantize_own(weight, scheme) if own is None else own
    units = part.shape[0] // (unit * math.prod(weight.shape[1:-1]))
    tensors = {}
    for name, tensor in part.data.items():
        # As bytes, because some collectives do not support float8; one row per unit.
        rows = tensor.reshape(units, -1).view(torch.uint8)[: len(own_rows(weight)) // unit]
        size = torch.Size((len(weight) // unit, rows.shape[1]))
        placed = DTensor.from_local(rows, weight.device_mesh, weight.placements, shape=size, stride=(size[1], 1))
        gathered = placed.full_tensor().clone()  # with unequal shards it is a part of a larger tensor
        tensors[name] = gathered.view(tensor.dtype).view(-1, tensor.shape[1])
    return LowBitWeight(tensors, scheme)


@torch.no_grad()
def quantize_own(weight: DTensor, scheme: QuantizationScheme) -> LowBitWeight:
    """The low-bit rows of this process, or a unit of zeros if it has none; arguments and conditions as for `quantize_shards`."""
    own = own_rows(weight)
    if not len(own):
        return quantize_weight(own.new_zeros(cast(int, _unit(weight, scheme)), *own.shape[1:]).flatten(0, -2), scheme)
    return quantize_weight(own.flatten(0, -2), scheme)


@torch.no_grad()
def own_rows(weight: DTensor) -> Tensor:
    """The part of a sharded weight in this process, as an ordinary tensor."""
    own = weight.to_local().detach()
    return getattr(own, "plain", own)  # a `MasterShard` has it


def unit_of(shape: Sequence[int], ranks: int, scheme: QuantizationScheme) -> int | None:
    """
    Number of entries of the first dimension of `shape` in one unit, which is quantized independently.

    `None` if a unit would span several of the `ranks` processes that share the dimension.
    """
    rows, together = math.prod(shape[1:-1]), rows_together(scheme)
    unit = max(1, together // rows)
    most = math.ceil(shape[0] / ranks)  # in each process, except the last ones
    if has_global_scale(scheme) or shape[0] % unit or most % unit or unit * rows % together:
        return None
    return unit


def _unit(weight: DTensor, scheme: QuantizationScheme) -> int | None:
    cut = [dim for dim, placement in enumerate(weight.placements) if not placement.is_replicate()]
    if len(cut) != 1 or weight.placements[cut[0]] != Shard(0):
        return None
    return unit_of(weight.shape, weight.device_mesh.size(cut[0]), scheme)
