"""Rounding noise: what two honest kernels differ by, put into the learner.

Two kernels that sum the same products in another order give sums that round to other bfloat16 numbers. In the block of
[`rounding_noise`] the learner makes such errors at random. How far they move its log-probs is the noise floor of the
sync check, in whose units an engine's mismatch is judged: it depends on the model and on its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...quant.layers.experts import QuantExperts
from ...quant.layers.layer import LowBitLayer
from ...quant.sharding.shards import shape_of
from .prompt import SEED


# bfloat16 keeps 8 significant bits: the relative difference of two kernels that round one sum differently.
ROUNDING = 2.0**-8

# Changes a product.
Change = Callable[[Tensor], Tensor]


@contextmanager
def rounding_noise(model: nn.Module) -> Iterator[None]:
    """
    Scale each product of each linear layer by `1 + u`, where `u` is uniform within one bfloat16 rounding.

    In a mixture these are also the router's logits, of which a small error chooses another expert, and the outputs of
    experts; of quantized experts both products, too.

    Args:
        model: The learner's model. Each context draws the same `u` for it.
    """
    add_noise = _noise_of(torch.Generator().manual_seed(SEED))

    with ExitStack() as stack:
        for module in model.modules():
            for context in _changed_products(module, add_noise):
                stack.enter_context(context)
        yield


def _noise_of(generator: torch.Generator) -> Change:
    """Scales each element of a tensor by a new `1 + u`."""

    def add_noise(products: Tensor) -> Tensor:
        # Drawn on the CPU, so that every device gets the same noise.
        u = torch.rand(products.shape, generator=generator) * (2 * ROUNDING) - ROUNDING
        factor = (1 + u).to(products.device)
        return (products.float() * factor).to(products.dtype)

    return add_noise


def _changed_products(module: nn.Module, change: Change) -> Iterator[Any]:
    """The contexts in which the products of one module are changed; none for a module that has no products."""
    # Also the head, which is not quantized: the engine's kernel rounds its sums, too.
    is_linear = isinstance(module, (nn.Linear, LowBitLayer))
    is_experts = _has_parameter(module, dimensions=3)
    # transformers' routers hold a matrix, but are no linear layers: they call `F.linear` with it.
    is_router = _has_parameter(module, dimensions=2) and not isinstance(module, nn.Embedding)

    if is_linear or is_experts:
        yield module.register_forward_hook(_output_hook(change))
    elif is_router:
        yield _changed_inside(module, change)

    if isinstance(module, QuantExperts):
        yield patch.object(module, "_matmul", _then(module._matmul, change))


def _has_parameter(module: nn.Module, dimensions: int) -> bool:
    """Whether a module has a parameter of so many dimensions of its own: 3 as experts, 2 as a router."""
    return any(len(shape_of(param)) == dimensions for param in module.parameters(recurse=False))


def _output_hook(change: Change) -> Callable[[nn.Module, Any, Any], Any]:
    """A forward hook that changes a module's output."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        # Other modules with parameters of three dimensions may return more than a tensor.
        return change(output) if isinstance(output, Tensor) else output

    return hook


def _then(function: Callable[..., Tensor], change: Change) -> Callable[..., Tensor]:
    """A function whose result is changed."""
    return lambda *args: change(function(*args))


@contextmanager
def _changed_inside(module: nn.Module, change: Change) -> Iterator[None]:
    """Change the products inside of the forward of a router, which returns more than its logits."""
    forward = module.forward

    def forward_with_changes(*args: Any, **kwargs: Any) -> Any:
        with _ChangedLinear(change):
            return forward(*args, **kwargs)

    with patch.object(module, "forward", forward_with_changes):
        yield


class _ChangedLinear(TorchFunctionMode):
    """Changes the results of `F.linear` in the block."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self._change = change

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        return self._change(output) if function is F.linear else output
