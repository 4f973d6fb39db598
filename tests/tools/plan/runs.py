"""For tests of `qarl-trl plan`: a recipe for 8 GPUs in numbers, any of them replaced, and what an allocator says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from qarl_trl.tools.plan import model as meta
from qarl_trl.tools.plan.memory.moments import moments
from qarl_trl.tools.plan.run import GIB, Run


def example_run(model: nn.Module, config: PretrainedConfig, muon: bool = True, **changes: Any) -> Run:
    """The run of a model, which may be without weights; `changes` replace fields of it."""
    optimizer = "muon" if muon else "adamw_torch"
    ranks_that_gather = changes.get("ranks", 1) if changes.get("fsdp2") else 1

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


def resident(run: Run) -> dict[str, int]:
    """Bytes of what stays between the steps of a run, without what is assumed."""
    rollout = moments(replace(run, engine=""))["rollout"]
    return {name: size for name, size in rollout.items() if "assumed" not in name}


def peak_bytes(function: Callable[[], Any]) -> int:
    """Most bytes that torch's CPU allocator had out beyond what it had before, by its own account."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()

    # The profiler's list is not in the order of time, and frees are negative.
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = 0
    most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most
