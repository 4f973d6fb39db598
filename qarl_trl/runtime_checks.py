"""Checks of what only a loaded model or a step can show.

Invariant: a layer that is skipped, a model that is not the one asked for, an engine that has drifted away: each stops the run
with what came, what was needed and what to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate.logging import get_logger
from compressed_tensors.quantization import QuantizationScheme, QuantizationType
from torch import nn

from .llmcompressor.quantized_start import QuantizedSource
from .quant.experts import PROJECTIONS, QuantExperts
from .quant.linear import LowBitLayer
from .quant.model import quantized_modules
from .quant.names import checkpoint_modules, is_peft_model
from .quant.quantize import LowBitWeight


logger = get_logger(__name__)


def check_first_codes(model: nn.Module, source: QuantizedSource) -> None:
    """
    With frozen scales: the codes of the loaded masters are those of the checkpoint.

    8-bit integers are the exception: code times scale has more digits than bfloat16, so a few codes come back one step off.
    That is logged. A zero may come back with another sign (float8 has two).

    Raises:
        RuntimeError: when other codes than these differ, because then the masters are not the checkpoint.
    """
    total = differing = 0
    with _base_weights(model):
        for name, weight in _low_bit_weights(model):
            stored = source.codes(name).to(weight.codes.device)
            if weight.codes.dtype == torch.float8_e4m3fn:
                wrong = (weight.codes.float() != stored.float()).sum().item()  # by value: -0.0 is 0.0
            else:
                wrong = (weight.codes.view(torch.uint8) != stored.view(torch.uint8)).sum().item()
            if wrong and not _is_int8(weight.scheme):
                raise RuntimeError(
                    f"{wrong} codes of layer {name!r} differ from those in {source.name}, although its scales are frozen. "
                    "The masters were not loaded as they are stored; use tested versions of transformers and "
                    "compressed-tensors."
                )
            differing, total = differing + wrong, total + stored.view(torch.uint8).numel()
    if differing:
        logger.warning(
            "%d of %d codes (%.4f %%) start one step beside those of %s: an 8-bit integer code times its scale is no "
            "bfloat16 number.",
            differing,
            total,
            100 * differing / total,
            source.name,
        )


@contextmanager
def _base_weights(model: nn.Module) -> Iterator[None]:
    """In a `PeftModel` the low-bit weights of the base alone, which nothing keeps afterwards."""
    if not is_peft_model(model):
        yield
        return
    with model.disable_adapter():
        yield
    for _, module in quantized_modules(model):
        module.forget()


def _low_bit_weights(model: nn.Module) -> Iterator[tuple[str, LowBitWeight]]:
    """The low-bit weights of `model` by their layers' names in a checkpoint; none of a layer that is a shard (ZeRO-3)."""
    for name, module in checkpoint_modules(model):
        if not isinstance(module, LowBitLayer) or any(p.numel() == 0 for p in module.parameters()):
            continue
        if isinstance(module, QuantExperts):
            for parameter in PROJECTIONS:
                module.low_bit(parameter)
            yield from ((f"{name}.{local}", weight) for local, weight in module.last_low_bits())
        else:
            yield name, module.low_bit()


def _is_int8(scheme: QuantizationScheme) -> bool:
    return scheme.weights.num_bits == 8 and scheme.weights.type == QuantizationType.INT
