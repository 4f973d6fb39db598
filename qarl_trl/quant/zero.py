"""DeepSpeed ZeRO-3, which keeps of a parameter a flat piece elsewhere, and its values only while a module that owns it runs."""

from __future__ import annotations

import torch
from torch import Tensor


def is_partitioned(param: Tensor) -> bool:
    """Whether ZeRO-3 holds `param`: empty, or whole at an address of its own in each forward."""
    return hasattr(param, "ds_id")


def shape_of(param: Tensor) -> torch.Size:
    """The shape of the whole `param`, which may be empty at the moment."""
    return getattr(param, "ds_shape", param.shape)
