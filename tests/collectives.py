"""Counts the bytes that collectives really move; every process counts what it receives."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


# Collectives in name only, which move nothing.
MOVES_NOTHING = ("wait_tensor", "wrap_tensor")


class MovedBytes(TorchDispatchMode):
    """
    Bytes that collectives move within the block; FSDP2's of forward and backward too.

    A collective that it does not know is an error.

    Attributes:
        gathered: What all-gathers brought from other processes.
        reduced: What FSDP2's reduce-scatters brought from other processes.
        summed: What all-reduces sum.
    """

    gathered = 0
    reduced = 0
    summed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        # The operation comes again, on the shards.
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented

        self._count(func, args)
        return func(*args, **(kwargs or {}))

    def _count(self, func: Any, args: tuple) -> None:
        # DTensors use `_c10d_functional`, FSDP2 and plain tensors use `c10d`.
        if func is torch.ops._c10d_functional.all_gather_into_tensor.default:
            shard, processes = args[:2]
            self.gathered += shard.nbytes * (processes - 1)
        elif func is torch.ops.c10d._allgather_base_.default:
            output, shard = args[:2]
            self.gathered += output.nbytes - shard.nbytes

        elif func is torch.ops.c10d._reduce_scatter_base_.default:
            shard, everything = args[:2]
            self.reduced += everything.nbytes - shard.nbytes

        elif func is torch.ops._c10d_functional.all_reduce.default:
            self.summed += args[0].nbytes
        elif func is torch.ops.c10d.allreduce_.default:
            for tensor in args[0]:
                self.summed += tensor.nbytes

        # A new version of torch may move bytes by another operation, which would otherwise count as nothing.
        elif "c10d" in func.namespace and not any(name in str(func) for name in MOVES_NOTHING):
            raise NotImplementedError(f"{func} is not counted")
