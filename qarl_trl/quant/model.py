"""`apply_quantization`: turn the linear layers of a model into low-bit layers, in place, and back.

Invariant: a layer that matches the targets is quantized or the call fails; parameter names, `state_dict` and the
module tree stay as they were, because only `module.__class__` changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from torch import nn

from .checks import check_layers, check_model, check_qparams
from .experts import QuantExperts, checkpoint_layers, stacked_qparams, whole_experts
from .gemm import ProductChoice, plain_gemm
from .linear import LowBitLayer, QParams, QuantLinear
from .names import checkpoint_modules
from .plan import match, resolve_config, single_group
from .scheme import DEFAULT_IGNORE, has_global_scale, resolve_scheme


MERGED_BY_ENGINES = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("w1", "w3"),
)


def apply_quantization(
    model: nn.Module,
    scheme: str | QuantizationScheme | QuantizationConfig,
    targets: Sequence[str] = ("Linear",),
    ignore: Sequence[str] = DEFAULT_IGNORE,
    *,
    group_size: int | None = None,
    gemm: ProductChoice = plain_gemm,
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
        product: From scheme and device to what multiplies; the engine's products are in `qarl_trl.rollout.gemm`.
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
    experts, linears = _matched(model, plan, qparams)
    if not isinstance(scheme, QuantizationConfig):
        plan.config_groups["group_0"].targets = ["Linear"]  # an export lists what is not quantized
    check_layers(model, experts, linears, gemm, frozen=qparams is not None)
    merged = list(_with_one_scale(model, {id(module): layer_scheme for _, module, layer_scheme in linears}))
    for name, module, layer_scheme in experts:
        frozen = {} if qparams is None else stacked_qparams(name, module, qparams)
        QuantExperts.convert(module, layer_scheme, gemm, quantize_forward, frozen)
    for name, module, layer_scheme in linears:
        frozen = {} if qparams is None else {"weight": qparams[name]}
        _low_bit_class(module).convert(module, layer_scheme, gemm, quantize_forward, frozen)
    for layers in merged:
        for layer in layers:
            layer.merged_with = tuple(other for other in layers if other is not layer)
    return model


def remove_quantization(model: nn.Module) -> nn.Module:
    """Turn every low-bit layer of `model` back into the class it had. Master weights are untouched."""
    for _, module in quantized_modules(model):
        module.restore()
    return model


def quantized_modules(model: nn.Module) -> Iterable[tuple[str, LowBitLayer]]:
    """The low-bit layers of `model` with their names, in module order."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LowBitLayer))


def _matched(model: nn.Module, plan: QuantizationConfig, qparams: Mapping[str, QParams] | None) -> tuple[list, list]:
    """The experts and the linear layers that `plan` quantizes, each with name, module and scheme."""
    found = match(checkpoint_layers(model, plan.ignore or ()), plan)
    if qparams is not None:
        check_qparams({name for name, _, _ in found}, set(qparams))
    experts, linears = whole_experts(model, found)
    modules = dict(checkpoint_modules(model))  # adapter layers, in the place of what they wrap
    return experts, [(name, modules[name], scheme) for name, _, scheme in linears]


def merged_by_engines(model: nn.Module) -> Iterator[tuple[str, tuple[str, ...], list[nn.Module]]]:
    """Layers that vLLM loads into one matrix: name of their parent, their own names, the layers."""
    for parent_name, parent in model.named_modules():
        for names in MERGED_BY_ENGINES:
            layers = [getattr(parent, name, None) for name in names]
            if None not in layers:
                yield parent_name, names, layers


def _with_one_scale(model: nn.Module, schemes: Mapping[int, QuantizationScheme]) -> Iterator[list[nn.Module]]:
    """Merged layers whose scheme has a global scale, which they share; `schemes` by the `id` of the layer."""
    for parent_name, names, layers in merged_by_engines(model):
        found = [schemes.get(id(layer)) for layer in layers]
        shared = [scheme is not None and has_global_scale(scheme) for scheme in found]
        if any(shared) and not all(shared):
            raise ValueError(
                f"Of {names} in {parent_name!r} only some would be quantized with a global scale, and the engine merges "
                "them into one layer. Quantize or ignore all of them."
            )
        if any(shared):
            yield layers


def _low_bit_class(module: nn.Module) -> type[LowBitLayer]:
    if not hasattr(module, "base_layer"):
        return QuantLinear
    from .lora import LoraQuantLinear

    return LoraQuantLinear


def bypassed_layers(model: nn.Module) -> list[str]:
    """Names of the layers whose low-bit forward was never used, though they have one."""
    return [name for name, layer in quantized_modules(model) if layer.quantized_forward and not layer.has_run]
