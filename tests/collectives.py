"""Counts the bytes that collectives really move; every process counts what it receives."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class MovedBytes(TorchDispatchMode):
    """
    `gathered`: bytes that all-gathers brought from other processes within the block; FSDP2's of forward and backward too.

    `reduced`: bytes of its reduce-scatters. `summed`: bytes of what an all-reduce sums. Another collective is an error.
    """

    gathered = reduced = summed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes again as operations on the shards
        if func is torch.ops._c10d_functional.all_gather_into_tensor.default:
            shard, processes = args[:2]
            self.gathered += shard.nbytes * (processes - 1)
        elif func is torch.ops.c10d._allgather_base_.default:
            self.gathered += args[0].nbytes - args[1].nbytes
        elif func is torch.ops.c10d._reduce_scatter_base_.default:
            self.reduced += args[1].nbytes - args[0].nbytes
        elif func is torch.ops._c10d_functional.all_reduce.default:
            self.summed += args[0].nbytes
        elif func is torch.ops.c10d.allreduce_.default:
            self.summed += sum(tensor.nbytes for tensor in args[0])
        elif "c10d" in func.namespace and not any(waits in str(func) for waits in ("wait_tensor", "wrap_tensor")):
            raise NotImplementedError(f"{func} is not counted")
        return func(*args, **(kwargs or {}))
