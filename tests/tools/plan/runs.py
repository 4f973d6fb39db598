"""Runs for tests of the plan: a recipe for 8 GPUs in numbers, with any of them replaced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from qarl_trl.tools.plan import items
from qarl_trl.tools.plan import model as meta
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
    rollout = items.moments(replace(run, engine=""))["rollout"]
    return {name: size for name, size in rollout.items() if "assumed" not in name}
