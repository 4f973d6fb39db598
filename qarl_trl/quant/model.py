"""`apply_quantization`: turn the linear layers of a model into low-bit layers, in place, and back.

Invariant: a layer that matches the targets is quantized or the call fails; parameter names, `state_dict` and the
module tree stay as they were, because only `module.__class__` changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from torch import nn

from .experts import QuantExperts
from .gemm import GemmChoice, plain_gemm
from .layers import check_layers, check_model, match_layers, merged_by_engines
from .linear import LowBitLayer, QParams, QuantLinear
from .scheme import DEFAULT_IGNORE, has_global_scale, resolve_config, resolve_scheme, single_group


def apply_quantization(
    model: nn.Module,
    scheme: str | QuantizationScheme | QuantizationConfig,
    targets: Sequence[str] = ("Linear",),
    ignore: Sequence[str] = DEFAULT_IGNORE,
    *,
    group_size: int | None = None,
    gemm: GemmChoice = plain_gemm,
    quantize_forward: bool = True,
    qparams: Mapping[str, QParams] | None = None,
) -> nn.Module:
    """
    Give the matching linear layers of `model` a low-bit forward with straight-through gradients; returns `model`.

    In a `PeftModel` a layer with a LoRA adapter computes with its quantized merged weight, one without as usual.
    Experts count as one linear layer per expert and projection, under the names of the checkpoint.

    Args:
        model: Modified in place. Master weights keep their dtype; quantization starts from their bfloat16 cast. All names are those
            of the base model of a `PeftModel`.
        scheme: Preset name (`"W4A16"`, `"FP8_DYNAMIC"`), a scheme, or a configuration of several groups
            ([`~qarl_trl.quant.recipe.read_recipe`]), which has its own targets, ignore list and group sizes.
        targets: Class names, module names, or `re:` patterns, as in compressed-tensors.
        ignore: Modules left alone, same syntax. Defaults to `lm_head` and routers, as in `QaRLConfig`.
        group_size: Weights per scale for a preset with groups; `-1` is per channel.
        gemm: From scheme and device to what multiplies; the engine's are in `qarl_trl.rollout.gemm`.
        quantize_forward: `False` keeps the forward in high precision.
        qparams: Frozen scale and zero point of every quantized layer, by its name. Without it they follow the weights.

    Raises:
        ValueError: for a model, a layer, experts or an adapter that cannot be quantized; when nothing matches.
    """
    if isinstance(scheme, QuantizationConfig):
        plan = resolve_config(scheme)
    else:
        plan = single_group(resolve_scheme(scheme, group_size), targets, ignore)
    check_model(model)
    layers = match_layers(model, plan)
    check_layers(model, layers, gemm, qparams)
    for _, module, layer_scheme, weights in layers:
        frozen = {} if qparams is None else {key: _stacked(qparams, names) for key, names in weights.items()}
        _low_bit_class(module).convert(module, layer_scheme, gemm, quantize_forward, frozen)
    if not isinstance(scheme, QuantizationConfig):
        plan.config_groups["group_0"].targets = ["Linear"]  # an export lists what is not quantized
    for _, _, merged in merged_by_engines(model) if any(map(has_global_scale, plan.config_groups.values())) else ():
        for layer in merged:
            if isinstance(layer, LowBitLayer) and has_global_scale(layer.scheme):
                layer.merged_with = tuple(other for other in merged if other is not layer)
    return model


def remove_quantization(model: nn.Module) -> nn.Module:
    """Turn every low-bit layer of `model` back into the class it had. Master weights are untouched."""
    for _, module in quantized_modules(model):
        module.restore()
    return model


def quantized_modules(model: nn.Module) -> Iterable[tuple[str, LowBitLayer]]:
    """The low-bit layers of `model` with their names, in module order."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LowBitLayer))


def bypassed_layers(model: nn.Module) -> list[str]:
    """Names of the layers whose low-bit forward was never used, though they have one."""
    return [name for name, layer in quantized_modules(model) if layer.quantized_forward and not layer.has_run]


def _low_bit_class(module: nn.Module) -> type[LowBitLayer]:
    if hasattr(module, "base_layer"):
        from .lora import LoraQuantLinear  # imports peft, which nothing else needs

        return LoraQuantLinear
    return QuantLinear if isinstance(module, nn.Linear) else QuantExperts


def _stacked(qparams: Mapping[str, QParams], names: Sequence[str]) -> QParams:
    """Scales and zero points of the layers `names`, one above the other, as a parameter holds their rows."""
    scales, zero_points = zip(*(qparams[name] for name in names), strict=True)
    return torch.cat(scales), None if zero_points[0] is None else torch.cat(zero_points)
