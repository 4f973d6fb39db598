"""What is not quantized (norms, biases, embeddings), with the bfloat16 values that engine and file have.

Under autocast linear layers multiply in bfloat16, but norms and embeddings compute with their float32 master weights.
A sync sends bfloat16, so an update that is too small for it would change the learner alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers.layer import LowBitLayer


# Where an embedding keeps its hook of `round_rest`.
_HOOK = "_qarl_rounding"
# What takes roundings of other folders off a model: they know this one, and it does not know them.
_LEAVE_TOO: list[Callable[[nn.Module], None]] = []


class _Rounded(torch.autograd.Function):
    """Round to bfloat16 values in float32; the gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def rounded(x: Tensor) -> Tensor:
    """Round `x` to bfloat16 values, kept in float32; the gradient passes unrounded."""
    return _Rounded.apply(x.float())


def round_rest(model: nn.Module) -> None:
    """
    Make the norms and embeddings of a model compute with the bfloat16 values of their weights (paper Sec. 3.1).

    Names and parameters stay, and gradients are those of the unrounded weights. Linear layers are left alone: autocast
    rounds their weights. So are parameters of more than one dimension outside of embeddings: a rounded copy of experts
    would be large. A second call changes nothing.

    Args:
        model: A model that runs under bfloat16 autocast, whose parameters are whole.
    """
    module: Any
    for module in model.modules():
        if isinstance(module, nn.Linear | LowBitLayer | _RoundedVectors) or hasattr(module, _HOOK):
            continue
        if isinstance(module, nn.Embedding):
            setattr(module, _HOOK, module.register_forward_hook(_round_rows))
        elif _vectors(module):
            module.__class__ = _form_of(module.__class__)


def leave_rest(model: nn.Module) -> None:
    """
    Take back `round_rest`, and the roundings of [`leave_with_rest`].

    Args:
        model: Modified in place.
    """
    for leave in _LEAVE_TOO:
        leave(model)

    for module in model.modules():
        hook = vars(module).pop(_HOOK, None)
        if hook is not None:
            hook.remove()
        if isinstance(module, _RoundedVectors):
            module.__class__ = _stock_of(module)


def leave_with_rest(leave: Callable[[nn.Module], None]) -> None:
    """
    Let [`leave_rest`] take other roundings off a model, too.

    Args:
        leave: Takes them off. It is called with models that do not have them, too.
    """
    _LEAVE_TOO.append(leave)


class _RoundedVectors(nn.Module):
    """A module whose own vectors, in float32, are rounded while it runs."""

    # Neither `forward`, in whose place accelerate may put another in an instance, nor `__call__`, around which
    # transformers' layers put their checkpointing: a recomputation comes in behind it. All ways lead through this one.
    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        masters = _vectors(self)
        for name, parameter in masters.items():
            # Not by `setattr`, which takes nothing but a parameter.
            self._parameters[name] = rounded(parameter)  # type: ignore[assignment]
        try:
            return super()._call_impl(*args, **kwargs)
        finally:
            # After Ctrl-C, too: a rounded tensor would not be trained.
            self._parameters.update(masters)

    # pickle would look for this class under the name of the other.
    def __reduce__(self) -> tuple[Any, ...]:
        return _empty, (_stock_of(self),), self.__dict__


@cache
def _form_of(stock: type[nn.Module]) -> type[nn.Module]:
    """`stock` with rounded vectors."""
    # One class with the same name for all modules, because libraries find layers by both.
    return type(stock.__name__, (_RoundedVectors, stock), {"__module__": stock.__module__})


def _stock_of(module: nn.Module) -> Any:
    """The class that a module had before."""
    _, _, stock, *_ = type(module).__mro__
    return stock


def _empty(stock: Any) -> nn.Module:
    """A module without its state, which pickle and copy put in."""
    form = _form_of(stock)
    return form.__new__(form)


def _vectors(module: nn.Module) -> dict[str, Any]:
    """The weights of a module itself that are no matrices, in float32."""
    vectors = {}
    for name, parameter in module._parameters.items():
        # Within itself a module has tensors there, which are rounded already.
        if not isinstance(parameter, nn.Parameter):
            continue
        if parameter.dim() <= 1 and parameter.dtype == torch.float32:
            vectors[name] = parameter
    return vectors


def _round_rows(embedding: Any, args: tuple[Any, ...], rows: Tensor) -> Tensor:
    """The rows that an engine looks up: a hook, since a rounded copy of the whole table would be large."""
    if rows.dtype != torch.float32:
        return rows
    scale = getattr(embedding, "embed_scale", None)
    if not isinstance(scale, Tensor):
        return rounded(rows)

    # Gemma scales its rows. Engines round the row and the factor, and then their product.
    plain = F.embedding(args[0], embedding.weight, embedding.padding_idx)
    return rounded(rounded(plain) * scale.to(torch.bfloat16).float())
