"""What the formulas of seconds ask of a parameter: how it is multiplied, and by how many of its entries."""

from __future__ import annotations

from ..gpus import Gpu
from ..run import Parameter, Run
from .costs import Costs


def kind_of(parameter: Parameter) -> str:
    """
    How an engine multiplies by a parameter: `"plain"`, `"packed"` (it dequantizes), or `"rounded"` (in 8 bits).

    Args:
        parameter: One of a run.
    """
    if not parameter.stored:
        return "plain"
    return "rounded" if parameter.rounds_inputs else "packed"


def products_per_second(kind: str, gpu: Gpu, costs: Costs) -> float:
    """
    Flop/s of the engine's products.

    Args:
        kind: From [`kind_of`].
        gpu: The GPU.
        costs: What operations cost.
    """
    if kind == "rounded":
        return gpu.eight_bits * costs.eight_bits_share
    share = costs.dequantizing_share if kind == "packed" else costs.bf16_share
    return gpu.bf16 * share


def expert_share(run: Run) -> float:
    """
    Share of the experts that a token uses; 1 for a dense model.

    Args:
        run: The run.
    """
    stacks = [parameter for parameter in run.in_layers if parameter.holds_experts]
    if not stacks:
        return 1.0
    return run.config.num_experts_per_tok / stacks[0].shape[0]


def active_entries(run: Run, parameter: Parameter) -> float:
    """
    Entries of a parameter by which a token is multiplied.

    Args:
        run: The run.
        parameter: One of it.
    """
    if len(parameter.shape) < 2:
        return 0.0
    if parameter.holds_experts:
        return parameter.entries * expert_share(run)
    return float(parameter.entries)
