"""`LowBitLayer`: what all layers have in common whose forward multiplies by low-bit weights.

A layer keeps the parameters, names and `state_dict` of the module that it was. It makes no low-bit weight itself: it
asks the [`~qarl_trl.quant.store.LowBitStore`] of its model, and says what that weight is made from.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Protocol

import torch
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor, nn

from ..gemms.gemm import Bias, Gemm, GemmChoice
from ..quantize import LowBitWeight
from .matmul import LowBitMatmul, SourceGradients


# What `convert` adds to a module, and `restore` takes away.
_ADDED = (
    "high_precision_class",
    "store",
    "scheme",
    "gemm_for",
    "gemm",
    "ran_in_training",
    "quantized_forward",
    "merged_with",
)


class WeightOwner(Protocol):
    """What layers need of the [`~qarl_trl.quant.store.LowBitStore`]."""

    def weight_of(self, layer: LowBitLayer, name: str) -> LowBitWeight: ...

    def rows_of(self, layer: LowBitLayer, parameter: str) -> LowBitWeight: ...

    def attach(self, model: nn.Module) -> None: ...


class LowBitLayer:
    """
    Base of the low-bit layers, made of modules in place by `convert`.

    Attributes:
        store: Owns the low-bit weights of the model.
        scheme: How the weights are quantized.
        gemm_for: Chooses the gemm in the first forward.
        gemm: The gemm, `None` before the first low-bit forward.
        ran_in_training: Whether a low-bit forward ran as training runs it: with gradients, if the layer is trained.
            What runs inside [`outside_training`] does not count.
        quantized_forward: `False` runs the forward in high precision, while sync and export still send low-bit
            weights: the paper's quantized-rollout baseline.
        merged_with: The layers that an engine merges with this one and that must share its global scale, if the scheme
            has one.
        high_precision_class: The module's class before.
        frozen_weight: The weight of a layer without master weights (`lora_base: frozen`); `None` for others.
    """

    store: WeightOwner
    scheme: QuantizationScheme
    gemm_for: GemmChoice
    gemm: Gemm | None
    ran_in_training: bool
    quantized_forward: bool
    merged_with: tuple[Any, ...]
    high_precision_class: type[Any]
    frozen_weight: LowBitWeight | None = None
    # The parameters whose quantized values FSDP2 may gather.
    gatherable: tuple[str, ...] = ()

    @classmethod
    def convert(
        cls, module: Any, scheme: QuantizationScheme, gemm: GemmChoice, quantized_forward: bool, store: WeightOwner
    ) -> None:
        """Make `module` a layer of this class, in place."""
        module.high_precision_class = type(module)
        module.__class__ = cls
        module.store = store
        module.scheme = scheme
        module.gemm_for = gemm
        module.gemm = None
        module.ran_in_training = False
        module.quantized_forward = quantized_forward
        module.merged_with = ()

    def restore(self) -> None:
        """Undo `convert`."""
        self.__class__ = self.high_precision_class
        for attribute in _ADDED:
            del self.__dict__[attribute]

    # What the store asks ---------------------------------------------------------------------------------------------

    def weight_names(self) -> tuple[str, ...]:
        """The names of the layer's low-bit weights: those that sync and export send."""
        raise NotImplementedError

    def source_names(self, name: str) -> tuple[str, ...]:
        """The names, in this module, of the parameters that the low-bit weight `name` is made from."""
        return (name,)

    def sources(self, name: str) -> list[Any]:
        """Those parameters, or the tensors that `torch.func` or FSDP2 put in their places."""
        return [attrgetter(source)(self) for source in self.source_names(name)]

    def to_quantize(self, name: str, *sources: Tensor) -> Tensor:
        """The matrix, or the stack of matrices, whose quantized form is the low-bit weight `name`."""
        (weight,) = sources
        return weight.detach()

    def depends_on(self, name: str) -> tuple[Any, ...]:
        """What else the low-bit weight `name` depends on, besides its sources: another value means another weight."""
        return tuple((layer.weight.data_ptr(), layer.weight._version) for layer in self.merged_with)

    # What a forward does ---------------------------------------------------------------------------------------------

    def low_bit(self, name: str | None = None) -> LowBitWeight:
        """The low-bit weight that a forward multiplies by now; without a name that of the layer's only weight."""
        if name is None:
            (name,) = self.weight_names()
        return self.store.weight_of(self, name)

    def choose_gemm(self, device: torch.device) -> Gemm:
        """The gemm of this layer; the first call chooses it."""
        if self.gemm is None:
            self.gemm = self.gemm_for(self.scheme, device)
        return self.gemm

    def multiply(
        self,
        x: Tensor,
        name: str,
        gemm: Gemm,
        *sources: Tensor,
        bias: Bias = None,
        source_gradients: SourceGradients | None = None,
    ) -> Tensor:
        """
        Multiply by the low-bit weight `name`, in autocast's dtype.

        Args:
            x: Input `(..., in)`.
            name: One of the layer's low-bit weights, also one that sync and export do not send (LoRA's base).
            gemm: From `choose_gemm`.
            sources: The tensors that get gradients, see [`~qarl_trl.quant.layers.matmul.LowBitMatmul`].
            bias: `(out,)` or `None`.
            source_gradients: Computes the gradients of several sources.
        """
        device = x.device.type
        dtype = x.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)

        # Autocast would change dtypes inside the quantizer and inside the gemm.
        with torch.autocast(device, enabled=False):
            weight = self.store.weight_of(self, name)
            if torch.is_grad_enabled() or self.trains_without_gradients(sources):
                self.ran_in_training = True
            return LowBitMatmul.apply(x, bias, weight, gemm, dtype, source_gradients, *sources)

    def trains_without_gradients(self, sources: tuple[Tensor, ...]) -> bool:
        """
        Whether the layer may run without gradients in the forward of a loss, as a frozen vision tower does.

        Args:
            sources: The tensors that would get gradients.
        """
        return not any(source.requires_grad for source in sources)

    def __getstate__(self) -> dict[str, Any]:
        # A gemm may hold a kernel's own form of the weight: a copy of the layer chooses its own.
        return vars(self) | {"gemm": None}


@contextmanager
def outside_training(model: nn.Module) -> Iterator[None]:
    """
    Do not count forwards in the block as training: `ran_in_training` of each layer is afterwards what it was before.

    The forward of a layer cannot tell that of a loss from those that sample, score or check, if nothing trains it.

    Args:
        model: The model with low-bit layers.
    """
    before = [(layer, layer.ran_in_training) for _, layer in quantized_modules(model)]
    try:
        yield
    finally:
        for layer, ran_in_training in before:
            layer.ran_in_training = ran_in_training


def forget_training(model: nn.Module) -> None:
    """Let no earlier forward of `model` count as training."""
    for _, layer in quantized_modules(model):
        layer.ran_in_training = False


def quantized_modules(model: nn.Module) -> Iterator[tuple[str, LowBitLayer]]:
    """The low-bit layers of `model` with their names, in module order."""
    for name, module in model.named_modules():
        if isinstance(module, LowBitLayer):
            yield name, module


@contextmanager
def multiplying(model: nn.Module, low_bits: bool) -> Iterator[None]:
    """
    Let the low-bit layers of a model multiply by low-bit weights in the block, or by master weights; afterwards as
    before.

    Args:
        model: A model. A frozen layer has no master weights.
        low_bits: Which of the two, whatever `quantize_learner` says.
    """
    layers = [layer for _, layer in quantized_modules(model)]
    before = [layer.quantized_forward for layer in layers]
    for layer in layers:
        layer.quantized_forward = low_bits
    try:
        yield
    finally:
        for layer, quantized in zip(layers, before, strict=True):
            layer.quantized_forward = quantized
