"""Seconds of a weight sync: Python for each tensor, and bytes."""

from __future__ import annotations

from ..gpus import Gpu
from ..memory.engine import synced_bytes
from ..run import Parameter, Run
from .costs import COSTS, Costs
from .weights import kind_of


def sync_seconds(run: Run, gpu: Gpu, costs: Costs = COSTS) -> float:
    """
    Seconds of a weight sync to a colocated engine, with the quantizing before it: Python for each tensor, and bytes.

    Args:
        run: The run.
        gpu: The GPU.
        costs: What operations cost.
    """
    only_adapter = run.frozen and not run.sleep  # an engine that sleeps loses its base
    # A model without low bits is sent by TRL's names, and vLLM divides its experts.
    stacked = any(parameter.stored for parameter in run.parameters)
    seconds = costs.wake if run.sleep else 0.0
    for parameter in run.parameters:
        if only_adapter and not parameter.in_adapter:
            continue
        if parameter.in_adapter and not run.frozen:  # merged: it has no tensor of its own
            continue
        seconds += _sync_seconds_of(parameter, stacked, costs)

    size = synced_bytes(run)
    seconds += costs.sync_copies * size / run.engine_ranks / (gpu.bandwidth * costs.bandwidth_share)
    if run.fsdp2:  # each GPU gathers what it does not have
        seconds += size / (gpu.link * costs.link_share)
    return seconds


def _sync_seconds_of(parameter: Parameter, stacked: bool, costs: Costs) -> float:
    """Python's seconds to sync one parameter; `stacked` says whether experts are sent as stacks."""
    if parameter.in_adapter:
        return costs.sync_adapter

    if parameter.holds_experts:
        projections = 2 if "gate_up" in parameter.name else 1
        if stacked:
            return projections * (costs.sync_packed_stack if kind_of(parameter) == "packed" else costs.sync_stack)
        return projections * parameter.shape[0] * costs.sync_expert

    seconds = {"plain": costs.sync_tensor, "packed": costs.sync_packed, "rounded": costs.sync_rounded}
    return seconds[kind_of(parameter)]
