"""Checks of what only a loaded model or a step can show.

Invariant: a layer that is skipped, a model that is not the one asked for, an engine that has drifted away: each stops the run
with what came, what was needed and what to do.
"""

from __future__ import annotations

from compressed_tensors.quantization import QuantizationScheme
from torch import nn

from .config import QaRLConfig
from .quant.experts import fused_experts
from .quant.linear import LowBitLayer
from .quant.model import MERGED_BY_ENGINES, quantized_modules
from .quant.names import is_peft_model
from .quant.scheme import support_of


NO_KERNELS = (
    "use_kernels=True replaces the forward of mixture-of-experts blocks by kernels from the Hub, and the low-bit experts "
    "would never run. Load the model without it."
)


def check_model(model: nn.Module) -> None:
    """
    Refuse a loaded model that is quantized by another library, whose adapters are not held by a `PeftModel`, or whose
    experts run in kernels of the Hub.

    Raises:
        ValueError: naming what was found.
    """
    if hasattr(model, "peft_config") and not is_peft_model(model):
        raise ValueError(
            "The model carries adapters that transformers loaded, which neither TRL nor the publish would see. Wrap it "
            "with peft: peft.PeftModel.from_pretrained(base_model, adapter, is_trainable=True), or pass `peft_config`."
        )
    foreign = getattr(model.config, "quantization_config", None)
    if foreign is not None or getattr(model, "is_quantized", False):
        raise ValueError(
            f"The model is quantized already (quantization_config={foreign}), so there are no high-precision masters to "
            "train. Start from the unquantized checkpoint. A compressed-tensors checkpoint can be given by its path "
            "(model='...'), or loaded with qarl_trl.llmcompressor.quantized_start.load_masters."
        )
    if getattr(model, "use_kernels", False) and any(fused_experts(model)):
        raise ValueError(NO_KERNELS)


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
