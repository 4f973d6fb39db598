"""Stacks of experts: one call of vLLM's loader for the matrices of all experts.

vLLM's reload calls a loader for each tensor of each expert, twice: once to count elements, and once to copy them
(`model_loader/reload/layerwise.py`). Qwen3-30B-A3B has 55,296 such tensors, whose Python takes longer than the copies.
The loader of experts also takes a tensor of three dimensions, for all experts at once, and does the same with it one
dimension further on (`RoutedExperts.weight_loader` in `layers/fused_moe/routed_experts.py`: `full_load`). vLLM itself
calls it for single experts alone, so the stacks of a stream are given to it here. What it copies them into, and what
kernels make of that, stays vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from ...quant.layers.experts import parts_of_stack, unstacked


# Where vLLM keeps a projection: the beginning of the names of its parameters, and its part of their rows.
_PLACES = {"gate_proj": ("w13", "w1"), "up_proj": ("w13", "w3"), "down_proj": ("w2", "w2")}
# Instead of the number of an expert, by which the loader indexes a parameter.
_ALL = slice(None)


def load_stacks(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """
    Load the stacks of a stream, and yield what else vLLM must load.

    Args:
        model: The engine's model. Its reload must have begun when it asks for the first tensor.
        weights: Names and tensors of a checkpoint, experts as stacks or one by one.

    Yields:
        Names and tensors of a checkpoint. Experts are among them one by one if an engine has only some of them, or
        has them in another form.
    """
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    layers = {layer.layer_name: layer for layer in model.modules() if isinstance(layer, RoutedExperts)}

    for name, tensor in weights:
        parts = parts_of_stack(name)
        if parts is None:
            yield name, tensor
            continue

        experts, projection, local = parts
        # vLLM has one place for the shapes of gate and up. It would count the second one for elements that it waits
        # for.
        if projection == "up_proj" and local == "weight_shape":
            continue

        place, shard = _PLACES[projection]
        layer: Any = layers.get(experts)
        parameter: Any = getattr(layer, f"{place}_{local}", None)
        if parameter is not None and _takes_stack(layer, parameter, tensor):
            parameter.weight_loader(parameter, tensor, f"{experts}.{place}_{local}", shard, _ALL)
        else:
            yield from unstacked(name, tensor)


def _takes_stack(layer: Any, parameter: Any, stack: Tensor) -> bool:
    """Whether a parameter of a layer of experts has all of the experts of a stack, in the same order and form."""
    # With expert parallelism it has some, and with replicas some of them twice.
    has_all = layer._expert_map is None and len(parameter) == len(stack)
    # Matrices, or the shapes of all. The loader takes numbers, the scales of whole matrices, for one expert only.
    is_known = stack.ndim == 3 or stack.shape == parameter.shape
    # vLLM 0.26 exchanges rows and columns of packed weights while it loads them, of single experts only.
    is_turned = getattr(parameter, "is_transposed", False)
    return has_all and is_known and not is_turned
