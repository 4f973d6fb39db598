"""Seconds of an optimizer step: bytes of all entries, and the products of Muon."""

from __future__ import annotations

from ..gpus import Gpu
from ..memory.learner import optimizer_state, trained_bytes
from ..run import Parameter, Run
from .costs import Costs


# Newton-Schulz iterations of Muon: torch's default (`torch.optim.Muon`, `ns_steps`), which `optim.py` keeps.
ITERATIONS = 5


def optimizer_seconds(run: Run, gpu: Gpu, costs: Costs) -> float:
    """
    Seconds of an optimizer step on each GPU.

    Args:
        run: The run.
        gpu: The GPU.
        costs: What operations cost.
    """
    seconds = 0.0
    for parameter in run.parameters:
        if not parameter.trained:
            continue

        local = run.local_entries(parameter)
        seconds += costs.adam_bytes * local / (gpu.bandwidth * costs.bandwidth_share)
        if parameter.optimizer in ("muon", "experts"):
            share = local / parameter.entries
            seconds += share * _muon_seconds(parameter, gpu, costs)

    # Paged state comes to the GPU, and goes back.
    seconds += 2 * optimizer_state(run, paged=True) / costs.paging
    if run.ranks > 1 and not run.fsdp2:  # DDP sums all gradients: each goes out, and comes back
        seconds += 2 * trained_bytes(run) / (gpu.link * costs.link_share)
    return seconds


def _muon_seconds(parameter: Parameter, gpu: Gpu, costs: Costs) -> float:
    """Seconds of Muon's products for all matrices of a parameter, on one GPU."""
    *_, outputs, inputs = parameter.shape
    matrices = parameter.entries // (outputs * inputs)
    # Gate and up lie in one parameter, and are two matrices for Muon.
    if parameter.holds_experts and "gate_up" in parameter.name:
        matrices *= 2
        outputs //= 2

    # X X^T, its square, and their product with X.
    narrow = min(outputs, inputs)
    wide = max(outputs, inputs)
    flops = ITERATIONS * (4 * narrow**2 * wide + 2 * narrow**3)
    return matrices * max(flops / (gpu.bf16 * costs.bf16_share), costs.muon_matrix)
