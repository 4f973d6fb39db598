"""Low-bit weights: one function makes them, one object owns them; forward, sync and export read them.

Schemes, formats and their bytes are those of compressed-tensors. In the order of a weight's way:

    scheme.py     what a low-bit weight may be: a `QuantizationScheme` in the table of `supported.py`
    quantize.py   the one producer: `quantize_weight(weight, scheme)` gives a `LowBitWeight`, by `reference.py`
    store.py      the one owner: `LowBitStore` calls the producer, and keeps its result until the weight changes
    layers/       ask the store, multiply, and send gradients straight through; `layer.py` and `matmul.py` first
    gemms/        the products, which round as the engine's do
    stream.py     all weights of the store under their names in a checkpoint, for weight syncs and files
    convert.py    the way in: the layers of a model that `match.py` finds become such layers, in place, with one store

The rest is for those who need it: `sharding/` (FSDP2 and ZeRO-3), `start.py` and `source.py` (start from a quantized
checkpoint), `modifier.py` (llm-compressor's recipes), `names.py` and `cuda_kernels.py` (fewer launches, same bytes).
"""

from .convert import apply_quantization, remove_quantization
from .layers.layer import quantized_modules
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
