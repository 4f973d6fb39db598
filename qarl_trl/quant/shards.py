"""Low-bit weights of matrices that FSDP2 has cut: each process quantizes its own rows, and the codes are gathered.

Invariant: the bytes of `quantize_weight` of the whole matrix, in every process.
"""

from __future__ import annotations

import math

import torch
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from .quantize import LowBitWeight, quantize_weight, rows_together
from .scheme import MASTER_CAST_DTYPE, has_global_scale


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """`tensor`, or all of one that is cut (collective): floats in bfloat16, to which they are cast before they move."""
    if not isinstance(tensor, DTensor):
        return tensor
    return (tensor.to(MASTER_CAST_DTYPE) if tensor.is_floating_point() else tensor).full_tensor()


@torch.no_grad()
def quantize_shards(
    weight: DTensor, scheme: QuantizationScheme, qparams: tuple[Tensor, Tensor | None] | None = None
) -> LowBitWeight:
    """
    `quantize_weight` of the whole of a cut weight. Collective: every process has to call it.

    Where rows that depend on each other (blocks, words of zero points, a global scale) lie in several processes, the weight
    itself is gathered, in bfloat16: the same result, of which more was moved.

    Args:
        weight (`DTensor`): Master weight `(out, in)`, or of experts `(experts, out, in)`.
        scheme (`QuantizationScheme`): As in `quantize_weight`.
        qparams (`tuple[Tensor, Tensor | None]`, *optional*): Frozen scale and zero point of the whole weight.

    Raises:
        ValueError: as `quantize_weight`; in every process, when in one.
    """
    place = _place(weight, scheme)
    if place is None:
        return quantize_weight(whole(weight).flatten(0, -2), scheme, qparams)
    unit, first = place
    own, total = weight.to_local(), len(weight)
    if qparams is not None:
        last = first + len(own)
        qparams = tuple(t if t is None else t[first * len(t) // total : last * len(t) // total] for t in qparams)
    part, failure = _quantize_own(own, unit, scheme, qparams)
    # Tensors side by side, one row of bytes for each unit: one collective moves them all.
    tensors = {name: tensor for name, tensor in part.tensors.items() if name != "weight_shape"}
    units = part.shape[0] // (unit * math.prod(weight.shape[1:-1]))
    rows = [tensor.reshape(units, -1).view(torch.uint8) for tensor in tensors.values()]
    sent = torch.cat(rows, 1)[: len(own) // unit]
    size = torch.Size((total // unit, sent.shape[1]))
    placed = DTensor.from_local(sent, weight.device_mesh, weight.placements, shape=size, stride=(size[1], 1))
    pieces = placed.full_tensor().split([row.shape[1] for row in rows], 1)
    for (name, tensor), piece in zip(tensors.items(), pieces, strict=True):
        piece = piece.clone(memory_format=torch.contiguous_format)
        tensors[name] = piece.flatten().view(tensor.dtype).view(-1, tensor.shape[1])
    if failure is not None:
        raise failure
    if not torch.isfinite(tensors["weight_scale"]).all():
        raise ValueError(
            f"Another process could not quantize its rows of a weight {tuple(weight.shape)}, and says why."
        )
    if "weight_shape" in part.tensors:
        tensors["weight_shape"] = torch.tensor((math.prod(weight.shape[:-1]), weight.shape[-1]))
    return LowBitWeight(dict(sorted(tensors.items())), scheme)


def _place(weight: DTensor, scheme: QuantizationScheme) -> tuple[int, int] | None:
    """
    How many entries of the first dimension are one unit, which is quantized by itself, and the first entry of this process.

    `None` where a unit may lie in several processes.
    """
    cut = [dim for dim, placement in enumerate(weight.placements) if not placement.is_replicate()]
    if len(cut) != 1 or weight.placements[cut[0]] != Shard(0) or has_global_scale(scheme):
        return None
    rows, together, mesh = math.prod(weight.shape[1:-1]), rows_together(scheme), weight.device_mesh
    unit = max(1, together // rows)
    most = math.ceil(len(weight) / mesh.size(cut[0]))  # what each process has, but for the last ones
    if len(weight) % unit or most % unit or unit * rows % together:
        return None
    return unit, min(len(weight), most * mesh.get_local_rank(cut[0]))


def _quantize_own(
    own: Tensor, unit: int, scheme: QuantizationScheme, qparams: tuple[Tensor, Tensor | None] | None
) -> tuple[LowBitWeight, ValueError | None]:
    """
    The rows of this process, a unit of zeros where it has none; and what is wrong with them.

    Others wait for these rows all the same. Scales of NaN, which no others are, then say that they are none.
    """
    if not len(own):
        return quantize_weight(own.new_zeros(unit, *own.shape[1:]).flatten(0, -2), scheme), None
    try:
        return quantize_weight(own.flatten(0, -2), scheme, qparams), None
    except ValueError as error:
        part = quantize_weight(torch.zeros_like(own).flatten(0, -2), scheme)
        part.scale.fill_(math.nan)
        return part, error
