"""For tests of `qarl-trl plan`: a recipe for 8 GPUs in numbers, any of them replaced, and what an allocator says."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PretrainedConfig

from qarl_trl.tools.plan import model as meta
from qarl_trl.tools.plan.memory.advice import Advice, Trial
from qarl_trl.tools.plan.memory.moments import moments
from qarl_trl.tools.plan.run import GIB, Run


def example_run(model: nn.Module, config: PretrainedConfig, muon: bool = True, **changes: Any) -> Run:
    """The run of a model, which may be without weights; `changes` replace fields of it."""
    optimizer = "muon" if muon else "adamw_torch"
    # Under DDP each rank has all of a tensor, whatever their number.
    ranks_that_gather = changes.get("ranks", 1) if changes.get("fsdp2") else 1

    # recipes/qwen3-8b-base/w4a16_qarl_tbpo.yaml on an H100.
    fields = {
        "parameters": meta.parameters(model, optimizer, ranks_that_gather),
        "config": config,
        "low_bit_forward": True,
        "memory": 79 * GIB,
        "rows": 4,
        "tokens": 18432,
        "budget": 22528,
        "checkpointing": True,
        "compute": 2,
        "engine": "colocate",
        "utilization": 0.5,
        "sleep": True,
    }
    return Run(**fields | changes)


def model_in_low_bits(folder: Path, scheme: str = "W4A16") -> Path:
    """A folder with the config alone of Qwen2.5-1.5B in a scheme of compressed-tensors."""
    config = meta.read_config("Qwen/Qwen2.5-1.5B")
    groups = {"group_0": preset_name_to_scheme(scheme, ["Linear"])}
    quantization = QuantizationConfig(config_groups=groups, ignore=["lm_head"])
    config.quantization_config = quantization.model_dump() | {"quant_method": "compressed-tensors"}
    config.save_pretrained(folder)
    return folder


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of all tensors together."""
    return sum(tensor.nbytes for tensor in tensors)


def lever_names(advised: Advice) -> set[str]:
    """The names of the levers that were tried alone."""
    return {trial.lever.name for trial in advised.alone}


def trial_of(advised: Advice, name: str) -> Trial:
    """The trial of a lever."""
    return next(trial for trial in advised.alone if trial.lever.name == name)


def resident(run: Run) -> dict[str, int]:
    """Bytes of what stays between the steps of a run, without what is assumed."""
    # Without an engine a rollout holds nothing else.
    rollout = moments(replace(run, engine=""))["rollout"]

    sizes = {}
    for name, size in rollout.items():
        # CUDA's context and the like, which a CPU does not have.
        if "assumed" not in name:
            sizes[name] = size
    return sizes


class ZerosForProducts(TorchDispatchMode):
    """Makes matrix products zeros: no byte depends on values, and a CPU without bfloat16 would compute for minutes."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        aten = torch.ops.aten
        if function in (aten.mm.default, aten.bmm.default):
            left, right = args
        elif function is aten.addmm.default:
            _, left, right = args
        else:
            return function(*args, **(kwargs or {}))

        return left.new_zeros(*left.shape[:-1], right.shape[-1])


def peak_bytes(function: Callable[[], Any], products: bool = False) -> int:
    """
    Most bytes that torch's CPU allocator had out beyond what it had before, by its own account.

    Args:
        function: What allocates.
        products: Compute its matrix products. Without them what it allocates must not depend on values.
    """
    # What is garbage by now could be freed in between, and would count as less than nothing.
    gc.collect()
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with profiler as profile, nullcontext() if products else ZerosForProducts():
        function()

    # The profiler's list is not in the order of time.
    events = sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())

    now = 0
    most = 0
    for event in events:
        if event.name() == "[memory]":
            # Negative for a free.
            now += event.nbytes()
            most = max(most, now)
    return most
