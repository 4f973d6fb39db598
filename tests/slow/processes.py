"""
Several processes on a CPU, as `accelerate launch` sets them up for DDP and FSDP2: a trainer, and what to compare.

accelerate, TRL and vLLM are as they are. One thing is bent: accelerate shards on accelerators only, and `shard_on_cpu`
also here.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quant.schemes import as_bytes as bytes_of

from qarl_trl.validate import placement
from slow.toys import make_trainer


# As `accelerate launch --config_file recipes/accelerate/fsdp2.yaml` puts it into the environment.
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
}
# The mismatch of a bf16 engine and a bf16 learner on transformers' operations (test_mismatch.py).
FLOOR = 0.0102


def shard_on_cpu() -> None:
    """Let accelerate take a plugin for FSDP2 where it would choose DDP, in this process."""
    from accelerate import state

    original = state.AcceleratorState.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        plugin = kwargs.get("fsdp_plugin")
        if plugin is None or self.distributed_type != state.DistributedType.MULTI_CPU:
            return

        # What accelerate does beside an accelerator.
        if self._mixed_precision != "no":
            plugin.set_mixed_precision(self._mixed_precision)
        self.fsdp_plugin = plugin
        self.distributed_type = state.DistributedType.FSDP
        state.PartialState._shared_state["distributed_type"] = state.DistributedType.FSDP

    state.AcceleratorState.__init__ = init
    # A run would be refused, because accelerate as it is would not shard.
    placement.shards_on = lambda device: True


def trainer_of_two(model: str, folder: str, fsdp: bool, **changes: Any) -> Any:
    """The trainer of one of two processes, under FSDP2 or DDP."""
    # Two processes on two cores.
    torch.set_num_threads(1)
    if fsdp:
        os.environ.update(FSDP2)
        shard_on_cpu()

    trainer = make_trainer(model, Path(folder), **changes)

    kind = "FSDP" if fsdp else "MULTI_CPU"
    assert trainer.accelerator.distributed_type == kind
    assert trainer.accelerator.num_processes == 2
    return trainer


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """A copy of a parameter, put together from its shards."""
    if hasattr(parameter, "full_tensor"):
        parameter = parameter.full_tensor()
    return parameter.detach().clone()


def whole_weights(trainer: Any) -> dict[str, torch.Tensor]:
    """The master weights of all processes. Collective."""
    model = trainer.accelerator.unwrap_model(trainer.model)

    weights = {}
    # One after the other, in the same order in all processes: each is a collective under FSDP2.
    for name, parameter in model.named_parameters():
        weights[name] = whole(parameter)
    return weights


# Results are arrays: a tensor that goes through a pipe stays in memory that its process shares, and ends with it.


def whole_arrays(trainer: Any) -> dict[str, np.ndarray]:
    """The master weights of all processes, to return from one. Collective."""
    return as_arrays(whole_weights(trainer))


def as_arrays(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def as_tensors(arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def as_bytes(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, np.ndarray]:
    """Copies of low-bit tensors as bytes: numpy has neither bfloat16 nor float8."""
    return {name: bytes_of(tensor).numpy() for name, tensor in tensors}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two collections of arrays have the same names and the same numbers."""
    if a.keys() != b.keys():
        return False
    return all(np.array_equal(array, b[name]) for name, array in a.items())


@torch.no_grad()
def count_packed(trainer: Any) -> int:
    """Of how many master weights FSDP2 gathers quantized values."""
    from qarl_trl.quant.sharding.gathers import MasterShard

    # Below the `DTensor`, which every parameter is under FSDP2.
    count = 0
    for parameter in trainer.model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        count += isinstance(local, MasterShard)
    return count
