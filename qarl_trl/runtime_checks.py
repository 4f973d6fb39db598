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

from .config import QaRLConfig
from .llmcompressor.quantized_start import QuantizedSource
from .quant.experts import PROJECTIONS, QuantExperts
from .quant.linear import LowBitLayer
from .quant.model import MERGED_BY_ENGINES, quantized_modules
from .quant.names import checkpoint_modules, is_peft_model
from .quant.quantize import LowBitWeight
from .quant.scheme import support_of


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


def check_merged_layers(model: nn.Module) -> None:
    """
    Refuse what vLLM would refuse while it starts: layers that it merges into one, quantized in different ways.

    Raises:
        ValueError: naming the layers and what each has.
    """
    for parent_name, parent in model.named_modules():
        for names in MERGED_BY_ENGINES:
            layers = [getattr(parent, name, None) for name in names]
            if None in layers:
                continue
            schemes = [layer.scheme if isinstance(layer, LowBitLayer) else None for layer in layers]
            if any(scheme != schemes[0] for scheme in schemes):
                kinds = [
                    "high precision" if scheme is None else support_of(scheme).name + _group_of(scheme)
                    for scheme in schemes
                ]
                found = ", ".join(f"{name} {kind}" for name, kind in zip(names, kinds, strict=True))
                raise ValueError(
                    f"The engine merges {', '.join(names)} of {parent_name!r} into one layer, which has one scheme; they "
                    f"came as {found}. Give them one scheme, or ignore all of them."
                )


def _group_of(scheme: QuantizationScheme) -> str:
    size = scheme.weights.group_size
    return f" in groups of {size}" if size else ""


def check_mismatch(gap: float, args: QaRLConfig) -> None:
    """
    Stop when engine and learner disagree more than `args.mismatch_abort_threshold`.

    Args:
        gap (`float`): Mean absolute log-prob difference, nats per token. NaN stops too.

    Raises:
        RuntimeError: with the usual causes in the order of their likelihood.
    """
    threshold = args.mismatch_abort_threshold
    if threshold is None or gap <= threshold:
        return
    hints = [
        "stale engine: does the gap grow with every update? Compare publish/bytes and quant/code_flip_frac in the log;",
        f"wrong scheme: the engine and the learner must both run {args.quant_name!r}"
        + ("" if args.quant_learner else " (quant_learner=False: this gap is what the method removes)")
        + ";",
        f"sampling parameters: temperature={args.temperature}, top_p={args.top_p}, top_k={args.top_k}, "
        f"min_p={args.min_p} must describe the distribution that the learner scores;",
        "kernels: another attention implementation or dtype in the learner than in the engine.",
    ]
    raise RuntimeError(
        f"The mean log-prob gap between engine and learner is {gap:.4f} nats per token, above "
        f"mismatch_abort_threshold={threshold}. Likely causes:\n  - " + "\n  - ".join(hints)
    )


def check_layers_ran(model: nn.Module) -> None:
    """
    After the first step: every low-bit layer must have computed something.

    Raises:
        RuntimeError: naming the layers whose low-bit forward was bypassed.
    """
    bypassed = [name for name, m in quantized_modules(model) if m.quantized_forward and not m.has_run]
    if bypassed:
        raise RuntimeError(
            f"{len(bypassed)} quantized layers did not run in the first step (first: {bypassed[0]!r}): another library "
            "replaced their forward, or the batch does not reach them. Add them to `quant_ignore` if that is intended."
        )
