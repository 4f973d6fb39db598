"""Low-bit weights of matrices that FSDP2 shards: each process quantizes its own rows, and then gathers the quantized
values.

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

from ..quantize import LowBitWeight, quantize_weight, rows_together
from ..scheme import MASTER_CAST_DTYPE, has_global_scale


def is_partitioned(param: Tensor) -> bool:
    """Whether ZeRO-3 holds `param`: it is empty, or whole at a different address in each forward."""
    # DeepSpeed marks such parameters. Its own functions would need the package, which is optional.
    return hasattr(param, "ds_id")


def shape_of(param: Tensor) -> torch.Size:
    """The shape of the whole `param`, also while ZeRO-3 keeps it empty."""
    return getattr(param, "ds_shape", param.shape)


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """`tensor` itself, or the whole of a sharded one (collective); sharded floats are cast to bfloat16 first."""
    if not isinstance(tensor, DTensor):
        return tensor

    # The quantizer and an engine begin with the same cast, so half of the bytes need not move.
    sent: Any = tensor.to(MASTER_CAST_DTYPE) if tensor.is_floating_point() else tensor
    return sent.full_tensor()


@torch.no_grad()
def quantize_shards(weight: DTensor, scheme: QuantizationScheme, rows: LowBitWeight | None = None) -> LowBitWeight:
    """
    `quantize_weight` of a whole sharded weight. Collective: every process must call it.

    If several processes hold rows that depend on each other (blocks, words of zero points, a global scale), it gathers
    the weight itself, in bfloat16: the result is the same, but more bytes move.

    Args:
        weight: `(out, in)`, or for experts `(experts, out, in)`.
        scheme: How it is quantized.
        rows: The result of `quantize_rows`, if it is there already.

    Raises:
        ValueError: that of `quantize_weight`, in the process that holds the rows; the launcher then ends the others.
    """
    unit = _unit(weight, scheme)
    # From the whole weight each process makes the same bytes, without another collective.
    if unit is None:
        return quantize_weight(whole(weight).flatten(0, -2), scheme)

    if rows is None:
        rows = quantize_rows(weight, scheme)
    # `rows` has `(rows, ...)` tensors, and an entry of the first dimension may be an expert with many rows.
    units_here = rows.shape[0] // (unit * math.prod(weight.shape[1:-1]))
    # A process without rows quantized one unit of zeros, which it must not send.
    units_sent = len(local_rows(weight)) // unit

    tensors = {}
    for name, tensor in rows.data.items():
        # As bytes, because some collectives do not support float8; one row per unit.
        sent = tensor.reshape(units_here, -1).view(torch.uint8)[:units_sent]
        size = torch.Size((len(weight) // unit, sent.shape[1]))
        placed = DTensor.from_local(sent, weight.device_mesh, weight.placements, shape=size, stride=(size[1], 1))
        gathered = placed.full_tensor().clone()  # with unequal shards it is a part of a larger tensor
        # Back from bytes to the dtype and the width of one row.
        tensors[name] = gathered.view(tensor.dtype).view(-1, tensor.shape[1])
    return LowBitWeight(tensors, scheme)


@torch.no_grad()
def quantize_rows(weight: DTensor, scheme: QuantizationScheme) -> LowBitWeight:
    """
    The low-bit rows of this process, or a unit of zeros if it has none; arguments and conditions as for
    `quantize_shards`.
    """
    rows = local_rows(weight)
    # A process without rows must still take part in the gather, with tensors of the same names, dtypes and widths.
    if not len(rows):
        unit = cast(int, _unit(weight, scheme))
        rows = rows.new_zeros(unit, *rows.shape[1:])
    return quantize_weight(rows.flatten(0, -2), scheme)


@torch.no_grad()
def local_rows(weight: DTensor) -> Tensor:
    """The part of a sharded weight in this process, as an ordinary tensor."""
    rows = weight.to_local().detach()
    return getattr(rows, "plain", rows)  # a `MasterShard` has it


def unit_of(shape: Sequence[int], ranks: int, scheme: QuantizationScheme) -> int | None:
    """
    Number of entries of the first dimension of a weight in one unit, which is quantized independently.

    Args:
        shape: Of the whole weight.
        ranks: Number of processes that share the first dimension.
        scheme: How the weight is quantized.

    Returns:
        `None` if a unit would span several processes.
    """
    if has_global_scale(scheme):
        return None

    # An entry of the first dimension is a row, or all the rows of an expert: what FSDP2 never cuts.
    rows = math.prod(shape[1:-1])
    together = rows_together(scheme)
    # Several entries if one has fewer rows than share a scale; otherwise one, which must hold whole blocks.
    unit = max(1, together // rows)
    if unit * rows % together:
        return None

    # FSDP2 cuts as `torch.chunk` does: all processes get this many entries, except the last ones.
    most_entries = math.ceil(shape[0] / ranks)
    if shape[0] % unit or most_entries % unit:
        return None
    return unit


def _unit(weight: DTensor, scheme: QuantizationScheme) -> int | None:
    # HSDP shards over one dimension of the mesh and replicates over the other.
    sharded_over = [dim for dim, placement in enumerate(weight.placements) if not placement.is_replicate()]
    if len(sharded_over) != 1:
        return None

    (dim,) = sharded_over
    if weight.placements[dim] != Shard(0):
        return None
    return unit_of(weight.shape, weight.device_mesh.size(dim), scheme)
