"""Seconds of a weight sync: Python for each tensor, and bytes."""

from __future__ import annotations

from ..gpus import Gpu
from ..memory.engine import synced_bytes
from ..run import Parameter, Run
from .costs import COSTS, Costs
from .weights import is_expert, kind_of


def sync_seconds(run: Run, gpu: Gpu, costs: Costs = COSTS) -> float:
    """
    Seconds of a weight sync to a colocated engine, with the quantizing before it: Python for each tensor, and bytes.

    Args:
        run: The run.
        gpu: The GPU.
        costs: What operations cost.
    """
    only_adapter = run.frozen and not run.sleep  # an engine that sleeps loses its base
    seconds = costs.wake if run.sleep else 0.0
    for parameter in run.parameters:
        if only_adapter and not parameter.in_adapter:
            continue
        if parameter.in_adapter and not run.frozen:  # merged: it has no tensor of its own
            continue
        seconds += _sync_seconds_of(parameter, costs)

    size = synced_bytes(run)
    seconds += costs.sync_copies * size / run.engine_ranks / (gpu.bandwidth * costs.bandwidth_share)
    if run.fsdp2:  # each GPU gathers what it does not have
        seconds += size / (gpu.link * costs.link_share)
    return seconds


def _sync_seconds_of(parameter: Parameter, costs: Costs) -> float:
    """Python's seconds to sync one parameter."""
    if parameter.in_adapter:
        return costs.sync_adapter

    if is_expert(parameter):
        projections = 2 if "gate_up" in parameter.name else 1
        each = costs.sync_low_bit_expert if parameter.stored else costs.sync_expert
        return parameter.shape[0] * projections * each

    seconds = {"plain": costs.sync_tensor, "packed": costs.sync_packed, "rounded": costs.sync_rounded}
    return seconds[kind_of(parameter)]
