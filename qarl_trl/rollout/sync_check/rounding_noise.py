"""Rounding noise in the learner: how far it moves log-probs is the noise floor of the sync check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...quant.experts import QuantExperts
from ...quant.layer import LowBitLayer
from ...quant.shards import shape_of
from .prompt import SEED


# bfloat16 keeps 8 significant bits: the relative difference of two kernels that round one sum differently.
ROUNDING = 2.0**-8


@contextmanager
def rounding_noise(model: nn.Module) -> Iterator[None]:
    """
    Scale each product of each linear layer by `1 + u`, where `u` is uniform within one bfloat16 rounding.

    In a mixture these are also the router's logits, of which a small error chooses another expert, and the outputs of
    experts; of quantized experts both products, too.

    Args:
        model: The learner's model. Each context draws the same `u` for it.
    """
    generator = torch.Generator().manual_seed(SEED)

    def disturbed(output: Tensor) -> Tensor:
        # Drawn on the CPU, so that every device gets the same noise.
        u = torch.rand(output.shape, generator=generator) * (2 * ROUNDING) - ROUNDING
        factor = (1 + u).to(output.device)
        return (output.float() * factor).to(output.dtype)

    def disturb(module: nn.Module, args: Any, output: Any) -> Any:
        # Other modules with parameters of three dimensions may return more than a tensor.
        return disturbed(output) if isinstance(output, Tensor) else output

    with ExitStack() as stack:
        for module in model.modules():
            # Also the head, which is not quantized: the engine's kernel rounds its sums, too.
            if isinstance(module, (nn.Linear, LowBitLayer)) or _has_parameter(module, dimensions=3):
                stack.enter_context(module.register_forward_hook(disturb))
            elif _has_parameter(module, dimensions=2) and not isinstance(module, nn.Embedding):
                stack.enter_context(_changed_products(module, disturbed))
            if isinstance(module, QuantExperts):
                multiply = module._matmul
                stack.enter_context(patch.object(module, "_matmul", _then(multiply, disturbed)))
        yield


def _has_parameter(module: nn.Module, dimensions: int) -> bool:
    """Whether a module has a parameter of so many dimensions of its own: 3 as experts, 2 as a router."""
    return any(len(shape_of(param)) == dimensions for param in module.parameters(recurse=False))


def _then(function: Callable[..., Tensor], change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """A function whose result is changed."""
    return lambda *args: change(function(*args))


@contextmanager
def _changed_products(module: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Change the products inside of the forward of a router, which returns more than its logits."""
    forward = module.forward

    def forward_with_changes(*args: Any, **kwargs: Any) -> Any:
        with _ChangedProducts(change):
            return forward(*args, **kwargs)

    with patch.object(module, "forward", forward_with_changes):
        yield


class _ChangedProducts(TorchFunctionMode):
    """Changes the results of `F.linear` in the block."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._change = change

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        return self._change(output) if function is F.linear else output
