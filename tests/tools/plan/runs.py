"""Runs for tests of the plan: a recipe for 8 GPUs in numbers, with any of them replaced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from qarl_trl.tools.plan import items
from qarl_trl.tools.plan import model as meta
from qarl_trl.tools.plan.items import GIB, Run


def example_run(model: nn.Module, config: PretrainedConfig, muon: bool = True, **changes: Any) -> Run:
    ranks = changes.get("ranks", 1) if changes.get("fsdp2") else 1
    settings = {
        "parameters": meta.parameters(model, "muon" if muon else "adamw_torch", ranks),
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
    return Run(**settings | changes)


def resident(run: Run) -> dict[str, int]:
    """What stays between the steps of a run, without what is assumed."""
    rollout = items.moments(replace(run, engine=""))["rollout"]
    return {name: size for name, size in rollout.items() if "assumed" not in name}
