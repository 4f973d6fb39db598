"""Low-bit weights of matrices that FSDP2 has cut: each process quantizes its own rows, and the quantized values are gathered.

Invariant: the bytes of `quantize_weight` of the whole matrix, in every process.
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
    """Whether ZeRO-3 holds `param`: empty, or whole at an address of its own in each forward."""
    return hasattr(param, "ds_id")


def shape_of(param: Tensor) -> torch.Size:
    """The shape of the whole `param`, which under ZeRO-3 may be empty at the moment."""
    return getattr(param, "ds_shape", param.shape)


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """`tensor`, or all of one that is cut (collective): floats in bfloat16, to which they are cast before they move."""
    if not isinstance(tensor, DTensor):
        return tensor
    sent: Any = tensor.to(MASTER_CAST_DTYPE) if tensor.is_floating_point() else tensor
    return sent.full_tensor()


@torch.no_grad()
def quantize_shards(weight: DTensor, scheme: QuantizationScheme, own: LowBitWeight | None = None) -> LowBitWeight:
    """
    `quantize_weight` of the whole of a cut weight. Collective: every process has to call it.

    Where rows that depend on each other (blocks, words of zero points, a global scale) lie in several processes, the weight
    itself is gathered, in bfloat16: the same result, of which more was moved.

    `weight` is `(out, in)`, or of experts `(experts, out, in)`; `own` is what `quantize_own` gave. `ValueError` as of
    `quantize_weight`, in the process whose rows they are; the launcher then ends the others.
    """
    unit = _unit(weight, scheme)
    if unit is None:
        return quantize_weight(whole(weight).flatten(0, -2), scheme)
    part = quantize_own(weight, scheme) if own is None else own
    units = part.shape[0] // (unit * math.prod(weight.shape[1:-1]))
    tensors = {}
    for name, tensor in part.data.items():
        # Bytes, since not every collective takes float8; one row of them for each unit.
        rows = tensor.reshape(units, -1).view(torch.uint8)[: len(own_rows(weight)) // unit]
        size = torch.Size((len(weight) // unit, rows.shape[1]))
        placed = DTensor.from_local(rows, weight.device_mesh, weight.placements, shape=size, stride=(size[1], 1))
        gathered = placed.full_tensor().clone()  # of uneven rows it is a part of a larger tensor
        tensors[name] = gathered.view(tensor.dtype).view(-1, tensor.shape[1])
    return LowBitWeight(tensors, scheme)


@torch.no_grad()
def quantize_own(weight: DTensor, scheme: QuantizationScheme) -> LowBitWeight:
    """The low-bit rows of this process, a unit of zeros where it has none; arguments and conditions of `quantize_shards`."""
    own = own_rows(weight)
    if not len(own):
        return quantize_weight(own.new_zeros(cast(int, _unit(weight, scheme)), *own.shape[1:]).flatten(0, -2), scheme)
    return quantize_weight(own.flatten(0, -2), scheme)


@torch.no_grad()
def own_rows(weight: DTensor) -> Tensor:
    """What this process holds of a cut weight, as a plain tensor."""
    own = weight.to_local().detach()
    return getattr(own, "plain", own)  # of a `MasterShard`


def unit_of(shape: Sequence[int], ranks: int, scheme: QuantizationScheme) -> int | None:
    """
    How many entries of the first dimension of `shape` are one unit, which is quantized by itself.

    `None` where a unit would lie in several of the `ranks` processes that the dimension is cut for.
    """
    rows, together = math.prod(shape[1:-1]), rows_together(scheme)
    unit = max(1, together // rows)
    most = math.ceil(shape[0] / ranks)  # what each process has, but for the last ones
    if has_global_scale(scheme) or shape[0] % unit or most % unit or unit * rows % together:
        return None
    return unit


def _unit(weight: DTensor, scheme: QuantizationScheme) -> int | None:
    cut = [dim for dim, placement in enumerate(weight.placements) if not placement.is_replicate()]
    if len(cut) != 1 or weight.placements[cut[0]] != Shard(0):
        return None
    return unit_of(weight.shape, weight.device_mesh.size(cut[0]), scheme)
