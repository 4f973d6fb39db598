"""Low-bit weights: one function makes them; forward, sync and export read them."""

from .convert import apply_quantization, quantized_modules, remove_quantization
from .quantize import quantize_weight
from .scheme import resolve_scheme
from .stream import iter_low_bit_weights


__all__ = [
    "apply_quantization",
    "iter_low_bit_weights",
    "quantize_weight",
    "quantized_modules",
    "remove_quantization",
    "resolve_scheme",
]
