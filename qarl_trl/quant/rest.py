"""What is not quantized (norms, biases, embeddings), with the bfloat16 values that engine and file have.

Under autocast linear layers multiply in bfloat16, but norms and embeddings compute with their float32 master weights.
A sync sends bfloat16, so an update that is too small for it would change the learner alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .layers.layer import LowBitLayer


# Where a module keeps its hooks of `round_rest`, and its weights while it runs on rounded ones.
_HOOKS = "_qarl_rounding"
_MASTERS = "_qarl_masters"


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
    rounds their weights. A second call changes nothing.

    Args:
        model: A model that runs under bfloat16 autocast, whose parameters are whole.
    """
    for module in model.modules():
        if hasattr(module, _HOOKS) or isinstance(module, nn.Linear | LowBitLayer):
            continue
        if isinstance(module, nn.Embedding):
            # Of its rows a few: a rounded copy of the whole table would be large.
            hooks = (module.register_forward_hook(_round_output), _RoundedScale(module))
        elif _vectors(module):
            hooks = (
                module.register_forward_pre_hook(_put_rounded),
                # After an error too, as the one by which torch ends a recomputation early.
                module.register_forward_hook(_put_back, always_call=True),
            )
        else:
            continue
        setattr(module, _HOOKS, hooks)


def leave_rest(model: nn.Module) -> None:
    """
    Take `round_rest` back.

    Args:
        model: Modified in place.
    """
    for module in model.modules():
        for hook in vars(module).pop(_HOOKS, ()):
            hook.remove()


def _vectors(module: nn.Module) -> dict[str, Tensor]:
    """Weights of a module itself that are no matrices, in float32."""
    # Autocast rounds the matrices of a product.
    vectors = {}
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.dim() <= 1 and parameter.dtype == torch.float32:
            vectors[name] = parameter
    return vectors


def _put_rounded(module: nn.Module, args: Any) -> None:
    """Before a forward: rounded weights in place of the master weights."""
    masters = _vectors(module)
    setattr(module, _MASTERS, masters)
    for name, parameter in masters.items():
        # Not by `setattr`, which takes nothing but a parameter.
        module._parameters[name] = rounded(parameter)  # type: ignore[assignment]


def _put_back(module: nn.Module, args: Any, output: Any) -> None:
    """After it: the master weights."""
    module._parameters.update(vars(module).pop(_MASTERS, {}))


def _round_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Round the rows of an embedding."""
    return rounded(output) if output.dtype == torch.float32 else output


class _RoundedScale:
    """
    Rounds the factor of an embedding that scales its rows, as engines have it (Gemma); `remove` takes that back.

    Args:
        embedding: The module.
    """

    def __init__(self, embedding: nn.Module) -> None:
        scale = getattr(embedding, "embed_scale", None)
        self._scale = scale if isinstance(scale, Tensor) else None
        if self._scale is not None:
            self._before = self._scale.clone()
            self._scale.copy_(self._scale.to(torch.bfloat16))

    def remove(self) -> None:
        if self._scale is not None:
            self._scale.copy_(self._before)
