"""Low-bit weights: one producer, three readers (forward, sync, export)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .experts import QuantExperts
    from .linear import QuantLinear
    from .model import apply_quantization, quantized_modules, remove_quantization
    from .quantize import LowBitWeight, quantize_weight
    from .scheme import resolve_scheme
    from .state_dict import iter_low_bit_weights

__all__ = [
    "LowBitWeight",
    "QuantExperts",
    "QuantLinear",
    "apply_quantization",
    "iter_low_bit_weights",
    "quantize_weight",
    "quantized_modules",
    "remove_quantization",
    "resolve_scheme",
]

# Imported on first use: `qarl-trl schemes` reads a table of this package and needs no torch.
_HOMES = {
    "LowBitWeight": ".quantize",
    "QuantExperts": ".experts",
    "QuantLinear": ".linear",
    "apply_quantization": ".model",
    "iter_low_bit_weights": ".state_dict",
    "quantize_weight": ".quantize",
    "quantized_modules": ".model",
    "remove_quantization": ".model",
    "resolve_scheme": ".scheme",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
