"""Low-bit weights: one function makes them, one object owns them; forward, sync and export read them."""

from .convert import apply_quantization, quantized_modules, remove_quantization
from .quantize import quantize_weight
from .scheme import resolve_scheme
from .store import LowBitStore, iter_low_bit_weights, low_bit_store


__all__ = [
    "LowBitStore",
    "apply_quantization",
    "iter_low_bit_weights",
    "low_bit_store",
    "quantize_weight",
    "quantized_modules",
    "remove_quantization",
    "resolve_scheme",
]
